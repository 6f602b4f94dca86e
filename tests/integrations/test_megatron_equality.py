"""Balanced Megatron models train as Megatron's own: losses, `main_grad`s and parameters over optimizer steps.

Options are combined so that every value occurs; in the long form all values of any three options, the layout of ranks
among them. The first of each layout then trains for five steps, the others for two.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from helpers.accelerator import LAZY
from helpers.examples import examples, nightly_except
from helpers.megatron_runs import Layout, MegatronCase, compare_runs
from helpers.rank_pool import on_ranks

LAYOUTS = {
    "EP 2": Layout(2, 2),
    "EP 2 x expert-DP 2": Layout(4, 2),
    "PP 2 x EP 2": Layout(4, 2, pipeline=2),
    "interleaved PP 2 x EP 2": Layout(4, 2, pipeline=2, interleaved=True),
    "TP 2 x EP 2": Layout(2, 2, tensor=2),
    "CP 2 x EP 2": Layout(2, 2, context=2),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS), "recompute": ("none", "moe", "uniform", "block"),
    "distributed_optimizer": (False, True), "overlap": (False, True),
    "random_plans": (True, False), "router_replay": (False, True),
}  # fmt: skip
MORE: dict[str, list[MegatronCase]] = {
    "EP 2": [
        MegatronCase(
            double=True,
            frozen=True,
            per_token=True,
            options={"bias_activation_fusion": True, "activation_func_fp8_input_store": True},
        ),
        # Each copy's gradient is rounded to bfloat16, a replica's as that of Megatron's product at home.
        MegatronCase(bf16=True),
        MegatronCase(bf16=True, distributed_optimizer=True, overlap=True),
    ],
    "PP 2 x EP 2": [
        MegatronCase(double=True, dense_stage=True),
        # The first micro-batch alone is recomputed.
        MegatronCase(
            double=True, recompute="uniform", options={"num_microbatches_with_partial_activation_checkpoints": 1}
        ),
    ],
}
"""Options that are not combined with others."""
# How many options are combined in all ways.
TOGETHER = examples(short=1, long=3)


def parts_of(values: tuple[Any, ...], together: int) -> set[tuple[tuple[int, Any], ...]]:
    """The values of any options in a combination, `together` of them at a time."""
    return set(itertools.combinations(enumerate(values), together))


def combinations(together: int) -> list[tuple[Any, ...]]:
    """Combinations in which every part occurs: always the one with most parts that are missing, any of equals."""
    every = list(itertools.product(*OPTIONS.values()))
    random.Random(0).shuffle(every)
    missing = set().union(*(parts_of(values, together) for values in every))
    chosen = []
    while missing:
        chosen.append(max(every, key=lambda values: len(parts_of(values, together) & missing)))
        missing -= parts_of(chosen[-1], together)
    return chosen


def cases_of(layout: str) -> list[MegatronCase]:
    """Megatron's distributed optimizer has no float64."""
    found: list[MegatronCase] = []
    for seed, values in enumerate(values for values in combinations(TOGETHER) if values[0] == layout):
        options = dict(zip(list(OPTIONS)[1:], values[1:], strict=True))
        steps = examples(short=2, long=2 if found else 5)
        found.append(MegatronCase(seed, steps, double=not options["distributed_optimizer"], **options))
    return found


# By policy, without recorded routing.
LIVE: dict[str, list[MegatronCase]] = {
    "EP 2": [
        MegatronCase(1, double=True, live="quota", recompute="uniform"),
        MegatronCase(2, double=True, live="quota", recompute="moe", router_replay=True),
        MegatronCase(3, live="quota", distributed_optimizer=True, overlap=True),
        MegatronCase(4, 3, double=True, live="quota", recompute="block"),
        MegatronCase(5, double=True, live="off"),
        MegatronCase(6, double=True, live="quota", balanced_routers=True),
    ],
    "EP 2 x expert-DP 2": [MegatronCase(11, 3, double=True, live="quota", overlap=True)],
    "PP 2 x EP 2": [MegatronCase(7, double=True, live="quota", dense_stage=True)],
    "interleaved PP 2 x EP 2": [MegatronCase(9, double=True, live="quota", recompute="uniform")],
}

ON_LATE_DEVICES = [
    MegatronCase(double=True, grouped=True, recompute="uniform"),
    *examples(
        short=[],
        long=[MegatronCase(double=True, recompute="moe"), MegatronCase(1, double=True, live="quota", recompute="moe")],
    ),
]


@pytest.mark.longer
@pytest.mark.parametrize(
    "name", nightly_except(LAYOUTS, "EP 2 x expert-DP 2", "PP 2 x EP 2", "TP 2 x EP 2", "CP 2 x EP 2")
)
def test_balanced_models_train_as_megatron_s_own(name: str) -> None:
    """From recorded routing, and in live micro-steps."""
    layout, cases = LAYOUTS[name], [*cases_of(name), *MORE.get(name, []), *LIVE.get(name, [])]
    on_ranks(compare, (layout, cases), ranks=layout.ranks, patched="megatron")


@pytest.mark.nightly
@pytest.mark.longer
def test_balanced_models_train_as_megatron_s_own_if_the_device_is_late() -> None:
    on_ranks(compare, (LAYOUTS["EP 2"], ON_LATE_DEVICES), ranks=2, patched="megatron", ways=LAZY)


def compare(layout: Layout, cases: list[MegatronCase]) -> None:
    """Differences grow with layers, eight if interleaved, and with optimizer steps."""
    double = 1e-11 if layout.interleaved else 1e-12
    for case, error in zip(cases, compare_runs(layout, cases), strict=True):
        assert error < (double if case.double else 5e-3 if case.bf16 else 3e-5), (case, error)


def test_expert_gradients_of_data_ranks_are_reduced_in_the_same_order() -> None:
    """Buckets end within a layer, in which the two expert-parallel groups have different replicas."""
    cases = [
        MegatronCase(seed, examples(short=3, long=4), double=True, overlap=True)
        for seed in range(examples(short=1, long=5))
    ]
    on_ranks(compare, (LAYOUTS["EP 2 x expert-DP 2"], cases), ranks=4, patched="megatron")
