"""One step, made without random numbers, whose plan is known to the byte: on any machine, until the planner changes."""

from __future__ import annotations

import hashlib

import numpy as np

from helpers.simulated_steps import free_costs
from trimtab import ClusterSpec, Placement, RoutingTrace
from trimtab.cluster import StepCosts
from trimtab.planner import Planner, PlanSettings

# What to write here when the planner changes on purpose is what the failing test prints.
INPUT = "1d3be6a00c2ad715"
PLANS = ["e03b171d162521413ee1c7d84c7f0584", "735888776bda89ac6339ff4103b9590a"]


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
    costs = StepCosts(
        free_costs(
            row_s=4e-6, near_row_s=1e-6, far_row_s=2e-7, near_weights_s=1e-6, far_weights_s=2e-5, host_weights_s=1e-6,
            near_gradient_s=1e-6, far_gradient_s=2e-5, near_state_s=1e-6, far_state_s=1e-6, token_s=1e-6, square_s=1e-7,
        ),
        forwards=2,
    )  # fmt: skip
    made = Planner(
        ClusterSpec(4, 2, 1), Placement.contiguous(3, 16, 4), groups=groups, settings=PlanSettings(1.02, 8),
        costs=costs, threads=2,
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
    assert set(plan.far_replicas.tolist()) == {False, True}
    assert np.count_nonzero(plan.mixed_ML) == 3
