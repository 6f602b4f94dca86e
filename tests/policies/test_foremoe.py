"""ForeMoE: balanced homes for the step, replicas on any rank, and as a policy."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.policies import random_step
from trimtab.planner.plan.workload import max_over_mean
from trimtab.policies.rivals.foremoe import ForeMoe


@pytest.mark.parametrize(("ranks", "experts"), [(8, 128), (16, 128), (32, 256)])
def test_homes_balance_the_step_and_replicas_the_micro_steps(ranks: int, experts: int) -> None:
    step = random_step(
        np.random.default_rng(ranks), ranks=ranks, experts=experts, ranks_per_node=8, micro_steps=4,
        sequences=16 * ranks, top_k=8,
    )  # fmt: skip
    workload = step.workload()
    own, equal = (step.plan(ForeMoe(), equal_terms=terms) for terms in (False, True))
    static = max_over_mean(workload.home_loads(step.placement.home)).mean()
    homes_alone = max_over_mean(workload.home_loads(own.home)).mean()
    assert homes_alone < static
    assert max_over_mean(own.rank_loads(workload)).mean() <= 1.02
    assert max_over_mean(equal.rank_loads(workload)).mean() <= 1.04
    assert own.num_replicas <= 1.1 * equal.num_replicas


def test_homes_stay_if_new_ones_gain_little() -> None:
    step = random_step(np.random.default_rng(1), ranks=8, experts=64)
    assert np.array_equal(step.plan(ForeMoe(smallest_gain=100.0)).home, step.placement.home)
