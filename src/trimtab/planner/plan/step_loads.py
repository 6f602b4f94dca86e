"""`StepLoads`: the load of a step's expert-parallel groups, counted for some layers and micro-steps at a time.

Planning needs one layer at a time, so the counts of a whole step never have to be in memory together. One process plans
all groups, or one process plans each group and they exchange what all groups decide together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.plan.workload import Workload
from trimtab.planner.schedule.schedule import Schedule
from trimtab.planner.schedule.sequence_counts import SequenceCounts

T = TypeVar("T")


class Gather(Protocol):
    """From a value of each group that is planned here, those of all groups in order."""

    def __call__(self, values: Sequence[T], /) -> list[T]: ...


@dataclass(frozen=True, eq=False)
class StepLoads:
    """The load of the groups that are planned here, with the same number of micro-steps.

    Attributes:
        schedules: of each group, on its own ranks.
        num_layers: MoE layers of the step.
        num_groups: of the whole step.
        lengths_G: `[S]` tokens of each sequence of a group; None if the schedules were given without them.
        mixed_GML: `[M, L]` bool of each group, instances with unknown rows.
        count: from micro-steps and layers, `[N]` integers each, to the load of each group.
        sum_experts: from the same to the known rows `[M, L, E]` of each group, all source ranks together.
        gather: a collective over the processes that plan, in the same order on all of them.
    """

    schedules: tuple[Schedule, ...]
    num_layers: int
    num_groups: int
    lengths_G: tuple[Array, ...] | None
    mixed_GML: tuple[Array, ...]
    count: Callable[[Array, Array], list[Workload]]
    sum_experts: Callable[[Array, Array], list[Array]]
    gather: Gather = list

    @property
    def num_micro_steps(self) -> int:
        return self.schedules[0].num_micro_steps

    def lengths_of(self, group: int) -> Array | None:
        """Tokens of each sequence of a group, if known."""
        return None if self.lengths_G is None else self.lengths_G[group]

    def expert_counts(self, micro_steps: Array, layers: Array) -> list[Array]:
        """Of each layer tokens `[M, E]` int64 by micro-step and expert, those of all groups one after another."""
        counts_MLE = np.concatenate(self.gather(self.sum_experts(micro_steps, layers)), dtype=np.int64)
        return [np.ascontiguousarray(counts_MLE[:, i]) for i in range(len(layers))]

    @classmethod
    def of_workloads(cls, workloads: Sequence[Workload], schedule: Schedule, lengths: Array | None = None) -> StepLoads:
        """Loads that are counted already.

        Args:
            workloads: of each group.
            schedule: on the data ranks of all groups.
            lengths: `[S]` tokens of each sequence of the schedule.
        """
        parts = [schedule.of_group(group, workload.num_ranks) for group, workload in enumerate(workloads)]

        def count(micro_steps: Array, layers: Array) -> list[Workload]:
            return [workload.select(micro_steps, layers) for workload in workloads]

        def sum_experts(micro_steps: Array, layers: Array) -> list[Array]:
            chosen = np.ix_(micro_steps, layers)
            return [workload.by_expert.counts_MLE[chosen] for workload in workloads]

        return cls(
            tuple(part for _, part in parts),
            workloads[0].num_layers,
            len(workloads),
            None if lengths is None else tuple(lengths[mine] for mine, _ in parts),
            tuple(workload.mixed_ML for workload in workloads),
            count,
            sum_experts,
        )

    @classmethod
    def of_sequences(cls, sequences: SequenceCounts, schedule: Schedule, ranks: int) -> StepLoads:
        """Loads of counted sequences.

        Args:
            schedule: on the data ranks of all groups.
            ranks: of a group.
        """
        groups = schedule.num_ranks // ranks
        parts = [schedule.of_group(group, ranks) for group in range(groups)]
        chosen_G = [sequences if groups == 1 else sequences.select(mine) for mine, _ in parts]

        def count(micro_steps: Array, layers: Array) -> list[Workload]:
            place_M = np.full(schedule.num_micro_steps, -1, np.int32)
            place_M[micro_steps] = np.arange(len(micro_steps))
            batches = schedule.mini_batch_of_micro_step[micro_steps]
            return [
                Workload.of_layers(
                    mine, replace(part, micro_step=place_M[part.micro_step], mini_batch_of_micro_step=batches), layers
                )
                for mine, (_, part) in zip(chosen_G, parts, strict=True)
            ]

        lengths_G = tuple(mine.lengths for mine in chosen_G)
        mixed_GML = []
        for mine, (_, part) in zip(chosen_G, parts, strict=True):
            mixed_ML = np.zeros((schedule.num_micro_steps, sequences.num_layers), bool)
            np.logical_or.at(mixed_ML, part.micro_step, mine.unknown_SL > 0)
            mixed_GML.append(mixed_ML)

        def sum_experts(micro_steps: Array, layers: Array) -> list[Array]:
            return [load.by_expert.counts_MLE for load in count(micro_steps, layers)]

        schedules = tuple(part for _, part in parts)
        return cls(schedules, sequences.num_layers, groups, lengths_G, tuple(mixed_GML), count, sum_experts)
