"""Grouping by routing: its objective, counted from scratch, and what it must leave as it was."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.planner_steps import random_homes
from trimtab import Placement, Schedule
from trimtab.array_type import Array
from trimtab.planner import SequenceCounts, pack_by_length
from trimtab.planner.schedule import grouping
from trimtab.planner.schedule.grouping import group_by_routing


@dataclass(frozen=True, eq=False)
class Case:
    """What `group_by_routing` is given."""

    sequences: SequenceCounts
    packed: Schedule
    placement: Placement
    token_budget: int
    groups: int
    attention_rows: Array | None

    def group(self, **changes: int) -> Schedule:
        return group_by_routing(
            self.sequences, self.packed, self.placement, self.token_budget, num_groups=self.groups,
            attention_rows=self.attention_rows, **changes,
        )  # fmt: skip

    def cost(self, schedule: Schedule) -> int:
        return reference.grouping_cost(self.sequences, schedule, self.placement, self.groups, self.attention_rows)


def random_case(
    rng: np.random.Generator, *, ranks: int, groups: int, sequences: int, batches: int, attention: bool,
    even_lengths: bool = False, rows_per_token: int = 2,
) -> Case:  # fmt: skip
    experts, layers = 2 * ranks, 2
    lengths = np.full(sequences, 100) if even_lengths else rng.integers(1, 200, sequences)
    weights_SLE = np.exp(2 * rng.gumbel(size=(sequences, layers, experts)))
    weights_SLE /= weights_SLE.sum(axis=-1, keepdims=True)
    counts_SLE = np.stack(
        [rng.multinomial(rows_per_token * t, weights) for t, weights in zip(lengths, weights_SLE, strict=True)]
    )
    budget = int(lengths.max()) * 2
    packed = pack_by_length(
        lengths, num_ranks=ranks * groups, token_budget=budget, mini_batch=rng.integers(0, batches, sequences)
    )
    return Case(
        SequenceCounts(counts_SLE.astype(np.uint16), lengths, np.zeros((sequences, layers), np.int32)),
        packed,
        random_homes(rng, layers, experts, ranks),
        budget,
        groups,
        rows_per_token * lengths**2 // 100 if attention else None,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return random_case(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        ranks=draw(st.integers(1, 4)),
        groups=draw(st.integers(1, 3)),
        sequences=draw(st.sampled_from([1, 2, 3, 10, 40])),
        batches=draw(st.integers(1, 3)),
        attention=draw(st.booleans()),
        # Where peaks are in the thousands, the search takes steps up, too.
        rows_per_token=draw(st.sampled_from([2, 200])),
    )


@settings(max_examples=50)
@given(cases(), st.sampled_from([0, 1, 40, 400]))
def test_the_busiest_ranks_never_do_more(case: Case, swaps: int) -> None:
    assert case.cost(case.group(swaps_per_sequence=swaps)) <= case.cost(case.packed)


def test_a_search_that_ends_higher_than_it_began_is_dropped() -> None:
    """From where there is little left to gain; sequences are so alike that steps up are small enough to be taken."""
    for seed in range(5, 10):
        rng = np.random.default_rng(seed)
        case = random_case(rng, ranks=4, groups=1, sequences=120, batches=1, attention=False, even_lengths=True)
        case.sequences.counts_SLE[:] = 1000 + rng.integers(0, 4000, case.sequences.counts_SLE.shape)
        once = case.group()
        again = replace(case, packed=once).group(swaps_per_sequence=20)
        assert case.cost(again) <= case.cost(once)


@settings(max_examples=50)
@given(cases())
def test_sequences_change_places_one_for_one_within_budget_and_mini_batch(case: Case) -> None:
    grouped, packed = case.group(), case.packed
    assert grouped.num_ranks == packed.num_ranks
    batches = grouped.mini_batch_of_micro_step
    assert np.array_equal(batches, packed.mini_batch_of_micro_step)
    assert np.array_equal(batches[grouped.micro_step], batches[packed.micro_step])
    assert reference.by_place(grouped, case.sequences.lengths).max() <= case.token_budget
    ones = np.ones(case.sequences.num_sequences, np.int64)
    assert np.array_equal(reference.by_place(grouped, ones), reference.by_place(packed, ones))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("attention", [False, True])
def test_hot_experts_are_spread(groups: int, attention: bool) -> None:
    """No grouping is below one micro-step for all; of what is above that, the search takes off most."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        case = random_case(rng, ranks=4, groups=groups, sequences=96, batches=1, attention=attention)
        all_in_one = replace(case.packed, micro_step=np.zeros(96, np.int32), rank=case.packed.rank % 4)
        least = replace(case, attention_rows=None).cost(all_in_one)
        if case.attention_rows is not None:
            least += int(case.attention_rows.sum()) * 2 // 4
        assert case.cost(case.group()) - least < 0.3 * (case.cost(case.packed) - least)


def test_small_searches_end_where_no_swap_is_better() -> None:
    """With a few sequences all pairs are tried often enough: no single swap that fits is left."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        case = random_case(rng, ranks=2, groups=2, sequences=8, batches=1, attention=True, even_lengths=True)
        grouped = case.group(swaps_per_sequence=4000)
        cost = case.cost(grouped)
        for i, j in np.ndindex(8, 8):
            micro_step, rank = (reference.swapped(values, i, j) for values in (grouped.micro_step, grouped.rank))
            other = replace(grouped, micro_step=micro_step, rank=rank)
            # The search ends early within a part of the least that is possible.
            assert case.cost(other) >= cost - cost // grouping.STOP_GAP


def test_layers_are_left_out_evenly_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(np.random.default_rng(0), ranks=2, groups=1, sequences=20, batches=1, attention=True)
    sequences = replace(case.sequences, counts_SLE=np.tile(case.sequences.counts_SLE, (1, 4, 1)))
    case = replace(case, sequences=sequences, placement=Placement(np.tile(case.placement.home, (4, 1))))
    monkeypatch.setattr(grouping, "MOST_ROWS", 20 * 2 * 3)
    grouped = case.group()
    third = replace(sequences, counts_SLE=sequences.counts_SLE[:, ::3])
    kept = replace(case, sequences=third, placement=Placement(case.placement.home[::3]))
    assert kept.cost(grouped) < kept.cost(case.packed)
    monkeypatch.undo()
    assert np.array_equal(kept.group().micro_step, grouped.micro_step)
