"""Ranks of tests: a failure, a wait or a loop without end is an error that names the rank; slowness is not an error."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from helpers import processor_time
from helpers.rank_pool import RankPool, on_ranks, shared_pool

pytestmark = pytest.mark.slow

State = dict[str, Any]


def wait_on_rank_1(state: State) -> None:
    if state["rank"] == 1:
        time.sleep(600)


def compute_on_rank_0(state: State) -> None:
    while state["rank"] == 0:
        pass


def fail_on_rank_1(state: State) -> None:
    if state["rank"] == 1:
        raise ValueError("no such expert")
    time.sleep(600)


def end_on_rank_0(state: State) -> None:
    if state["rank"] == 0:
        os._exit(3)


def sleep(state: State, seconds: float) -> int:
    time.sleep(seconds)
    return int(state["rank"])


def number(state: State) -> None:
    import torch.distributed as dist

    state["rank"] = dist.get_rank()


@pytest.fixture
def ranks() -> RankPool:
    pool = shared_pool(2)
    pool.call(number)
    return pool


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (wait_on_rank_1, r"rank 1, wait_on_rank_1\(\): no answer, no progress in 2 s"),
        (compute_on_rank_0, r"rank 0, compute_on_rank_0\(\): no answer, more than 2 s of processor time"),
        (fail_on_rank_1, r"(?s)rank 1, fail_on_rank_1\(\): .*ValueError: no such expert.*rank 0, .*: no answer"),
        (end_on_rank_0, r"rank 0, end_on_rank_0\(\): ended with status 3"),
    ],
)
def test_what_goes_wrong_names_its_rank(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, function: Any, problem: str
) -> None:
    monkeypatch.setattr(processor_time, "IDLE_S", 2.0)
    with pytest.raises(AssertionError, match=problem):
        ranks.call(function, limit_s=1.0)
    # They are replaced.
    ranks.call(number)
    assert ranks.call(sleep, 0.0) == [0, 1]


def test_waiting_takes_no_processor_time(ranks: RankPool) -> None:
    assert ranks.call(sleep, 3.0, limit_s=0.5) == [0, 1]


def test_ranks_forget_what_tests_left(ranks: RankPool) -> None:
    ranks.forget()
    assert on_ranks(dict, ranks=2) == [{}, {}]
