"""Packing by time: places by a plain heap, schedules that keep budgets and mini-batches, and even attention."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.planner_steps import per_nodes, with_operations
from helpers.simulated_steps import free_costs
from trimtab import ClusterSpec, Schedule
from trimtab.array_type import Array
from trimtab.cluster import QWEN3_30B, StepCosts
from trimtab.planner import pack_by_length
from trimtab.planner.plan.step_times import dense_seconds
from trimtab.planner.schedule.schedule import fill_emptiest
from trimtab.planner.schedule.time_packing import pack_by_time


def plain_places(order: list[int], costs: list[int], lengths: list[int], places: int, budget: int) -> list[int]:
    """The same from a heap of (cost, place); full places go back into it afterwards."""
    heap = [(0, place) for place in range(places)]
    tokens, found = [0] * places, [-1] * len(order)
    for sequence in order:
        full = []
        while heap and tokens[heap[0][1]] + lengths[sequence] > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return [-1] * len(order)
        cost, place = heapq.heappop(heap)
        found[sequence] = place
        tokens[place] += lengths[sequence]
        for entry in [*full, (cost + costs[sequence], place)]:
            heapq.heappush(heap, entry)
    return found


@settings(max_examples=300)
@given(st.data())
def test_sequences_go_where_a_plain_heap_puts_them(data: st.DataObject) -> None:
    count, places = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths = rng.integers(0, data.draw(st.sampled_from([2, 100])), count)
    costs = rng.integers(0, data.draw(st.sampled_from([1, 3, 10**15])), count)
    budget = max(int(lengths.max(initial=0)), round(lengths.sum() / places * data.draw(st.floats(0.9, 3))))
    order = rng.permutation(count)
    found = fill_emptiest(order, costs, lengths, places, budget)
    assert found.tolist() == plain_places(order.tolist(), costs.tolist(), lengths.tolist(), places, budget)
    if found.min(initial=0) >= 0:
        assert np.bincount(found, lengths, places).max() <= budget


def pack(lengths: Array, cluster: ClusterSpec, groups: int, budget: int, mini_batch: Array) -> list[Schedule]:
    """Packed by length, and by time."""
    packed = pack_by_length(lengths, num_ranks=cluster.ranks * groups, token_budget=budget, mini_batch=mini_batch)
    costs = StepCosts.of(cluster, QWEN3_30B)
    return [packed, pack_by_time(packed, lengths, 8.0, cluster, costs, budget)]


@settings(max_examples=150)
@given(st.data())
def test_micro_steps_budgets_and_mini_batches_stay(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    ranks, groups = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    cluster = ClusterSpec(ranks, data.draw(per_nodes(ranks)))
    lengths = np.minimum(rng.lognormal(6, 1.2, data.draw(st.integers(1, 60))).astype(np.int64) + 1, 8192)
    budget = int(lengths.max()) + data.draw(st.sampled_from([0, 10, 3000]))
    mini_batch = rng.integers(0, data.draw(st.integers(1, 3)), len(lengths))
    packed, schedule = pack(lengths, cluster, groups, budget, mini_batch)
    assert np.array_equal(schedule.mini_batch_of_micro_step, packed.mini_batch_of_micro_step)
    assert schedule.num_ranks == packed.num_ranks
    assert np.array_equal(schedule.mini_batch_of_micro_step[schedule.micro_step], mini_batch)
    assert schedule.rank.min() >= 0
    assert reference.by_place(schedule, lengths).max() <= budget
    assert schedule.rank.dtype == packed.rank.dtype
    assert schedule.micro_step.dtype == packed.micro_step.dtype


def test_a_mini_batch_that_fits_only_by_length_stays_as_it_was() -> None:
    """At 4096 tokens a place the long sequence, whose attention is slowest, leaves no room for the three others."""
    lengths = np.array([4000, 2100, 2000, 1996, 2000])
    cluster = ClusterSpec(3, 3)
    packed = Schedule(np.zeros(5, np.int32), np.array([0, 1, 2, 1, 2], np.int32), np.zeros(1, np.int32), 3)
    assert reference.by_place(packed, lengths).max() == 4096
    # So expensive that the pairs of a sequence decide alone.
    square = with_operations(StepCosts.of(cluster, QWEN3_30B), square_s=1e-6)
    whole = pack_by_time(packed, lengths, 8.0, cluster, square, 4096)
    assert reference.by_place(whole, lengths).max() <= 4096
    tight = pack_by_time(packed, lengths, 8.0, cluster, square, 4095)
    assert np.array_equal(tight.rank, packed.rank)
    assert np.array_equal(tight.micro_step, packed.micro_step)


def test_ranks_of_a_micro_step_have_more_even_attention_than_packed_by_length() -> None:
    """The slowest rank's dense parts above the mean, summed over micro-steps: a quarter less on average."""
    spreads = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = np.minimum(rng.lognormal(7, 1, 400).astype(np.int64) + 1, 16_384)
        cluster = ClusterSpec(8, 4)
        both = pack(lengths, cluster, 1 + seed % 2, 20_000, np.arange(400) // 200)
        operations = StepCosts.of(cluster, QWEN3_30B).operations
        seconds = [dense_seconds(schedule, lengths, operations)[0] for schedule in both]
        spreads.append([(inside_MR.max(axis=1) - inside_MR.mean(axis=1)).sum() for inside_MR in seconds])
    by_length, by_time = np.mean(spreads, axis=0)
    assert by_time < 0.75 * by_length


def test_rows_use_links_from_two_ranks_on() -> None:
    """With groups of one rank slow links change nothing; with two ranks all time on them is proportional to length."""
    lengths = np.random.default_rng(0).integers(1, 4000, 60)
    cluster = ClusterSpec(1, 1)
    packed = pack(lengths, cluster, 4, 16_000, np.zeros_like(lengths))[0]
    costs = StepCosts.of(cluster, QWEN3_30B)
    fast, slow = (
        pack_by_time(packed, lengths, 8.0, cluster, with_operations(costs, near_row_s=s, far_row_s=s), 16_000)
        for s in (0.0, 1e3)
    )
    assert np.array_equal(fast.rank, slow.rank)
    assert np.array_equal(fast.micro_step, slow.micro_step)
    by_rows, by_tokens = (
        pack_by_time(packed, lengths, 8.0, ClusterSpec(2, 2), StepCosts(free_costs(**{name: 1.0})), 16_000)
        for name in ("near_row_s", "token_s")
    )
    tokens = [np.sort(reference.by_place(schedule, lengths), axis=None) for schedule in (by_rows, by_tokens)]
    assert np.array_equal(tokens[0], tokens[1])


@pytest.mark.parametrize(
    ("ranks", "per_node", "groups"), [(1, 1, 1), (8, 4, 1), (8, 8, 2), (12, 4, 3), (6, 2, 2), (6, 1, 4)]
)
def test_places_are_dealt_out_over_nodes_and_groups(ranks: int, per_node: int, groups: int) -> None:
    """Equal sequences, one for each place of every micro-step."""
    cluster, count = ClusterSpec(ranks, per_node), ranks * groups
    lengths = np.full(2 * groups * count, 100)
    _, schedule = pack(lengths, cluster, groups, 100, np.zeros_like(lengths))
    firsts = []
    for dealt in schedule.rank.reshape(2 * groups, count):
        assert sorted(dealt.tolist()) == list(range(count))
        for group in range(groups):
            mine = dealt[group * ranks : (group + 1) * ranks]
            assert len(set((mine // ranks).tolist())) == 1
            # As many neighbouring places as there are nodes are on different nodes.
            nodes = (mine % ranks // per_node).reshape(-1, cluster.nodes)
            assert all(sorted(row) == list(range(cluster.nodes)) for row in nodes.tolist())
        firsts.append(int(dealt[0]) // ranks)
    assert np.bincount(firsts, minlength=groups).tolist() == [2] * groups
