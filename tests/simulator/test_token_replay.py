"""Transfers that are counted token by token equal those of a plain count, and those that row counts give on average."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from helpers.comparison_cases import some_case
from helpers.comparison_cases import some_trace as comparison_trace
from helpers.random_plans import random_placement, random_plan, random_schedule, random_trace
from helpers.simulated_steps import free_costs
from trimtab.planner import Schedule, StepPlan, Workload
from trimtab.planner.plan.rank_work import rank_work
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.token_replay import count_transfers
from trimtab.trace import RoutingTrace
from trimtab.trace.numbering import permute_experts, random_orders

RANKS, PER_NODE, EXPERTS, LAYERS, MICRO_STEPS = 6, 2, 12, 2, 3


def some_plan(
    seed: int, top_k: int, unknown: float = 0.0, micro_steps: int = MICRO_STEPS
) -> tuple[RoutingTrace, StepPlan]:
    rng = np.random.default_rng(seed)
    trace = random_trace(
        rng, num_sequences=14, max_length=9, num_layers=LAYERS, num_experts=EXPERTS, top_k=top_k, unknown=unknown
    )
    schedule = random_schedule(rng, 14, num_ranks=RANKS, num_micro_steps=micro_steps)
    plan = random_plan(
        rng, Workload.from_trace(trace, schedule), schedule, slots=2,
        placement=random_placement(rng, LAYERS, EXPERTS, RANKS), ranks_per_node=PER_NODE,
    )  # fmt: skip
    return trace, plan


def plain_count(trace: RoutingTrace, plan: StepPlan, m: int, layer: int, hops: int) -> tuple[list[int], list[int]]:
    """Of one instance: the larger of sent and received transfers, inside nodes and between nodes."""
    links: Counter[tuple[str, str, int]] = Counter()
    for source in range(RANKS):
        rows: dict[int, list[int]] = {}  # The copies of each expert, one for each of its next rows.
        for p in plan.replicas_of(m, layer) if hops == 1 else ():
            for q in range(plan.quota_starts[p], plan.quota_starts[p + 1]):
                if plan.quota_sources[q] == source:
                    expert = int(plan.replica_experts[p])
                    rows.setdefault(expert, []).extend([int(plan.replica_ranks[p])] * int(plan.quota_tokens[q]))
        for sequence in np.flatnonzero((plan.micro_step == m) & (plan.rank == source)):
            for ids in trace.expert_ids[trace.sequence_starts[sequence] : trace.sequence_starts[sequence + 1], layer]:
                ranks = {
                    rows[expert].pop(0) if rows.get(expert) else int(plan.home[layer, expert])
                    for expert in ids.tolist()
                    if expert < EXPERTS
                }
                for node in {rank // PER_NODE for rank in ranks}:
                    relay = node * PER_NODE + source % PER_NODE
                    if relay != source:
                        links["far", "out", source] += 1
                        links["far", "in", relay] += 1
                    for rank in ranks:
                        if rank // PER_NODE == node and rank != relay:
                            links["near", "out", relay] += 1
                            links["near", "in", rank] += 1
    near, far = (
        [max(links[kind, "out", rank], links[kind, "in", rank]) for rank in range(RANKS)] for kind in ("near", "far")
    )
    return near, far


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_transfers_equal_a_plain_count(seed: int, top_k: int, hops: int) -> None:
    trace, plan = some_plan(seed, top_k)
    near_MLR, far_MLR, known_ML = count_transfers(plan, trace, hops=hops)
    assert known_ML.all()
    for m in range(MICRO_STEPS):
        for layer in range(LAYERS):
            near, far = plain_count(trace, plan, m, layer, hops)
            assert near_MLR[m, layer].tolist() == near
            assert far_MLR[m, layer].tolist() == far


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("most", "counted"), [(0, [0]), (1, [0]), (2, [0, 4]), (3, [0, 2, 5]), (4, [0, 2, 4, 6]), (8, range(8))]
)
def test_evenly_chosen_micro_steps_are_counted_if_there_are_too_many_rows(
    seed: int, most: int, counted: Sequence[int]
) -> None:
    trace, plan = some_plan(seed, 2, micro_steps=8)
    near_MLR, far_MLR, _ = count_transfers(plan, trace)
    rows = trace.expert_ids.size
    some_near_MLR, some_far_MLR, known_ML = count_transfers(plan, trace, most_rows=-(-rows * most // 8))
    assert np.flatnonzero(known_ML.all(axis=1)).tolist() == [*counted]
    assert known_ML.any(axis=1).sum() == len(counted)
    assert np.array_equal(some_near_MLR[[*counted]], near_MLR[[*counted]])
    assert np.array_equal(some_far_MLR[[*counted]], far_MLR[[*counted]])


def test_with_one_expert_a_token_transfers_are_rows() -> None:
    trace, plan = some_plan(5, 1)
    counts_MLRE = Workload.from_trace(trace, plan.schedule).estimated_MLRE
    costs = free_costs(near_row_s=1.0, far_row_s=1.0, forwards=True)
    work = rank_work(plan.replicas, plan.home, counts_MLRE, PER_NODE, costs)
    near_MLR, far_MLR, _ = count_transfers(plan, trace)
    assert np.array_equal(work.near_MLR, near_MLR)
    assert np.array_equal(work.far_MLR, far_MLR)


def test_counts_of_rows_give_the_transfers_of_tokens_whose_experts_are_independent() -> None:
    rng = np.random.default_rng(0)
    scores = rng.gumbel(size=(12_000, LAYERS, 64)) + rng.gumbel(size=(LAYERS, 64))
    ids = np.argsort(-scores, axis=2)[:, :, :4]
    trace = RoutingTrace.from_sequences(np.split(ids, 8), num_experts=64)
    places = np.arange(8, dtype=np.int32)
    schedule = Schedule(np.zeros_like(places), places, np.zeros(1, np.int32), 8)
    workload = Workload.from_trace(trace, schedule)
    plan = random_plan(rng, workload, schedule, slots=2, ranks_per_node=2)
    costs = free_costs(near_row_s=1.0, far_row_s=1.0, forwards=True, top_k=4)
    work = rank_work(plan.replicas, plan.home, workload.estimated_MLRE, 2, costs)
    near_MLR, far_MLR, _ = count_transfers(plan, trace)
    for found, counted in ((work.near_MLR, near_MLR), (work.far_MLR, far_MLR)):
        assert np.abs(found / counted - 1).max() < 0.1
        assert 0.95 < found.sum() / counted.sum() < 1.01


def test_tokens_of_unknown_route_count_as_the_others_of_their_rank() -> None:
    trace, plan = some_plan(1, 2)
    plan = plan.without_replicas()
    near_MLR, far_MLR, _ = count_transfers(plan, trace)
    # Every sequence twice as long, without routes in its second half.
    parts = np.split(trace.expert_ids, trace.sequence_starts[1:-1])
    longer = RoutingTrace.from_sequences(
        [np.concatenate([part, np.full_like(part, trace.no_route)]) for part in parts], num_experts=EXPERTS
    )
    near2_MLR, far2_MLR, known_ML = count_transfers(plan, longer)
    assert known_ML.all()
    assert np.allclose(near2_MLR, 2 * near_MLR)
    assert np.allclose(far2_MLR, 2 * far_MLR)
    longer.expert_ids[0] = trace.no_route
    _, _, known_ML = count_transfers(plan, longer)
    assert not known_ML[plan.micro_step[0]].any()
    assert known_ML.any()


def test_experts_in_another_order_are_the_same_in_counts_and_trace() -> None:
    trace, plan = some_plan(2, 3, unknown=0.2)
    order_LE = random_orders(trace.num_layers, trace.num_experts, 7)
    permuted = Workload.from_trace(trace.permuted(order_LE), plan.schedule)
    counts = Workload.from_trace(trace, plan.schedule).token_counts_MLRE
    expected = permute_experts(counts.swapaxes(1, 2), order_LE).swapaxes(1, 2)
    assert np.array_equal(permuted.token_counts_MLRE, expected)


@pytest.mark.parametrize("hops", [1, 2])
def test_a_plan_of_other_ids_counts_as_on_a_trace_with_these(hops: int) -> None:
    trace, plan = some_plan(3, 3, unknown=0.2)
    order_LE = random_orders(trace.num_layers, trace.num_experts, 7)
    # `plan` is of ids that are `order_LE` in this trace.
    other = trace.permuted(np.argsort(order_LE, axis=1))
    expected, found = (
        count_transfers(plan, trace, hops=hops),
        count_transfers(plan, other, hops=hops, order_LE=order_LE),
    )
    assert all(np.array_equal(one, two) for one, two in zip(expected, found, strict=True))
    unmapped = count_transfers(plan, other, hops=hops)
    assert not np.array_equal(expected[0], unmapped[0])


def test_a_case_with_other_ids_is_that_of_a_trace_with_these() -> None:
    trace = comparison_trace(longer=60)
    case = some_case(trace, token_budget=200)
    order_LE, other_LE = random_orders(2, 8, 3), random_orders(2, 8, 4)
    counted = replace(case, traces=(trace.select(np.flatnonzero(trace.steps == 7)),))
    twice = counted.permuted(order_LE).permuted(other_LE)
    both_LE = np.take_along_axis(order_LE, other_LE, axis=1)
    other = some_case(trace.permuted(both_LE), token_budget=200)
    permuted = trace.permuted(both_LE)
    expected = replace(other, traces=(permuted.select(np.flatnonzero(permuted.steps == 7)),))
    for name in ("static", "llep"):
        assert simulate_policy(twice, name).step_times_s == simulate_policy(expected, name).step_times_s
