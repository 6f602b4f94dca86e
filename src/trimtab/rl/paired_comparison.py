"""Comparison of net step time: two trainers train the same responses from the same weights, static and balanced."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import median_with_interval
from trimtab.rl.busiest_rank import busiest_part, possible_speedup
from trimtab.rl.collectives import gather
from trimtab.rl.sequences import Sequence
from trimtab.rl.step_metrics import StepClock
from trimtab.rl.trainer import Trainer
from trimtab.runtime.ranks.recorder import Recording

Metrics = dict[str, float]


@dataclass(frozen=True, eq=False)
class MeasuredPolicy:
    """Steps of one policy.

    Attributes:
        step_s: seconds of each step from the arrival of its responses until the rollout model has the new weights:
            planning, exchange of sequences, moves, recompute, update and weight synchronisation.
        metrics: of each step, as in `metrics.jsonl`.
        loads_MLR: tokens `[M, L, R]` int64 that each rank computes in the recorded step.
        recorded: metrics of one more step, which was recorded.
        recordings: activities of each rank in that step, in rank order; empty on ranks other than 0.
    """

    step_s: list[float]
    metrics: list[Metrics]
    loads_MLR: Array
    recorded: Metrics
    recordings: tuple[Recording, ...]

    @property
    def median_s(self) -> float:
        """Median of `step_s`."""
        return statistics.median(self.step_s)

    def median(self, name: str) -> float:
        """Median of a metric over the steps."""
        return statistics.median(metrics[name] for metrics in self.metrics)

    def total(self, name: str) -> int:
        """Sum of a metric over the steps."""
        return int(sum(metrics[name] for metrics in self.metrics))


@dataclass(frozen=True, eq=False)
class PairedComparison:
    """Both policies on the same responses.

    Attributes:
        static: expert parallelism on contiguous homes, without replicas.
        balanced: the run's mode.
    """

    static: MeasuredPolicy
    balanced: MeasuredPolicy

    @property
    def policies(self) -> dict[str, MeasuredPolicy]:
        """Both, by name."""
        return {"static": self.static, "trimtab": self.balanced}

    @property
    def speedup(self) -> tuple[float, list[float]]:
        """Step time of static divided by that of the other: median over the pairs, and its 95% interval."""
        return median_with_interval([s / b for s, b in zip(self.static.step_s, self.balanced.step_s, strict=True)])

    @property
    def busiest_part(self) -> float:
        """Part of the recorded step of static that goes to the experts of the busiest rank; 0 on ranks other than 0."""
        return busiest_part(self.static.recordings)

    @property
    def possible_speedup(self) -> float:
        """Of even loads, if nothing else of a step changes; 1 on ranks other than 0."""
        return possible_speedup(self.busiest_part, self.static.median("moe/max_vio_after"))

    @property
    def loss_difference(self) -> float:
        """Largest difference of the losses of a pair. Losses are equal but for rounding."""
        return self._largest_difference("loss")

    @property
    def norm_difference(self) -> float:
        """Largest difference of the gradient norms of a pair, as a fraction of the norm."""
        largest = min(metrics["grad_norm"] for metrics in self.static.metrics)
        return self._largest_difference("grad_norm") / max(largest, 1e-30)

    def _largest_difference(self, name: str) -> float:
        pairs = zip(self.static.metrics, self.balanced.metrics, strict=True)
        return max(abs(static[name] - balanced[name]) for static, balanced in pairs)


def compare_policies(
    static: Trainer, balanced: Trainer, first_step: int, pairs: int, advance: Callable[[str], None] = lambda note: None
) -> PairedComparison:
    """Train `pairs` steps with both trainers, and time each. Both change. Collective.

    A pair before them warms up, one after them is recorded. The trainers alternate in which is first.

    Args:
        static: in mode `static`, with the weights and optimizer state of `balanced`.
        balanced: the run's trainer; it also samples the responses.
        first_step: index of the first RL step.
        pairs: number of pairs that are timed.
        advance: called after each pair with "".
    """
    trainers = {"static": static, "trimtab": balanced}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    metrics: dict[str, list[Metrics]] = {name: [] for name in trainers}
    for pair in range(pairs + 1):
        sequences = balanced.algorithm.trained(balanced.rollout(first_step + pair))
        for name in list(trainers)[:: -1 if pair % 2 else 1]:
            seconds, of_step = _train(trainers[name], sequences, first_step + pair)
            if pair:
                times[name].append(seconds)
                metrics[name].append(of_step)
        if pair:
            advance("")
    last = first_step + pairs + 1
    sequences = balanced.algorithm.trained(balanced.rollout(last))
    results = {}
    for name, trainer in trainers.items():
        recorded, recordings = _record(trainer, sequences, last)
        results[name] = MeasuredPolicy(times[name], metrics[name], trainer.session.rank_loads, recorded, recordings)
    return PairedComparison(results["static"], results["trimtab"])


def _train(trainer: Trainer, sequences: list[Sequence], step: int) -> tuple[float, Metrics]:
    """Seconds and metrics of an RL step, from a common start until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    _, metrics = trainer.train(sequences, step, StepClock())
    dist.barrier()
    return time.perf_counter() - start, metrics


def _record(trainer: Trainer, sequences: list[Sequence], step: int) -> tuple[Metrics, tuple[Recording, ...]]:
    """Metrics of an RL step, and recordings of all ranks, which are empty on ranks other than 0."""
    dist.barrier()
    with trainer.session.recording() as recorder:
        _, metrics = _train(trainer, sequences, step)
        return metrics, tuple(gather(recorder.finish()))
