"""The task: lists of digits and what to do with them. Problems, demonstrations, reward, and a tokenizer.

The warm start has all operations, so that experts specialise in some of them. RL trains only sums. As in RL of a large
model on a narrow task, the routing is then uneven: experts of the other operations have little to do.
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
SUM_SHARE = 0.3
SUM = "+"
DIGITS, LETTERS = "0123456789", "abcdefghij"


def _as_letters(numbers: Iterable[int]) -> list[str]:
    return [LETTERS[number % len(LETTERS)] for number in numbers]


# Parts of the right response, by the sign between the terms of a prompt.
OPERATIONS: dict[str, Callable[[tuple[int, ...]], list[str]]] = {
    SUM: lambda terms: [str(total) for total in accumulate(terms)][1:],
    "<": lambda terms: _as_letters(sorted(terms)),
    "|": lambda terms: _as_letters(terms[::-1]),
    ">": lambda terms: _as_letters(term + 1 for term in terms),
    "^": lambda terms: _as_letters(accumulate(terms, max)),
}


@dataclass(frozen=True)
class Problem:
    """A problem such as `3+8+5=`, with the response `11,16.`. One in eight, chosen by its text, is never trained on."""

    terms: tuple[int, ...]
    operation: str = SUM

    @property
    def prompt(self) -> str:
        """The problem as text."""
        symbols = DIGITS if self.operation == SUM else LETTERS
        return self.operation.join(symbols[term] for term in self.terms) + "="

    @property
    def held_out(self) -> bool:
        """Whether the problem is only used to measure accuracy."""
        return zlib.crc32(self.prompt.encode()) % HELD_OUT_SHARE == 0

    @property
    def response(self) -> str:
        """The right response; the running sums, for a sum."""
        return ("," if self.operation == SUM else "").join(OPERATIONS[self.operation](self.terms)) + END

    @property
    def estimate(self) -> str:
        """A response with the sum rounded to ten, marked as an estimate. It never earns a reward."""
        return f"~{(sum(self.terms) + 5) // 10 * 10}{END}"

    def reward(self, response: str) -> float:
        """1 if the response ends with `END` and its last number is that of the right response, else 0."""
        if not response.endswith(END):
            return 0.0
        return float(_last_number(response) == _last_number(self.response))


def _last_number(response: str) -> str:
    return response.removesuffix(END).split(",")[-1].strip()


def draw_problem(rng: random.Random, *, held_out: bool, operation: str = SUM) -> Problem:
    """A random problem of 2 to `MAX_TERMS` digits, held out or not."""
    while True:
        problem = Problem(tuple(rng.randint(0, 9) for _ in range(rng.randint(2, MAX_TERMS))), operation)
        if problem.held_out == held_out:
            return problem


def draw_demonstration(rng: random.Random) -> tuple[Problem, str]:
    """A training problem of any operation and a response: the right one, or for half of the sums only an estimate.

    RL then learns that running sums earn a reward.
    """
    problem = draw_problem(
        rng, held_out=False, operation=SUM if rng.random() < SUM_SHARE else rng.choice([*OPERATIONS][1:])
    )
    is_estimate = problem.operation == SUM and rng.random() < ESTIMATE_SHARE
    return problem, problem.estimate if is_estimate else problem.response


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer for the task, with `END` as the end token."""
    alphabet = ["<pad>", *DIGITS, *LETTERS, *OPERATIONS, "=", ",", "~", END]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(alphabet)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=END, padding_side="left"
    )
    return fast
