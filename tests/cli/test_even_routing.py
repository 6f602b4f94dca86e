"""With even routing no command prints a cost, minus zero, or a number with many digits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trimtab import write_trace
from trimtab.trace import RoutingTrace

# A minus sign before zeros alone, and numbers such as -5.85e-18.
NO_NUMBER = re.compile(r"(?<![\w.-])-0(\.0+)?(?![\d.])|\d[eE]-\d")
MODEL = ("--model", "qwen3-30b-a3b", "--set", "num_experts=64")


def even_trace(folder: Path, tokens: int, layers: int, sequences: int) -> Path:
    """Each token has the next 8 experts of 64, so that every rank has as many rows in each layer and micro-step."""
    first_TL1 = np.arange(tokens)[:, None, None] * 8 + np.arange(layers)[:, None] * 3
    trace = RoutingTrace.from_sequences([(first_TL1 + np.arange(8)) % 64] * sequences, num_experts=64)
    write_trace(trace, folder / "even.parquet")
    return folder / "even.parquet"


@pytest.mark.parametrize(
    "options",
    ["analyze", "analyze --micro-steps 3", "plan", "simulate --sampled 1", "simulate --micro-steps 3", "advise"],
)
def test_even_routing_costs_nothing(options: str, tmp_path: Path, printed: Callable[..., str]) -> None:
    command, *rest = options.split()
    sizes, ranks = ((128, 7, 40), 16) if command == "advise" else ((32, 4, 64), 8)
    text = printed(command, even_trace(tmp_path, *sizes), "--ranks", ranks, *rest, *MODEL)
    assert not (found := NO_NUMBER.search(text)), found
    one_line = " ".join(text.split())
    if command == "simulate":
        assert "Imbalance costs 0% of each step" in one_line
    if command == "analyze":
        assert re.search(r"imbalance costs 0 s of a step of \S+ s \(0%; of it, waiting 0%", one_line)
