"""`LiveBalancer`: until when a prediction follows new counts, and what `auto` does with one that is on its way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.planner import PlanSettings
from trimtab.runtime.live.balancer import LiveBalancer
from trimtab.runtime.live.policies import TRIED, LivePolicy
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
    return LiveBalancer(policy, "last", [homes], limits)


def choose(balancer: LiveBalancer, counts_RE: Array, *, nanoseconds: int = 0) -> list[int]:
    """Experts of the replicas that the next call gets."""
    measured_RS = np.array([[nanoseconds, 1], [nanoseconds, 1]]) if nanoseconds else np.zeros((2, 2), np.int64)
    experts: list[int] = balancer.choose(0, counts_RE, measured_RS).replicas.experts.tolist()
    return experts


def test_metrics_are_means_of_the_calls() -> None:
    balancer = new_balancer("quota")
    # 14,000 rows of two ranks: 8,000 on rank 0 if expert 0 is hot; and even counts.
    for counts_RE in (hot(0), hot(0), EVEN, EVEN):
        choose(balancer, counts_RE)
    found = balancer.figures.metrics()
    rows_R = hot(0).sum(axis=0).reshape(2, 2).sum(axis=1)
    assert found["live/calls"] == 4
    assert found["live/max_vio_before"] == pytest.approx((rows_R.max() / rows_R.mean() - 1) / 2)
    assert found["live/max_vio_after"] < found["live/max_vio_before"]


def test_predictions_follow_counts_until_transfers_start() -> None:
    balancer = new_balancer("predict")
    assert choose(balancer, EVEN) == []
    following = balancer.last + 2
    assert balancer.count(following, 0) == 0
    assert choose(balancer, hot(3)) == []
    # Transfers start for the next two calls, whose counts then change nothing.
    for number in (following, following + 1):
        assert balancer.count(number, 0) == 1
        assert balancer.of(number, 0).experts.tolist() == [3]
    assert [choose(balancer, hot(0)) for _ in range(2)] == [[3], [3]]
    assert choose(balancer, hot(3)) == [0]


def test_auto_keeps_replicas_whose_transfers_have_started() -> None:
    balancer = new_balancer("auto")
    # `off` and `quota` are tried before `predict`; `quota` is the fastest.
    times = [0] + [300] * TRIED + [100] * TRIED + [200] * (TRIED - 2)
    for nanoseconds in times:
        choose(balancer, hot(3), nanoseconds=nanoseconds)
    following = balancer.last + 2
    assert balancer.of(following, 0).experts.tolist() == [3]
    # The last trial of `predict`.
    choose(balancer, hot(3), nanoseconds=200)
    assert choose(balancer, hot(0), nanoseconds=200) == [3]
    assert balancer.last == following
    # Without replicas on their way, it uses the fastest policy.
    assert choose(balancer, hot(0), nanoseconds=200) == [0]


def test_a_call_is_covered_if_compute_hardly_waited() -> None:
    balancer = new_balancer("quota")
    on_device: list[float | None] = [None]
    balancer.waited(lambda: 1.0, lambda: 0.01)
    balancer.waited(lambda: 2.0, lambda: on_device[0])
    balancer.waited(lambda: 3.0, lambda: 0.01)
    # The device is not done with the second.
    assert (balancer.figures.timed, balancer.figures.homes_s) == (1, 1.0)
    on_device[0] = 0.5
    balancer.waited(lambda: 4.0, lambda: 0.01)
    metrics = balancer.figures.metrics()
    assert metrics["live/homes_s"] == 10.0
    assert metrics["live/covered"] == 3 / 4


def test_measured_time_includes_choosing() -> None:
    balancer = new_balancer("quota")
    choose(balancer, hot(3))
    chosen_s = balancer.figures.choosing_s
    assert chosen_s > 0
    balancer.forwarded(0, lambda: 2.0, 70)
    assert balancer.measured(0) == (round((2.0 + chosen_s) * 1e9), 70)
    assert balancer.measured(0) == (0, 0)
