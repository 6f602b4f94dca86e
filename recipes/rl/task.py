"""Tasks: operations on numbers and letters. Problems, rewards, demonstrations, tokenizer, and the model that learns.

The warm start has several operations, so that experts specialise in some of them. RL trains only that of its task. As
in RL of a large model on a narrow task, the routing is then uneven: experts of the other operations have little to do.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from trimtab.errors import InputError
from trimtab.integrations.transformers import SUPPORTED_MODEL_TYPES

MAX_TERMS = 4
HELD_OUT_SHARE = 8
END = "."
SUM, COUNT = "+", ":"
# Operation of a task, by the task's name; its part of the demonstrations; the part of these that are estimates.
TASKS = {"sums": SUM, "counting": COUNT}
SHARES = {SUM: 0.3, COUNT: 0.6}
ESTIMATE_SHARES = {SUM: 0.5, COUNT: 0.8}
# Longest responses by default, and most numbers of a response of counting.
LONGEST_RESPONSES = {"sums": 20, "counting": 100}
MOST_COUNTED = 33
DIGITS, LETTERS = "0123456789", "abcdefghij"


def _as_letters(numbers: Iterable[int]) -> list[str]:
    return [LETTERS[number % len(LETTERS)] for number in numbers]


# Parts of the right response, by the sign between the terms of a prompt.
OPERATIONS: dict[str, Callable[[tuple[int, ...]], list[str]]] = {
    SUM: lambda terms: [str(total) for total in accumulate(terms)][1:],
    COUNT: lambda terms: [str(number) for number in reversed(range(terms[-1]))],
    "<": lambda terms: _as_letters(sorted(terms)),
    "|": lambda terms: _as_letters(terms[::-1]),
    ">": lambda terms: _as_letters(term + 1 for term in terms),
    "^": lambda terms: _as_letters(accumulate(terms, max)),
}


@dataclass(frozen=True)
class Problem:
    """A problem such as `3+8+5=`, with the response `11,16.`, or `gb:4=`, with the response `3,2,1,0.`

    One in eight, chosen by its text, is never trained on.
    """

    terms: tuple[int, ...]
    operation: str = SUM

    @property
    def prompt(self) -> str:
        """The problem as text."""
        if self.operation == COUNT:
            # The letters make problems with one number different, and mean nothing.
            return "".join(_as_letters(self.terms[:-1])) + f"{COUNT}{self.terms[-1]}="
        texts = map(str, self.terms) if self.has_numbers else _as_letters(self.terms)
        return self.operation.join(texts) + "="

    @property
    def has_numbers(self) -> bool:
        """Whether the response is numbers, separated by commas; else it is letters."""
        return self.operation in TASKS.values()

    @property
    def held_out(self) -> bool:
        """Whether the problem is only used to measure accuracy."""
        return zlib.crc32(self.prompt.encode()) % HELD_OUT_SHARE == 0

    @property
    def response(self) -> str:
        """The right response; the running sums, for a sum."""
        return ("," if self.has_numbers else "").join(OPERATIONS[self.operation](self.terms)) + END

    @property
    def estimate(self) -> str:
        """A response with the result rounded to ten, marked as an estimate. It never earns a reward."""
        return f"~{(int(OPERATIONS[self.operation](self.terms)[-1]) + 5) // 10 * 10}{END}"

    def reward(self, response: str) -> float:
        """1 if the response ends with `END` and is right, else 0. Only the last number of a sum counts."""
        if not response.endswith(END):
            return 0.0
        if self.operation == SUM:
            return float(_last_number(response) == _last_number(self.response))
        return float(response == self.response)


def _last_number(response: str) -> str:
    return response.removesuffix(END).split(",")[-1].strip()


def draw_problem(rng: random.Random, *, held_out: bool, operation: str = SUM) -> Problem:
    """A random problem, held out or not.

    It has 2 to `MAX_TERMS` terms below 10; or, to count, two letters and a number up to `MOST_COUNTED`, mostly small.
    """
    while True:
        if operation == COUNT:
            # The logarithm is uniform.
            counted = round(MOST_COUNTED ** rng.random())
            terms: tuple[int, ...] = (rng.randint(0, 9), rng.randint(0, 9), counted)
        else:
            terms = tuple(rng.randint(0, 9) for _ in range(rng.randint(2, MAX_TERMS)))
        problem = Problem(terms, operation)
        if problem.held_out == held_out:
            return problem


def held_out_problems(count: int, operation: str) -> list[Problem]:
    """The same held-out problems for every run."""
    rng = random.Random("held out")
    return [draw_problem(rng, held_out=True, operation=operation) for _ in range(count)]


def draw_demonstration(rng: random.Random, operation: str = SUM) -> tuple[Problem, str]:
    """A training problem and a response: the right one, or for a part of the problems of the task only an estimate.

    RL then learns that running sums, or counting, earn a reward. Other demonstrations have one of the operations that
    belong to no task.
    """
    others = [sign for sign in OPERATIONS if sign not in TASKS.values()]
    chosen = operation if rng.random() < SHARES[operation] else rng.choice(others)
    problem = draw_problem(rng, held_out=False, operation=chosen)
    is_estimate = chosen == operation and rng.random() < ESTIMATE_SHARES[operation]
    return problem, problem.estimate if is_estimate else problem.response


def characters_of(operation: str) -> list[str]:
    """All characters of problems and responses of the task with this operation, and of its demonstrations."""
    signs = [sign for sign in OPERATIONS if sign == operation or sign not in TASKS.values()]
    return [*DIGITS, *LETTERS, *signs, "=", ",", "~", END]


def build_tokenizer(operation: str = SUM) -> PreTrainedTokenizerFast:
    """A character tokenizer for the task with this operation, with `END` as the end token."""
    alphabet = ["<pad>", *characters_of(operation)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(alphabet)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=END, padding_side="left"
    )
    return fast


def load_tokenizer(folder: Path | None, task: str) -> Any:
    """The task's tokenizer, or that of a checkpoint.

    Raises:
        InputError: if the checkpoint has none, or it can't write the task's problems.
    """
    if folder is None:
        return build_tokenizer(TASKS[task])
    tokenizer = _load(AutoTokenizer, folder, "no usable tokenizer")
    # Also where padding stands for unknown characters.
    unknown = {tokenizer.unk_token_id, tokenizer.pad_token_id}
    for character in characters_of(TASKS[task]):
        if unknown & set(tokenizer(character, add_special_tokens=False)["input_ids"]):
            raise InputError(f"{folder}: its tokenizer has no token for {character!r}, which --task {task} needs")
    return tokenizer


def load_config(folder: Path | None, tokenizer: Any, expert_width: int = 768) -> Any:
    """The config of a checkpoint; without one, of 2 MoE layers with 8 experts, top-1, that train on 2 CPU cores.

    Raises:
        InputError: if the folder holds no config of a supported model.
    """
    if folder is None:
        return Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, intermediate_size=512, moe_intermediate_size=expert_width,
            num_experts=8, num_experts_per_tok=1, norm_topk_prob=False, max_position_embeddings=512,
            initializer_range=0.05, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    config = _load(AutoConfig, folder, "not a usable model config")
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise InputError(f"{folder}: model type {config.model_type!r} is not supported; use one of {supported}")
    return config


def load_model(folder: Path | None, config: Any, dtype: torch.dtype) -> Any:
    """A whole model on the CPU: the checkpoint's weights, or random ones from torch's current seed."""
    if folder is None:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    return _load(AutoModelForCausalLM, folder, "its weights can't be loaded", dtype=dtype)


def _load(kind: Any, folder: Path, problem: str, **settings: Any) -> Any:
    """Part of a checkpoint. Raises InputError, with the first line of the reason, if that fails."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json there; --model should be a Hugging Face checkpoint directory")
    disable_progress_bar()
    try:
        return kind.from_pretrained(folder, local_files_only=True, **settings)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{folder}: {problem} ({reason})") from None


def save_model(config: Any, state: dict[str, torch.Tensor], tokenizer: Any, folder: Path) -> None:
    """Write whole weights, config and tokenizer, so that vanilla transformers loads them."""
    disable_progress_bar()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=next(iter(state.values())).dtype)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
