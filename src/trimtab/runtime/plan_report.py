"""What a session reports: `PlanReport`, figures of a plan that was applied, and `RankMemory`, memory of one rank."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.figures import by_key, computed, measured, with_documented_figures
from trimtab.planner import PlannedStep
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime.ranks.process_groups import communicator_bytes
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer.transfers import Transfers


@with_documented_figures
@dataclass(frozen=True)
class PlanReport:
    """Figures of a planned step.

    Where replicas are planned while the step runs (`is_sliced`), their number, `max_vio_after` and `peak_rows_after`
    are expectations; `Session.take_metrics` has the figures of what was planned. `memory` is that of this rank when it
    is first asked for.
    """

    read_memory: Callable[[], RankMemory] = field(repr=False, compare=False)
    is_sliced: bool = measured("whether replicas and split follow while the step runs")
    planning_s: float = measured("from counting to the end of the plan's broadcast", "s", key="planning_s")
    waited_s: float = measured("for which the step waited: `planning_s`, and applying the plan", "s", key="waited_s")
    ahead_s: float = measured(
        "of counting and planning ahead of the step, during the rollout, on the first rank", "s", key="ahead_s"
    )
    known_ahead: float = measured(
        "part of the step's tokens from which the strategy was chosen ahead of the step; if it is 0, they were "
        "chosen from all, or doing nothing was; the schedule always is of all",
        key="known_ahead",
    )
    strategy: str = measured("what the plan does, the strategy with the least predicted time")
    runner_up: str = measured('the second best strategy; "" if there is no other')
    predicted_s: float = measured("predicted time of the step", "s")
    predicted_gain: float = measured(
        "predicted saving of the best strategy over doing nothing, as a fraction of the step, also where it is too "
        "small for a plan to be executed",
        key="moe/predicted_gain",
    )
    max_vio_before: float = measured(
        "max/mean - 1 of rank loads, mean over instances, without the plan", key="moe/max_vio_before"
    )
    max_vio_after: float = measured("the same under the plan", key="moe/max_vio_after")
    replicas: int = measured("replicas in all instances; expected ones if `is_sliced`", key="moe/replicas")
    micro_steps: int = measured("micro-steps of the step")
    unplanned_micro_steps: int = measured("micro-steps that run without a plan")
    mixed_instances: int = measured("instances with unknown routes, whose counts the ranks exchange")
    peak_rows_before: int = measured(
        "of the busiest rank in its busiest instance, without the plan", "rows", key="moe/peak_rows_before"
    )
    peak_rows_after: int = measured("the same under the plan", "rows", key="moe/peak_rows_after")

    @classmethod
    def of(
        cls,
        planned: PlannedStep,
        loads: tuple[Array, Array],
        read_memory: Callable[[], RankMemory],
        *,
        is_executed: bool,
        applying_s: float,
    ) -> PlanReport:
        """Figures of a plan that has just been applied.

        Args:
            loads: rows `[M, L, R]` of each rank without the plan, and under it without replicas that follow.
            applying_s: seconds of applying the plan.
        """
        before, after = loads
        plan, slices = planned.plan, planned.slices if is_executed else None
        max_vio, replicas = float(max_over_mean(after).mean() - 1), plan.num_replicas
        peak_rows = int(after.max(initial=0))
        if slices is not None:
            peak_rows = min(peak_rows, math.ceil((1 + slices.max_vio) * after.mean(axis=2).max(initial=0.0)))
            max_vio, replicas = slices.max_vio, round(slices.replicas * plan.mixed_ML.size)
        return cls(
            is_sliced=slices is not None,
            planning_s=planned.planning_s,
            waited_s=planned.planning_s + applying_s,
            ahead_s=planned.ahead_s,
            known_ahead=planned.known_ahead,
            strategy=planned.strategy,
            runner_up=planned.runner_up,
            predicted_s=planned.predicted_s,
            predicted_gain=planned.predicted_gain,
            max_vio_before=planned.max_vio_before,
            max_vio_after=max_vio,
            replicas=replicas,
            micro_steps=plan.num_micro_steps,
            unplanned_micro_steps=0 if is_executed else plan.num_micro_steps,
            mixed_instances=int(np.count_nonzero(plan.mixed_ML)),
            peak_rows_before=int(before.max(initial=0)),
            peak_rows_after=peak_rows,
            read_memory=read_memory,
        )

    @cached_property
    def memory(self) -> RankMemory:
        """Memory of this rank."""
        return self.read_memory()

    def metrics(self) -> dict[str, float]:
        """Its figures and those of `memory`, by their names in the metrics of a step."""
        return by_key(self) | self.memory.metrics()


@with_documented_figures
@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank for its experts, by owner; on its device, except for the mirror.

    After `Session.suspend` only the parameters are left.
    """

    parameter_bytes: int = measured(
        "of the parameters of this rank's experts, which belong to the framework", "bytes",
        key="memory/parameter_bytes",
    )  # fmt: skip
    staging_bytes: int = measured(
        "of copies of the experts, in the compute dtype: where it is another one, or FSDP shards an expert-parallel "
        "rank's experts; 0 if other ranks read these copies",
        "bytes", key="memory/staging_bytes",
    )  # fmt: skip
    peer_memory_bytes: int = measured(
        "of copies that the other ranks of the node read replicas from; 0 if they get messages, "
        "as on CPUs, where GPUs can't read each other's memory, and above the limit `peer_memory_bytes`", "bytes",
        key="memory/peer_bytes",
    )  # fmt: skip
    ring_bytes: int = measured("of slots for replicas, independent of the number of layers", "bytes",
        key="memory/ring_bytes",
    )  # fmt: skip
    return_bytes: int = measured("of arriving gradients of replicas", "bytes", key="memory/return_bytes")
    table_bytes: int = measured(
        "of programs, where rows of layers go: on a GPU those of micro-steps that are open or wait for their backward, "
        "on a CPU all that are kept", "bytes", key="memory/table_bytes",
    )  # fmt: skip
    communicator_bytes: int = measured(
        "of the NCCL communicators that Trimtab created; an estimate from the default size of NCCL's buffers", "bytes",
        key="memory/communicator_bytes",
    )  # fmt: skip
    mirror_bytes: int = measured("of host memory, of the mirror of this rank's node", "bytes",
        key="memory/mirror_bytes",
    )  # fmt: skip
    free_bytes: int = measured("free memory of the device", "bytes", key="memory/free_bytes")

    @computed("bytes", key="memory/pool_bytes")
    def pool_bytes(self) -> int:
        """of `ring_bytes` and `return_bytes`"""
        return self.ring_bytes + self.return_bytes

    @classmethod
    def of(cls, layers: Sequence[HomeExperts], transfers: Transfers | None, table_bytes: int) -> RankMemory:
        """The present memory. Not a collective.

        Args:
            transfers: None if there are none yet, or no more.
        """
        return cls(
            parameter_bytes=sum(p.nbytes for layer in layers if layer.refresh is None for p in layer.parameters),
            staging_bytes=sum(layer.staging_bytes for layer in layers),
            peer_memory_bytes=0 if transfers is None else transfers.peer_memory_bytes,
            ring_bytes=0 if transfers is None else transfers.ring.nbytes,
            return_bytes=0 if transfers is None else transfers.returns.nbytes,
            table_bytes=table_bytes,
            communicator_bytes=communicator_bytes(),
            mirror_bytes=0 if transfers is None else transfers.ring.mirror.nbytes,
            free_bytes=_free_bytes(layers[0].device) if layers else 0,
        )

    def metrics(self) -> dict[str, float]:
        """Its figures by their names in metrics."""
        return by_key(self)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
