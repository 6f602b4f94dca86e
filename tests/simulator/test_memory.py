"""Memory of ranks, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.cluster import ModelSpec
from trimtab.policies import Traits
from trimtab.simulator.memory import memory_bytes, replica_pool_bytes

# An expert has 600 weights, 1200 bytes; its gradient in float32 has 2400.
MODEL = ModelSpec(
    "small", num_experts=4, top_k=1, hidden_size=20, expert_width=10, moe_layers=4,
    attention_parameters=100, vocab_size=7,
)  # fmt: skip
WEIGHTS, GRADIENT = 1200, 2400


def small_plan() -> tuple[StepPlan, Workload]:
    """Two micro-steps of two layers on two ranks with experts 0 and 1, 2 and 3; a rank has two slots.

    In micro-step 0 layer 0 has expert 0 on rank 1, layer 1 experts 0 and 1 on rank 1 and 2 on rank 0; in micro-step 1
    layer 0 has expert 1 on rank 1, and layer 1 expert 0 again.
    """
    counts_MLRE = np.full((2, 2, 2, 4), 5, np.int32)
    replicas = [[(0, 1)], [(0, 1), (1, 1), (2, 0)], [(1, 1)], [(0, 1)]]
    plan = StepPlan.from_instances(
        Schedule(np.array([0, 1], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32), 2),
        Placement.contiguous(2, 4, 2),
        [np.array(instance) for instance in replicas],
        [np.tile([[2, 1]], (len(instance), 1)) for instance in replicas],
        mixed_ML=np.zeros((2, 2), bool),
        cluster=ClusterSpec(2, 2, 2),
    )
    workload = Workload.known(counts_MLRE)
    plan.check(workload)
    return plan, workload


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ("none", 0),
        # Three layers at a time: two slots, and gradients of the two replicas that come home to rank 0 in an instance.
        ("shared slots", 3 * (2 * WEIGHTS + 2 * GRADIENT)),
        # Rank 1 keeps experts 0 and 1 of both layers.
        ("layer slots", 4 * (WEIGHTS + GRADIENT)),
        # Rank 1 has three copies in micro-step 0, in all its layers.
        ("unbounded", 3 * (WEIGHTS + GRADIENT)),
    ],
)
def test_the_replica_pool_holds_the_copies_kept_at_once(copies: Any, expected: int) -> None:
    plan, _ = small_plan()
    assert replica_pool_bytes(plan, MODEL, Traits("step", copies=copies), 3) == expected
    assert replica_pool_bytes(plan.without_replicas(), MODEL, Traits("step", copies=copies), 3) == 0


def test_memory_is_that_of_the_busiest_rank() -> None:
    plan, workload = small_plan()
    loads_MLR = plan.rank_loads(workload)
    tokens_MR = np.array([[11, 2], [3, 30]])
    found = memory_bytes(plan, loads_MLR, tokens_MR, MODEL, Traits("step"), ring_layers=1, ranks=4)
    # Two layers of two experts a rank: weights, gradient, and 12 bytes of optimizer state for each.
    assert found["experts"] == 4 * 600 * (2 + 4 + 12)
    # Half of the model's layers. Attention, router, embedding and head; optimizer state in four parts.
    dense = (4 * (100 + 20 * 4) + 2 * 7 * 20) // 2
    assert MODEL.dense_parameters == 2 * dense
    assert found["dense parts"] == dense * 6 + dense * 12 // 4
    assert found["replica pool"] == 2 * WEIGHTS + 2 * GRADIENT
    # Of 20 rows a rank in each layer 3 leave with every replica: in micro-step 0 rank 1 has 20 + 3 and 20 + 6 - 3.
    assert loads_MLR[0].tolist() == [[17, 23], [17, 23]]
    rows_MR = loads_MLR.sum(axis=1)
    kept = [
        2 * 8 * 20 * tokens_MR[m, r] + rows_MR[m, r] * (2 * 20 + 3 * 10) for m, r in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert found["activations"] == max(kept) * 2 == (2 * 8 * 20 * 30 + 46 * 70) * 2


def test_expert_memory_is_that_of_the_rank_with_most_homes() -> None:
    plan, workload = small_plan()
    plan = replace(plan.without_replicas(), home=np.array([[0, 0, 0, 1], [0, 1, 1, 1]], np.int16))
    loads_MLR, tokens_MR = plan.rank_loads(workload), np.zeros((2, 2), np.int64)
    found = memory_bytes(plan, loads_MLR, tokens_MR, MODEL, Traits("step"), ring_layers=1, ranks=2)
    assert found["experts"] == 4 * 600 * 18
    assert found["replica pool"] == 0
    plan = replace(plan, home=np.array([[0, 0, 0, 1], [0, 0, 1, 1]], np.int16))
    found = memory_bytes(plan, plan.rank_loads(workload), tokens_MR, MODEL, Traits("step"), ring_layers=1, ranks=2)
    assert found["experts"] == 5 * 600 * 18
