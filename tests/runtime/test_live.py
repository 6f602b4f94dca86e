"""Live micro-steps: results of the unbalanced model, whatever is chosen, in any order of forwards and backwards."""

from __future__ import annotations

import itertools

import pytest

from helpers.equality import CHECKPOINTING
from helpers.examples import examples
from helpers.live_runs import LiveCase, compare_live
from helpers.rank_pool import on_ranks

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
            itertools.product(CHECKPOINTING, (False, True), range(examples(short=1, long=8)))
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
