"""Live micro-steps: results of the unbalanced model, whatever is chosen, in any order of forwards and backwards."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from helpers.equality import CHECKPOINTING
from helpers.examples import examples, nightly_except
from helpers.live_runs import LiveCase, compare_live
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.transfer import streams

POLICIES = ("quota", "feplb", "off")


def compare_policy(cases: list[LiveCase]) -> None:
    replicas = compare_live(cases)
    assert (replicas > len(cases)) == (cases[0].policy != "off"), replicas


@pytest.mark.longer
@pytest.mark.parametrize(("ranks", "policy"), nightly_except(product([2, 4], POLICIES), (2, "quota"), (4, "feplb")))
def test_live_micro_steps_equal_the_single_process(policy: str, ranks: int) -> None:
    first = POLICIES.index(policy) + 1
    cases = [
        LiveCase(
            seed, policy, run_block=CHECKPOINTING[seed % 4],
            at_once=ranks == 4 or seed // 4 % 2 == 1, padded=seed % 3 == 1, by_messages=seed % 5 == 3,
            listed=seed % 5 == 4,
        )
        for seed in range(first, first + examples(short=4, long=48))
    ]  # fmt: skip
    on_ranks(compare_policy, (cases,), ranks=ranks)


@pytest.mark.longer
@pytest.mark.parametrize("policy", ["quota", pytest.param("feplb", marks=pytest.mark.nightly)])
def test_any_choice_equals_the_single_process(policy: str) -> None:
    cases = [
        LiveCase(seed, policy, run_block=CHECKPOINTING[seed % 4], at_once=seed % 2 == 0, random=True)
        for seed in range(examples(short=4, long=80))
    ]
    on_ranks(compare_policy, (cases,), ranks=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_may_have_several_backwards(policy: str) -> None:
    cases = [
        LiveCase(seed, policy, run_block=run, at_once=seed % 2 == 0, twice=True)
        for seed, run in enumerate(CHECKPOINTING, 3)
    ]
    on_ranks(compare_policy, (cases,), ranks=2)


@runs_on_ranks()
def test_auto_uses_the_policy_whose_forwards_are_the_fastest() -> None:
    """In proportion to their rows, each of which takes a second of a clock that nothing else advances."""
    clock, replicas = [0.0], list[float]()

    def apply(_weights: Any, rows: torch.Tensor, _groups: Any) -> torch.Tensor:
        clock[0] += len(rows)
        return rows

    session = Session(num_experts=4, mode="live")
    layer = session.add_layer([torch.nn.Parameter(torch.ones(2, 1, 4))], apply)
    with mock.patch.object(streams, "time", SimpleNamespace(perf_counter=lambda: clock[0], thread_time=lambda: 0.0)):
        for number in range(10):
            # The forwards of the first policy, which has no replicas, are short. All rows are of one rank's expert.
            tokens = 256 if number < 3 else 1024
            with torch.no_grad(), session.live_micro_step():
                ids = layer.route(torch.zeros(tokens, 1, dtype=torch.int64))
                layer(torch.ones(tokens, 4), ids, torch.ones(tokens, 1))
            replicas.append(session.take_metrics()["live/replicas"])
    assert replicas[:3] == [0, 0, 0]
    assert replicas[-1] > 0


@runs_on_ranks()
def test_live_sessions_refuse_plans() -> None:
    session = Session(num_experts=2, mode="live")
    session.add_layer([torch.nn.Parameter(torch.ones(1, 4, 4))], gated_experts())
    with pytest.raises(InputError, match="mode 'live' makes no plans"):
        session.plan_micro_steps([np.zeros((3, 1, 1), np.int64)])
    session.mode = "plan"
    assert session.plan_micro_steps([np.zeros((3, 1, 1), np.int64)]).micro_steps == 1
