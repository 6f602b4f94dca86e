"""ForeMoE: balanced homes for the step, replicas on any rank, and as a policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_policy, random_step, random_steps
from trimtab.planner.plan.workload import max_over_mean
from trimtab.policies.rivals.foremoe import ForeMoe


@pytest.mark.parametrize(("ranks", "experts"), [(8, 128), (16, 128), (32, 256)])
def test_homes_balance_the_step_and_replicas_the_micro_steps(ranks: int, experts: int) -> None:
    step = random_step(
        np.random.default_rng(ranks),
        ranks=ranks,
        experts=experts,
        ranks_per_node=8,
        micro_steps=4,
        sequences=16 * ranks,
        top_k=8,
    )
    workload = step.workload()
    own, equal = (ForeMoe().plan(step.view(ForeMoe(), equal_terms=terms)) for terms in (False, True))
    static = max_over_mean(workload.home_loads(step.placement.home)).mean()
    homes_alone = max_over_mean(workload.home_loads(own.home)).mean()
    assert homes_alone < static
    assert max_over_mean(own.rank_loads(workload)).mean() <= 1.02
    assert max_over_mean(equal.rank_loads(workload)).mean() <= 1.04
    assert own.num_replicas <= 1.1 * equal.num_replicas


def test_homes_stay_if_new_ones_gain_little() -> None:
    step = random_step(np.random.default_rng(1), ranks=8, experts=64)
    policy = ForeMoe(smallest_gain=100.0)
    assert np.array_equal(policy.plan(step.view(policy, equal_terms=False)).home, step.placement.home)


@settings(max_examples=60, deadline=None)
@given(random_steps(), st.sampled_from([1, 128]), st.sampled_from([1.0, 1.2]))
def test_plans_are_valid_and_keep_to_the_terms(step: Step, smallest_share: int, threshold: float) -> None:
    plans = check_policy(ForeMoe(threshold=threshold, smallest_share=smallest_share), step)
    workload = step.known_workload()
    for plan in plans.values():
        assert np.all(plan.rank_loads(workload).max(axis=-1) <= workload.home_loads(plan.home).max(axis=-1))
        if plan.num_replicas:
            assert np.add.reduceat(plan.quota_tokens, plan.quota_starts[:-1]).min() >= smallest_share
