"""`LiveBalancer`: the figures of its choices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.rank_tests import runs_on_ranks
from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.errors import InputError
from trimtab.planner import PlanSettings
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.live.balancer import LiveBalancer, LivePolicy
from trimtab.runtime.state.home_experts import HomeExperts

HOME_E = np.array([0, 0, 1, 1], np.int16)
EVEN = np.full((2, 4), 1000)


def hot(expert: int) -> Array:
    counts_RE = EVEN.copy()
    counts_RE[:, expert] += 4000
    return counts_RE


def new_balancer(policy: LivePolicy) -> LiveBalancer:
    weights = [torch.nn.Parameter(torch.zeros(2, 1))]
    homes = HomeExperts(0, lambda: weights, rank=0, home_E=HOME_E)
    limits = PlanSettings().limits(ClusterSpec(2, 2, 1))
    return LiveBalancer(policy, [homes], limits)


def test_metrics_are_means_of_the_calls() -> None:
    balancer = new_balancer("quota")
    # 14,000 rows of two ranks: 8,000 on rank 0 if expert 0 is hot; and even counts.
    for counts_RE in (hot(0), hot(0), EVEN, EVEN):
        balancer.choose(0, counts_RE)
    found = balancer.figures.metrics()
    rows_R = hot(0).sum(axis=0).reshape(2, 2).sum(axis=1)
    assert found["live/calls"] == 4
    assert found["live/max_vio_before"] == pytest.approx((rows_R.max() / rows_R.mean() - 1) / 2)
    assert found["live/max_vio_after"] < found["live/max_vio_before"]


@runs_on_ranks()
def test_live_sessions_refuse_plans() -> None:
    session = Session(num_experts=2, mode="live")
    session.add_layer([torch.nn.Parameter(torch.ones(1, 4, 4))], gated_experts())
    with pytest.raises(InputError, match="mode 'live' makes no plans"):
        session.plan_micro_steps([np.zeros((3, 1, 1), np.int64)])
    session.mode = "plan"
    assert session.plan_micro_steps([np.zeros((3, 1, 1), np.int64)]).micro_steps == 1
