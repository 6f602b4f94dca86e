"""Static against trimtab in one run: the same responses, planned, recomputed and updated under each in turn."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch.distributed as dist

from trimtab.rl.trainer import Trainer
from trimtab.runtime.planning import Mode

COMPARED: dict[str, Mode] = {"static": "static", "trimtab": "plan"}


@dataclass(frozen=True)
class PolicyResult:
    """Times and balance of one policy.

    Attributes:
        step_s: seconds of recompute and update (forward, backward, complete gradients) of each repetition.
        max_vio: max/mean - 1 of rank loads, mean over instances.
    """

    step_s: list[float]
    max_vio: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def compare_policies(trainer: Trainer, step: int, pairs: int) -> dict[str, PolicyResult]:
    """Time `pairs` alternating repetitions on a fresh batch of responses. The weights stay as they are."""
    session = trainer.session
    own_mode = session.mode
    sequences = trainer.rollout(step)
    prepared = {}
    for name, mode in COMPARED.items():
        session.mode = mode
        prepared[name] = trainer.prepare(sequences, step)
    times: dict[str, list[float]] = {name: [] for name in COMPARED}
    max_vio: dict[str, float] = {}
    with trainer.log.progress("static against trimtab", pairs) as advance:
        for repetition in range(pairs + 1):
            for name, mode in COMPARED.items():
                session.mode = mode
                max_vio[name] = session.adopt(prepared[name].planned, prepared[name].trace).max_vio_after
                dist.barrier()
                start = time.perf_counter()
                old = trainer.recompute(prepared[name])
                for mini_batch in range(trainer.config.mini_batches):
                    trainer.accumulate(prepared[name], old, mini_batch)
                dist.barrier()
                if repetition:  # the first one warms up
                    times[name].append(time.perf_counter() - start)
                trainer.optimizer.zero_grad()
            if repetition:
                advance("")
    session.mode = own_mode
    return {name: PolicyResult(times[name], max_vio[name]) for name in COMPARED}
