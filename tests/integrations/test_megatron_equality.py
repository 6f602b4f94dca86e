"""Balanced Megatron models train as Megatron's own: losses, `main_grad`s and parameters over optimizer steps.

Options are combined so that every pair of values of two options occurs, the layout of ranks among them.
The first of each layout trains for five steps, the others for two. `TRIMTAB_MEGATRON=full` runs all combinations, for
five steps.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest

from helpers.megatron_runs import Layout, MegatronCase, compare_runs
from trimtab.launch import launch

LAYOUTS = {
    "EP 2": Layout(2, 2),
    "EP 2 x expert-DP 2": Layout(4, 2),
    "PP 2 x EP 2": Layout(4, 2, pipeline=2),
    "interleaved PP 2 x EP 2": Layout(4, 2, pipeline=2, interleaved=True),
    "TP 2 x EP 2": Layout(2, 2, tensor=2),
    "CP 2 x EP 2": Layout(2, 2, context=2),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS),
    "recompute": ("none", "moe", "uniform", "block"),
    "distributed_optimizer": (False, True),
    "overlap": (False, True),
    "dispatcher": ("megatron", "trimtab"),
    "random_plans": (True, False),
    "router_replay": (False, True),
}
MORE: dict[str, list[MegatronCase]] = {
    "EP 2": [
        MegatronCase(double=True, frozen=True),
        MegatronCase(double=True, per_token=True),
        # Each copy's gradient is rounded to bfloat16, a replica's as that of Megatron's product at home.
        MegatronCase(bf16=True),
        MegatronCase(bf16=True, distributed_optimizer=True, overlap=True),
    ],
    "PP 2 x EP 2": [MegatronCase(double=True, dense_stage=True)],
}
"""Options that are not combined with others."""
FULL = os.environ.get("TRIMTAB_MEGATRON") == "full"


def pairs_of(values: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    """The pairs of values of two options in a combination."""
    return {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(len(values)), 2)}


def combinations() -> list[tuple[Any, ...]]:
    """Combinations in which every pair occurs: always the one with most pairs that are missing, the first of equals."""
    every = list(itertools.product(*OPTIONS.values()))
    if FULL:
        return every
    missing = set().union(*(pairs_of(values) for values in every))
    chosen = []
    while missing:
        chosen.append(max(every, key=lambda values: len(pairs_of(values) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


def cases_of(layout: str) -> list[MegatronCase]:
    """Megatron's distributed optimizer has no float64."""
    found: list[MegatronCase] = []
    for seed, values in enumerate(values for values in combinations() if values[0] == layout):
        options = dict(zip(list(OPTIONS)[1:], values[1:], strict=True))
        steps = 5 if FULL or not found else 2
        found.append(MegatronCase(seed, steps, double=not options["distributed_optimizer"], **options))
    return found


def test_combinations_cover_all_pairs() -> None:
    covered = set().union(*(pairs_of(values) for values in combinations()))
    values = list(OPTIONS.values())
    assert covered == {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(values)), 2)
        for a, b in itertools.product(values[i], values[j])
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_balanced_models_train_as_megatron_s_own(layout: str) -> None:
    cases = cases_of(layout) + MORE.get(layout, [])
    launch(compare, (LAYOUTS[layout], cases), ranks=LAYOUTS[layout].ranks)


def compare(layout: Layout, cases: list[MegatronCase]) -> None:
    """Differences grow with layers, eight if interleaved, and with optimizer steps."""
    double = 1e-11 if layout.interleaved else 1e-12
    for case, error in zip(cases, compare_runs(layout, cases), strict=True):
        assert error < (double if case.double else 5e-3 if case.bf16 else 3e-5), (case, error)
