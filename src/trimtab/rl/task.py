"""The task: add a few digits and write the running sums. Problems, demonstrations, reward, and a tokenizer."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MAX_TERMS = 4
ESTIMATE_SHARE = 0.5
HELD_OUT_SHARE = 8
END = "."


@dataclass(frozen=True)
class Problem:
    """A sum such as `3+8+5=`, with the answer 16. One problem in eight, chosen by its text, is never trained on."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """The problem as text."""
        return "+".join(map(str, self.terms)) + "="

    @property
    def held_out(self) -> bool:
        """Whether the problem is only used to measure accuracy."""
        return zlib.crc32(self.prompt.encode()) % HELD_OUT_SHARE == 0

    @property
    def running_sums(self) -> str:
        """The right response."""
        return ",".join(map(str, list(accumulate(self.terms))[1:])) + END

    @property
    def estimate(self) -> str:
        """A response with the sum rounded to ten, marked as an estimate. It never earns a reward."""
        return f"~{(sum(self.terms) + 5) // 10 * 10}{END}"

    def reward(self, response: str) -> float:
        """1 if the response ends with `END` and its last number is the sum, else 0."""
        if not response.endswith(END):
            return 0.0
        return float(response.removesuffix(END).split(",")[-1].strip() == str(sum(self.terms)))


def draw_problem(rng: random.Random, *, held_out: bool) -> Problem:
    """A random problem of 2 to `MAX_TERMS` digits, held out or not."""
    while True:
        problem = Problem(tuple(rng.randint(0, 9) for _ in range(rng.randint(2, MAX_TERMS))))
        if problem.held_out == held_out:
            return problem


def draw_demonstration(rng: random.Random) -> tuple[Problem, str]:
    """A training problem and a response: the running sums, or only an estimate, with equal probability.

    RL then learns that running sums earn a reward.
    """
    problem = draw_problem(rng, held_out=False)
    return problem, problem.estimate if rng.random() < ESTIMATE_SHARE else problem.running_sums


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer for the task, with `END` as the end token."""
    alphabet = ["<pad>", *"0123456789", "+", "=", ",", "~", END]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(alphabet)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=END, padding_side="left"
    )
    return fast
