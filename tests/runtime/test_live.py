"""Live micro-steps: results of the unbalanced model, whatever is chosen, in any order of forwards and backwards."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.equality import CHECKPOINTING
from helpers.examples import examples
from helpers.live_runs import LiveCase, compare_live
from helpers.rank_pool import on_ranks
from trimtab.cluster import ClusterSpec
from trimtab.errors import InputError
from trimtab.planner import PlanSettings
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.live.balancer import LiveBalancer
from trimtab.runtime.live.trials import TRIED

POLICIES = ("quota", "feplb", "predict", "auto", "off")


def compare_policy(cases: list[LiveCase]) -> None:
    replicas = compare_live(cases)
    assert (replicas > len(cases)) == (cases[0].policy != "off"), replicas


@pytest.mark.longer
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_live_micro_steps_equal_the_single_process(policy: str, ranks: int) -> None:
    cases = [
        LiveCase(
            seed, policy, predictor=("last", "average", "same")[seed % 3], run_block=run_block, at_once=at_once,
            padded=seed % 3 == 1, by_messages=seed % 4 == 3, listed=seed % 5 == 4,
        )
        for seed, (run_block, at_once, _) in enumerate(
            itertools.product(CHECKPOINTING, (False, True) if ranks == 2 else (True,), range(examples(short=1, long=8)))
        )
    ]  # fmt: skip
    on_ranks(compare_policy, (cases,), ranks=ranks)


@pytest.mark.longer
@pytest.mark.parametrize("policy", ["quota", "feplb"])
def test_any_choice_equals_the_single_process(policy: str) -> None:
    cases = [
        LiveCase(seed, policy, run_block=CHECKPOINTING[seed % 4], at_once=seed % 2 == 0, random=True)
        for seed in range(examples(short=8, long=80))
    ]
    on_ranks(compare_policy, (cases,), ranks=3)


def test_replicas_that_transfers_have_started_are_used() -> None:
    """Transfers ask for the next two calls of the only layer, while `auto` tries another policy after the next one."""
    layer: Any = SimpleNamespace(home_E=np.array([0, 0, 1, 1], np.int16), rows_E=np.array([0, 1, 0, 1]))
    limits = PlanSettings().limits(ClusterSpec(2, 2, 1))
    balancer = LiveBalancer("auto", "last", [layer], limits)
    counts_RE = np.array([[4000, 3000, 10, 10], [4000, 3000, 10, 10]])
    measured_RS = np.array([[1000, 7020], [1000, 7020]])
    asked: dict[int, Any] = {}
    forced = 0
    for _ in range(4 * TRIED):
        for number in (balancer.last - 1, balancer.last - 2):
            if balancer.count(number, 0):
                asked[number] = balancer.of(number, 0)
        would = balancer._policy_of(0)
        call = balancer.choose(0, counts_RE, measured_RS)
        if call.number in asked:
            forced += would != "predict"
            replicas = asked[call.number]
            assert np.array_equal(call.replicas.experts, replicas.experts)
            assert np.array_equal(call.replicas.ranks, replicas.ranks)
        # Faster without replicas, so that `auto` leaves `predict`.
        measured_RS = np.array([[1000 * (1 + call.replicas.count), 7020]] * 2)
    assert asked
    assert forced


def refuse_plans() -> None:
    session = Session(num_experts=2, mode="live")
    session.add_layer([torch.nn.Parameter(torch.ones(1, 4, 4))], gated_experts())
    with pytest.raises(InputError, match="mode 'live' makes no plans"):
        session.plan_micro_steps([np.zeros((3, 1, 1), np.int64)])
    session.mode = "plan"
    assert session.plan_micro_steps([np.zeros((3, 1, 1), np.int64)]).micro_steps == 1
    session.close()


def test_live_sessions_refuse_plans() -> None:
    on_ranks(refuse_plans, (), ranks=2)
