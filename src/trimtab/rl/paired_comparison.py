"""Comparison of static and trimtab in one run: recompute and update of the same responses, alternating."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.rl.collectives import gather
from trimtab.rl.trainer import PreparedStep, Trainer
from trimtab.runtime import PlanReport
from trimtab.runtime.planning import Mode
from trimtab.runtime.ranks.recorder import Recording

COMPARED: dict[str, Mode] = {"static": "static", "trimtab": "plan"}


@dataclass(frozen=True, eq=False)
class MeasuredPolicy:
    """Times and balance of one policy.

    Attributes:
        step_s: seconds of recompute and update (forward, backward, complete gradients) of each repetition.
        plan: report of the step's plan.
        loads_MLR: tokens `[M, L, R]` int64 that each rank computes.
        recordings: activities of each rank in one more repetition, in rank order; empty on ranks other than 0.
    """

    step_s: list[float]
    plan: PlanReport
    loads_MLR: Array
    recordings: tuple[Recording, ...]

    @property
    def median_s(self) -> float:
        """Median of `step_s`."""
        return statistics.median(self.step_s)

    @property
    def max_vio(self) -> float:
        """max/mean - 1 of rank loads, mean over instances."""
        return self.plan.max_vio_after


def speedup(static: MeasuredPolicy, other: MeasuredPolicy) -> float:
    """Step time of static divided by that of the other, median over the pairs."""
    return statistics.median(s / o for s, o in zip(static.step_s, other.step_s, strict=True))


def compare_policies(trainer: Trainer, step: int, pairs: int) -> dict[str, MeasuredPolicy]:
    """Time `pairs` alternating repetitions on new responses. Weights are not changed. Collective."""
    session = trainer.session
    own_mode = session.mode
    sequences = trainer.rollout(step)
    prepared = {}
    for name, mode in COMPARED.items():
        session.mode = mode
        prepared[name] = trainer.prepare(sequences, step)

    def apply_plan(name: str) -> PlanReport:
        session.mode = COMPARED[name]
        return session.apply_plan(prepared[name].planned, prepared[name].trace)

    times: dict[str, list[float]] = {name: [] for name in COMPARED}
    with trainer.log.progress("static against trimtab", pairs) as advance:
        for repetition in range(pairs + 1):
            for name in COMPARED:
                apply_plan(name)
                seconds = _run(trainer, prepared[name])
                if repetition:  # the first one warms up
                    times[name].append(seconds)
            if repetition:
                advance("")
    results = {}
    for name in COMPARED:
        plan = apply_plan(name)
        recordings = _record(trainer, prepared[name])
        results[name] = MeasuredPolicy(times[name], plan, session.rank_loads, recordings)
    session.mode = own_mode
    return results


def _run(trainer: Trainer, prepared: PreparedStep) -> float:
    """Seconds of recompute and update, from a common start until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    old_log_probs = trainer.recompute(prepared)
    for mini_batch in range(trainer.config.mini_batches):
        trainer.accumulate(prepared, old_log_probs, mini_batch)
        trainer.optimizer.zero_grad()
    dist.barrier()
    return time.perf_counter() - start


def _record(trainer: Trainer, prepared: PreparedStep) -> tuple[Recording, ...]:
    """Recordings of all ranks in one repetition; empty on ranks other than 0."""
    dist.barrier()
    with trainer.session.recording() as recorder:
        _run(trainer, prepared)
        return tuple(gather(recorder.finish()))
