"""One step, made without random numbers, whose plan is known to the byte: on any machine, until the planner changes."""

from __future__ import annotations

import hashlib

import numpy as np

from trimtab import ClusterSpec, Placement, RoutingTrace
from trimtab.cluster import CostModel
from trimtab.planner import Planner, PlanSettings

# What to write here when the planner changes on purpose is what the failing test prints.
INPUT = "1d3be6a00c2ad715"
PLANS = ["c7363288314f9417f65b264d1377e494", "4f1981c18f80c04febad573551f286b2"]


def made_trace() -> RoutingTrace:
    """24 sequences of 20 to 89 tokens, 3 layers, top-2 of 16 experts; squares make some experts hot."""
    sequences = []
    for s in range(24):
        tokens, layers = np.arange(20 + s * 13 % 70)[:, None], np.arange(3)
        first_TL = (tokens * tokens + (s % 5 + 3 * layers) * tokens + s) % 16
        second_TL = (first_TL + 1 + (tokens + layers) % 3) % 16
        sequences.append(np.stack([first_TL, second_TL], axis=2))
    trace = RoutingTrace.from_sequences(sequences, num_experts=16)
    trace.expert_ids[trace.sequence_starts[7]] = trace.no_route
    return trace


def planner(groups: int) -> Planner:
    cost = CostModel(2e-6, 1e-7, 1e-6, 1e-8, 1e-6, 1e-5, 0.5, 0.0625)
    made = Planner(
        ClusterSpec(4, 2, 1), Placement.contiguous(3, 16, 4), groups=groups, settings=PlanSettings(1.02, 8), cost=cost,
        threads=2,
    )  # fmt: skip
    made.add(made_trace())
    return made


def test_the_plans_of_a_made_up_step() -> None:
    assert hashlib.blake2b(made_trace().expert_ids.tobytes(), digest_size=8).hexdigest() == INPUT
    plans = planner(2).finish(token_budget=160, mini_batch=np.arange(24) // 12)
    assert [plan.hash for plan in plans] == PLANS


def test_the_made_up_step_uses_all_levels() -> None:
    """It moves homes, has replicas inside and between nodes, and instances with unknown routes."""
    (plan,) = planner(1).finish(token_budget=160, mini_batch=np.arange(24) // 12)
    assert not np.array_equal(plan.home, Placement.contiguous(3, 16, 4).home)
    assert set(plan.replica_paths.tolist()) == {0, 1}
    assert np.count_nonzero(plan.mixed_ML) == 3
