"""Live micro-steps: results of the unbalanced model, whatever is chosen, in any order of forwards and backwards."""

from __future__ import annotations

from itertools import product

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
def test_live_sessions_refuse_plans() -> None:
    session = Session(num_experts=2, mode="live")
    session.add_layer([torch.nn.Parameter(torch.ones(1, 4, 4))], gated_experts())
    with pytest.raises(InputError, match="mode 'live' makes no plans"):
        session.plan_micro_steps([np.zeros((3, 1, 1), np.int64)])
    session.mode = "plan"
    assert session.plan_micro_steps([np.zeros((3, 1, 1), np.int64)]).micro_steps == 1
