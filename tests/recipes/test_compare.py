"""The comparison of net step time: the same steps for both trainers; figures and page compared with sums by hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from helpers.rank_tests import runs_on_ranks
from helpers.trainers import EXPERTS, LAYERS, make_responses, start
from recipes.rl import compare
from recipes.rl.compare import (
    NAMES,
    MeasuredPolicy,
    busiest_part,
    compare_policies,
    comparison_figures,
    parts_of,
    sentences,
    timeline_of,
    with_waiting,
)
from recipes.rl.train import Trainer
from trimtab.runtime.ranks.recorder import BACKWARD, COMBINE, DISPATCH, OTHER, SUMMING, WAITING, Recording
from trimtab.runtime.ranks.recorder import EXPERTS as RUN
from trimtab.timeline.recorded_operations import LANES


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.session.whole_state_dict(trainer.model).items()}


@runs_on_ranks()
def test_both_trainers_train_the_same_steps(folder: Path) -> None:
    static, balanced = start(folder, mode="static"), start(folder)
    before = weights(balanced)
    steps: list[int] = []
    order: list[Trainer] = []

    def rollout(step: int) -> list[Any]:
        steps.append(step)
        return make_responses(16, hot=True)[balanced.rank :: 2]

    def watched(trainer: Trainer) -> Any:
        train = trainer.train

        def ordered(*args: Any) -> Any:
            order.append(trainer)
            return train(*args)

        return mock.patch.object(trainer, "train", ordered)

    with mock.patch.object(balanced, "rollout", rollout), watched(static), watched(balanced):
        policies = compare_policies(static, balanced, range(5, 9))
    # A pair to warm up, three that are timed, one that is recorded.
    assert steps == [5, 6, 7, 8, 9]
    pair = [static, balanced]
    assert order == [*pair, *pair[::-1], *pair, *pair[::-1], *pair]
    for policy in policies.values():
        assert len(policy.step_s) == len(policy.metrics) == 3
        assert min(policy.step_s) > 0.001
        assert len(policy.recordings) == 2
        ratios_ML = policy.loads_MLR.max(axis=2) / policy.loads_MLR.mean(axis=2)
        assert policy.recorded["moe/max_vio_after"] == pytest.approx(ratios_ML.mean() - 1)
    figures = comparison_figures(policies)
    assert figures["static"]["replicas"] == 0
    # All rows on the contiguous homes of their experts.
    rows_LR = np.zeros((LAYERS, 2), np.int64)
    for sequence in make_responses(16, hot=True):
        for layer in range(LAYERS):
            rows_LR[layer] += np.bincount(sequence.expert_ids[:, layer].reshape(-1) // (EXPERTS // 2), minlength=2)
    assert np.array_equal(policies["static"].loads_MLR.sum(axis=0), rows_LR)
    assert figures["trimtab"]["max_vio"] < figures["static"]["max_vio"] / 2
    # They train, and equally.
    assert 0 < figures["norm_difference"] < 1e-3
    assert figures["loss_difference"] < 1e-5
    losses = [metrics["loss"] for metrics in policies["static"].metrics]
    assert min(abs(np.diff(losses))) > 1e-4
    for name, value in weights(balanced).items():
        assert torch.allclose(value, weights(static)[name], atol=1e-4), name
        assert "proj" not in name or not torch.equal(value, before[name]), name
    for trainer in pair:
        trainer.close()


@runs_on_ranks()
def test_the_clock_covers_planning_and_all_that_follows_the_rollout(folder: Path) -> None:
    """The parts of a step advance the clock, each by another amount."""
    trainers = static, balanced = start(folder, mode="static"), start(folder)
    now = 0.0

    def advancing(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            nonlocal now
            now += seconds
            return call(*args, **options)

        return called

    sequences = make_responses(12)[static.rank :: 2]
    with ExitStack() as patches:
        clock = SimpleNamespace(perf_counter=lambda: now)
        patches.enter_context(mock.patch.object(compare, "time", clock))
        rollout = advancing(lambda _step: sequences, 1e6)
        patches.enter_context(mock.patch.object(balanced, "rollout", rollout))
        for trainer in trainers:
            for owner, name, seconds in (
                (trainer.session, "plan_sequences", 1), (trainer.session, "apply_plan", 10),
                (trainer, "recompute", 100), (trainer, "update", 1000), (trainer, "sync_rollout", 10000),
            ):  # fmt: skip
                patches.enter_context(mock.patch.object(owner, name, advancing(getattr(owner, name), seconds)))
        policies = compare_policies(static, balanced, range(3))
    for trainer in trainers:
        trainer.close()
    step_s = {name: policy.step_s for name, policy in policies.items()}
    assert step_s == {"static": [11111, 11111], "trimtab": [11111, 11111]}


def recording(*done: tuple[int, int, float], micro_steps: tuple[tuple[int, float, float], ...] = ()) -> Recording:
    """A recording of consecutive activities: kind, layer and seconds of each."""
    kinds, layers, seconds = zip(*done, strict=True)
    ends = np.cumsum(seconds)
    return Recording(np.array(kinds, np.uint8), np.array(layers, np.int16), ends - seconds, ends, micro_steps)


def two_ranks() -> list[Recording]:
    fast = recording((OTHER, -1, 1), (DISPATCH, 0, 3), (RUN, 0, 2), (COMBINE, 0, 5), (SUMMING, -1, 1))
    slow = ((OTHER, -1, 3), (DISPATCH, 0, 1), (RUN, 0, 5), (WAITING, 0, 1), (COMBINE, 0, 1), (SUMMING, -1, 1))
    return [fast, recording(*slow)]


def measured(*step_s: float, loss: float = 0.5, norm: float = 2.0, max_vio: float = 0.25) -> MeasuredPolicy:
    names = ("moe/replicas", "planning_s", "waited_s")
    metrics = {"loss": loss, "grad_norm": norm, "moe/max_vio_after": max_vio} | dict.fromkeys(names, 1.0)
    return MeasuredPolicy([*step_s], [metrics] * len(step_s), np.zeros(0), metrics, two_ranks())


def test_the_speedup_is_the_median_of_the_pairs_with_an_interval() -> None:
    static, other = measured(2.0, 4.0, 9.0, 8.0, 5.0), measured(1.0, 1.0, 3.0, 4.0, 1.0, loss=0.75, norm=2.5)
    found = comparison_figures({"static": static, "trimtab": other})
    low, high = found["speedup_interval"]
    assert found["speedup"] == statistics.median([2.0, 4.0, 3.0, 2.0, 5.0])
    assert 2.0 <= low < found["speedup"] < high <= 5.0
    assert (found["loss_difference"], found["norm_difference"]) == (0.25, 0.25)
    assert found["trimtab"]["median_s"] == 1.0
    assert found["trimtab"]["replicas"] == 5
    # The slow rank's experts run for 5 of 12 seconds; with even loads they would for 4.
    assert found["busiest_part"] == busiest_part(two_ranks()) == pytest.approx(5 / 12)
    assert found["possible_speedup"] == pytest.approx(12 / 11)


@pytest.mark.parametrize(
    ("step_s", "verdict"),
    [
        ((1.0, 1.0, 1.1), "Trimtab makes a training step 2.00 times"),
        ((1.0, 2.5, 3.0), "no sure gain"),
        ((4.0, 4.0, 5.0), "slower"),
    ],
)
def test_the_answer_says_whether_the_gain_is_more_than_noise(step_s: tuple[float, ...], verdict: str) -> None:
    policies = {"static": measured(2.0, 2.0, 2.0), "trimtab": measured(*step_s, max_vio=0.01)}
    text, *_ = sentences(comparison_figures(policies))
    assert [each for each in ("Trimtab makes", "no sure gain", "slower") if each in text] == [verdict[:13].rstrip()]
    assert verdict in text
    assert "1.0% more than the mean instead of 25.0%" in text


def as_rows(done: Recording) -> list[tuple[str, float, float]]:
    columns = (done.kind_N.tolist(), done.start_N.tolist(), done.end_N.tolist())
    return [(NAMES[kind], start, end) for kind, start, end in zip(*columns, strict=True) if end > start]


def test_a_collective_starts_when_the_last_rank_reaches_it() -> None:
    fast, slow = with_waiting(two_ranks())
    assert as_rows(fast) == [
        ("attention and other", 0, 1), ("waiting for other ranks", 1, 3), ("dispatch", 3, 4), ("experts", 4, 6),
        ("waiting for other ranks", 6, 10), ("combine", 10, 11), ("gradient sums", 11, 12),
    ]  # fmt: skip
    assert as_rows(slow) == as_rows(two_ranks()[1])


def test_recordings_with_different_collectives_stay_unchanged() -> None:
    odd = [recording((OTHER, -1, 1), (DISPATCH, 0, 1)), recording((OTHER, -1, 1), (COMBINE, 0, 1))]
    assert [as_rows(r) for r in with_waiting(odd)] == [as_rows(r) for r in odd]


def test_parts_are_means_over_ranks_and_add_up_to_the_step() -> None:
    parts = parts_of(with_waiting(two_ranks()), 36.0, 0.5)
    assert sum(parts.values()) == pytest.approx(36.0)
    # Means scaled by 3: 12 seconds were recorded.
    assert parts == pytest.approx({
        "attention": 4.5, "planning": 1.5, "dispatch": 6, "experts": 10.5, "imbalance": 9,
        "transfers": 1.5, "optimizer": 3,
    })  # fmt: skip


def test_the_timeline_is_the_update_of_the_median_micro_step() -> None:
    passes = ((0, 0.0, 1.0), (1, 1.0, 2.0), (2, 2.0, 3.0), (0, 3.0, 8.0), (1, 8.0, 9.0), (2, 9.0, 12.0))
    done = [(OTHER, -1, 9.0), (RUN, 1, 1.0), (COMBINE, 1, 0.5), (WAITING, 1, 0.5), (RUN + BACKWARD, 1, 1.0)]
    other = [(OTHER, -1, 9.0), (RUN, 1, 2.5), (COMBINE, 1, 0.5)]
    ranks = [recording(*done, micro_steps=passes), recording(*other, micro_steps=passes)]
    timeline = timeline_of("trimtab", ranks, LANES.index("network"))
    assert timeline.title == "trimtab, update of micro-step 2"
    columns = (getattr(timeline, f"{name}_N").tolist() for name in ("rank", "lane", "kind", "layer", "start", "end"))
    assert [(rank, LANES[lane], NAMES[kind], *others) for rank, lane, kind, *others in zip(*columns, strict=True)] == [
        (0, "compute", "experts", 1, 0.0, 1.0),
        (0, "network", "combine", 1, 1.0, 1.5),
        (0, "compute", "waiting for replicas or their gradients", 1, 1.5, 2.0),
        (0, "compute", "experts, backward", 1, 2.0, 3.0),
        (1, "compute", "experts", 1, 0.0, 2.5),
        (1, "network", "combine", 1, 2.5, 3.0),
    ]
