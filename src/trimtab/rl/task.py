"""Tasks: operations on numbers and letters. Problems, demonstrations, reward, and a tokenizer.

The warm start has several operations, so that experts specialise in some of them. RL trains only that of its task. As
in RL of a large model on a narrow task, the routing is then uneven: experts of the other operations have little to do.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MAX_TERMS = 4
ESTIMATE_SHARE = 0.5
HELD_OUT_SHARE = 8
END = "."
SUM, REMAINDER = "+", "%"
# Operation of a task, by the task's name.
TASKS = {"sums": SUM, "remainders": REMAINDER}
# Part of the demonstrations that have the operation of the task.
SHARES = {SUM: 0.3, REMAINDER: 0.6}
DIGITS, LETTERS = "0123456789", "abcdefghij"


def _as_letters(numbers: Iterable[int]) -> list[str]:
    return [LETTERS[number % len(LETTERS)] for number in numbers]


# Parts of the right response, by the sign between the terms of a prompt. For a remainder, all numbers down to it.
OPERATIONS: dict[str, Callable[[tuple[int, ...]], list[str]]] = {
    SUM: lambda terms: [str(total) for total in accumulate(terms)][1:],
    REMAINDER: lambda terms: [str(left) for left in range(terms[0] - terms[1], -1, -terms[1])],
    "<": lambda terms: _as_letters(sorted(terms)),
    "|": lambda terms: _as_letters(terms[::-1]),
    ">": lambda terms: _as_letters(term + 1 for term in terms),
    "^": lambda terms: _as_letters(accumulate(terms, max)),
}


@dataclass(frozen=True)
class Problem:
    """A problem such as `3+8+5=`, with the response `11,16.`, or `30%8=`, with the response `22,14,6.`.

    One in eight, chosen by its text, is never trained on.
    """

    terms: tuple[int, ...]
    operation: str = SUM

    @property
    def prompt(self) -> str:
        """The problem as text."""
        texts = map(str, self.terms) if self.has_numbers else _as_letters(self.terms)
        return self.operation.join(texts) + "="

    @property
    def has_numbers(self) -> bool:
        """Whether terms and response are numbers; else they are letters."""
        return self.operation in TASKS.values()

    @property
    def held_out(self) -> bool:
        """Whether the problem is only used to measure accuracy."""
        return zlib.crc32(self.prompt.encode()) % HELD_OUT_SHARE == 0

    @property
    def response(self) -> str:
        """The right response; for a sum the running sums, for a remainder the running differences."""
        return ("," if self.has_numbers else "").join(OPERATIONS[self.operation](self.terms)) + END

    @property
    def estimate(self) -> str:
        """A response with the result rounded to ten, marked as an estimate. It never earns a reward."""
        return f"~{(int(OPERATIONS[self.operation](self.terms)[-1]) + 5) // 10 * 10}{END}"

    def reward(self, response: str) -> float:
        """1 if the response ends with `END` and its last number is that of the right response, else 0."""
        if not response.endswith(END):
            return 0.0
        return float(_last_number(response) == _last_number(self.response))


def _last_number(response: str) -> str:
    return response.removesuffix(END).split(",")[-1].strip()


def draw_problem(rng: random.Random, *, held_out: bool, operation: str = SUM) -> Problem:
    """A random problem, held out or not: a number of two digits and a divisor of 3 to 9, or 2 to `MAX_TERMS` digits.

    Responses to remainders have 1 to 33 numbers, most of them few.
    """
    while True:
        if operation == REMAINDER:
            terms: tuple[int, ...] = rng.randint(10, 99), rng.randint(3, 9)
        else:
            terms = tuple(rng.randint(0, 9) for _ in range(rng.randint(2, MAX_TERMS)))
        problem = Problem(terms, operation)
        if problem.held_out == held_out:
            return problem


def draw_demonstration(rng: random.Random, operation: str = SUM) -> tuple[Problem, str]:
    """A training problem and a response: the right one, or for half of the problems of the task only an estimate.

    RL then learns that running sums or differences earn a reward.

    Args:
        operation: of the task. Other demonstrations have one of the operations that belong to no task.
    """
    others = [sign for sign in OPERATIONS if sign not in TASKS.values()]
    chosen = operation if rng.random() < SHARES[operation] else rng.choice(others)
    problem = draw_problem(rng, held_out=False, operation=chosen)
    is_estimate = chosen == operation and rng.random() < ESTIMATE_SHARE
    return problem, problem.estimate if is_estimate else problem.response


def build_tokenizer(operation: str = SUM) -> PreTrainedTokenizerFast:
    """A character tokenizer for the task with this operation, with `END` as the end token."""
    signs = [sign for sign in OPERATIONS if sign == operation or sign not in TASKS.values()]
    alphabet = ["<pad>", *DIGITS, *LETTERS, *signs, "=", ",", "~", END]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(alphabet)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=END, padding_side="left"
    )
    return fast
