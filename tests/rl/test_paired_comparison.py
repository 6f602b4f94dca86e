"""The comparison of net step time: both trainers train the same steps, and the clock covers all of each."""

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
from helpers.trainers import EXPERTS, LAYERS, make_sequences, start
from trimtab.rl import paired_comparison
from trimtab.rl.comparison_text import answer
from trimtab.rl.paired_comparison import MeasuredPolicy, PairedComparison, compare_policies
from trimtab.rl.trainer import Trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.session.logical_state_dict(trainer.model).items()}


@runs_on_ranks()
def test_both_trainers_train_the_same_steps(folder: Path) -> None:
    static, balanced = start(folder, mode="static"), start(folder)
    before = weights(balanced)
    steps: list[int] = []
    order: list[Trainer] = []
    notes: list[str] = []

    def rollout(step: int) -> list[Any]:
        steps.append(step)
        return make_sequences(16, hot=True)[balanced.rank :: 2]

    def watched(trainer: Trainer) -> Any:
        train = trainer.train

        def ordered(*args: Any) -> Any:
            order.append(trainer)
            return train(*args)

        return mock.patch.object(trainer, "train", ordered)

    with mock.patch.object(balanced, "rollout", rollout), watched(static), watched(balanced):
        comparison = compare_policies(static, balanced, 5, 3, notes.append)
    # A pair to warm up, three that are timed, one that is recorded.
    assert steps == [5, 6, 7, 8, 9]
    assert len(notes) == 3
    pair = [static, balanced]
    assert order == [*pair, *pair[::-1], *pair, *pair[::-1], *pair]
    for policy in comparison.policies.values():
        assert len(policy.step_s) == len(policy.metrics) == 3
        assert min(policy.step_s) > 0.001
        assert len(policy.recordings) == (2 if balanced.rank == 0 else 0)
        ratios_ML = policy.loads_MLR.max(axis=2) / policy.loads_MLR.mean(axis=2)
        assert policy.recorded["moe/max_vio_after"] == pytest.approx(ratios_ML.mean() - 1)
    assert comparison.static.total("moe/homes_moved") == comparison.static.total("moe/replicas") == 0
    # All rows on the contiguous homes of their experts.
    rows_LR = np.zeros((LAYERS, 2), np.int64)
    for sequence in make_sequences(16, hot=True):
        for layer in range(LAYERS):
            rows_LR[layer] += np.bincount(sequence.expert_ids[:, layer].reshape(-1) // (EXPERTS // 2), minlength=2)
    assert np.array_equal(comparison.static.loads_MLR.sum(axis=0), rows_LR)
    assert comparison.balanced.median("moe/max_vio_after") < comparison.static.median("moe/max_vio_after") / 2
    # They train, and equally.
    assert 0 < comparison.norm_difference < 1e-3
    assert comparison.loss_difference < 1e-5
    losses = [metrics["loss"] for metrics in comparison.static.metrics]
    assert min(abs(np.diff(losses))) > 1e-4
    for name, value in weights(balanced).items():
        assert torch.allclose(value, weights(static)[name], atol=1e-4), name
        assert "proj" not in name or not torch.equal(value, before[name]), name
    for trainer in pair:
        trainer.close()


@runs_on_ranks()
def test_the_clock_covers_planning_moves_and_all_that_follows_the_rollout(folder: Path) -> None:
    """The parts of a step advance the clock, each by another amount."""
    trainers = static, balanced = start(folder, mode="static"), start(folder)
    now = 0.0

    def advancing(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            nonlocal now
            now += seconds
            return call(*args, **options)

        return called

    sequences = make_sequences(12)[static.rank :: 2]
    with ExitStack() as patches:
        clock = SimpleNamespace(perf_counter=lambda: now)
        patches.enter_context(mock.patch.object(paired_comparison, "time", clock))
        rollout = advancing(lambda _step: sequences, 1e6)
        patches.enter_context(mock.patch.object(balanced, "rollout", rollout))
        for trainer in trainers:
            for owner, name, seconds in (
                (trainer.session, "plan_sequences", 1), (trainer.session, "apply_plan", 10),
                (trainer, "recompute", 100), (trainer, "update", 1000), (trainer, "sync_rollout", 10000),
            ):  # fmt: skip
                patches.enter_context(mock.patch.object(owner, name, advancing(getattr(owner, name), seconds)))
        comparison = compare_policies(static, balanced, 0, 2)
    for trainer in trainers:
        trainer.close()
    step_s = {name: policy.step_s for name, policy in comparison.policies.items()}
    assert step_s == {"static": [11111, 11111], "trimtab": [11111, 11111]}


def measured(*step_s: float, loss: float = 0.5, norm: float = 2.0, max_vio: float = 0.25) -> MeasuredPolicy:
    metrics = {"loss": loss, "grad_norm": norm, "moe/max_vio_after": max_vio}
    return MeasuredPolicy([*step_s], [metrics] * len(step_s), np.zeros(0), metrics, ())


def test_the_speedup_is_the_median_of_the_pairs_with_an_interval() -> None:
    static, other = measured(2.0, 4.0, 9.0, 8.0, 5.0), measured(1.0, 1.0, 3.0, 4.0, 1.0)
    ratio, (low, high) = PairedComparison(static, other).speedup
    assert ratio == statistics.median([2.0, 4.0, 3.0, 2.0, 5.0])
    assert 2.0 <= low < ratio < high <= 5.0
    assert PairedComparison(static, static).speedup == (1.0, [1.0, 1.0])
    assert other.median_s == 1.0


@pytest.mark.parametrize(
    ("step_s", "verdict", "is_gain"),
    [
        ((1.0, 1.0, 1.1), "a training step 2.00 times", True),
        ((1.0, 2.5, 3.0), "no sure gain", False),
        ((4.0, 4.0, 5.0), "slower", False),
    ],
)
def test_the_answer_says_whether_the_gain_is_more_than_noise(
    step_s: tuple[float, ...], verdict: str, is_gain: bool
) -> None:
    text = answer(PairedComparison(measured(2.0, 2.0, 2.0), measured(*step_s, max_vio=0.01)))
    assert verdict in text
    assert ("no sure gain" in text or "slower" in text) != is_gain
    assert "1.0% more than the mean instead of 25.0%" in text
