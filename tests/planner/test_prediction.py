"""Predicted times against following every quota, one at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.planner_steps import per_nodes
from helpers.random_plans import random_plan, random_schedule
from trimtab import ClusterSpec, StepPlan, Workload
from trimtab.cluster import QWEN3_30B, CostModel
from trimtab.planner.plan.prediction import cross_node_rows, predict


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, Workload]:
    """Random plans on one node or several, the ranks per node among their fields."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks = draw(st.integers(1, 6))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), ranks, ranks * draw(st.integers(1, 3)))
    unknown_MLR = rng.integers(0, 40, shape[:3]) * (rng.random(shape[:3]) < draw(st.sampled_from([0.0, 0.3, 1.0])))
    workload = Workload(rng.integers(0, 40, shape).astype(np.int32), unknown_MLR.astype(np.int32))
    schedule = random_schedule(rng, 3, num_ranks=ranks, num_micro_steps=shape[0])
    plan = random_plan(rng, workload, schedule, slots=draw(st.integers(0, 3)))
    values = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    return StepPlan(**values | {"ranks_per_node": draw(per_nodes(ranks))}), workload


@settings(max_examples=80, deadline=None)
@given(plans())
def test_rows_between_nodes_are_those_of_every_quota(case: tuple[StepPlan, Workload]) -> None:
    plan, workload = case
    expected = np.zeros((plan.num_micro_steps, plan.num_layers), np.int64)
    for (m, layer, source, rank), rows in reference.rows_by_way(plan, workload).items():
        expected[m, layer] += rows * (source // plan.ranks_per_node != rank // plan.ranks_per_node)
    assert np.array_equal(cross_node_rows(plan, workload), expected)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_predictions_are_sums_over_replicas_and_rows(case: tuple[StepPlan, Workload]) -> None:
    plan, workload = case
    cost = CostModel.of(ClusterSpec(plan.num_ranks, plan.ranks_per_node, 2), QWEN3_30B)
    prediction = predict(plan, workload, cost)
    ways = reference.rows_by_way(plan, workload)
    for m, layer in np.ndindex(plan.num_micro_steps, plan.num_layers):
        loads = [sum(ways[m, layer, s, r] for s in range(plan.num_ranks)) for r in range(plan.num_ranks)]
        near = far = 0
        for p in plan.replicas_of(m, layer):
            home, rank = int(plan.home[layer, plan.replica_experts[p]]), int(plan.replica_ranks[p])
            same = home // plan.ranks_per_node == rank // plan.ranks_per_node
            near, far = near + same, far + (not same)
        assert prediction.busiest_ML[m, layer] == max(loads)
        assert [prediction.near_ML[m, layer], prediction.far_ML[m, layer]] == [near, far]
        nodes, per_node = plan.num_ranks // plan.ranks_per_node, plan.ranks_per_node
        between = np.zeros((nodes, nodes), int)
        for source, rank in np.ndindex(plan.num_ranks, plan.num_ranks):
            between[source // per_node, rank // per_node] += ways[m, layer, source, rank]
        np.fill_diagonal(between, 0)
        assert prediction.far_rows_ML[m, layer] == between.sum()
        busiest = max(between.sum(axis=0).max(), between.sum(axis=1).max())
        assert prediction.busiest_far_ML[m, layer] == busiest
        transfers = (near * cost.near_replica_s + far * cost.far_replica_s) / plan.num_ranks
        crossing = busiest * cost.far_row_s / per_node
        assert np.isclose(prediction.seconds_ML[m, layer], max(loads) * cost.row_s + transfers + crossing)
