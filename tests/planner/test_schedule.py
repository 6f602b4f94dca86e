"""Packing: everything placed once, budgets and mini-batches kept, no more micro-steps than needed."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import planner_reference as reference
from trimtab import InputError
from trimtab.array_type import Array
from trimtab.messages import note_once
from trimtab.planner import budget_for, pack_by_length


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 5), st.integers(100, 400), st.integers(1, 3))
def test_budgets_and_mini_batches_are_kept(lengths: list[int], ranks: int, budget: int, batches: int) -> None:
    mini_batch = np.arange(len(lengths)) % batches
    schedule = pack_by_length(lengths, num_ranks=ranks, token_budget=budget, mini_batch=mini_batch)
    assert reference.by_place(schedule, np.array(lengths, np.int64)).max(initial=0) <= budget
    assert np.array_equal(schedule.mini_batch_of_micro_step[schedule.micro_step], mini_batch)
    assert np.all(np.diff(schedule.mini_batch_of_micro_step) >= 0)
    for batch in range(batches):
        total = sum(np.asarray(lengths)[mini_batch == batch])
        needed = max(1, math.ceil(total / (ranks * budget)))
        used = np.count_nonzero(schedule.mini_batch_of_micro_step == batch)
        # Longest-first placement fills any bin to more than half before another is opened.
        assert used <= max(needed, math.ceil(2 * total / (ranks * budget)) + 1) or batch >= len(lengths)
    listed = np.concatenate([schedule.sequences_of(rank) for rank in range(ranks)])
    assert sorted(listed) == list(range(len(lengths)))
    for rank in range(ranks):
        assert np.all(np.diff(schedule.of_rank(rank)) >= 0)


def test_ranks_of_a_micro_step_carry_alike() -> None:
    lengths = np.random.default_rng(0).integers(10, 60, 200)
    schedule = pack_by_length(lengths, num_ranks=4, token_budget=512)
    filled = reference.by_place(schedule, lengths)
    assert np.all(filled.max(axis=1) <= 1.05 * filled.mean(axis=1))


def test_a_sequence_over_the_budget_is_refused() -> None:
    with pytest.raises(InputError, match="101 tokens doesn't fit the token budget of 100"):
        pack_by_length([5, 101], num_ranks=2, token_budget=100)


def test_the_budget_gives_about_the_requested_micro_steps(caplog: pytest.LogCaptureFixture) -> None:
    def lengths(*tokens: int) -> Array:
        return np.array(tokens, np.int64)

    def notes() -> list[str]:
        return [message for message in caplog.messages if "--micro-steps" in message]

    caplog.set_level(logging.INFO, "trimtab")
    note_once.cache_clear()
    # 80 tokens in 2 * 4 places, and a tenth more; the largest step decides.
    assert budget_for([lengths(*[10] * 8)], 2, 4) == 11
    assert budget_for([lengths(10), lengths(*[10] * 8), lengths(5, 5)], 2, 4) == 11
    assert not notes()
    # No less than the longest sequence of any step, and one token at least.
    for _ in range(2):
        assert budget_for([lengths(*[10] * 8)], 8, 4) == 10
    assert notes() == ["--micro-steps 4: about 1 are made, since the longest sequence has 10 tokens"]
    assert budget_for([lengths(10, 10), lengths(31)], 8, 4) == 31
    assert budget_for([lengths()], 2, 2) == 1
