"""`StepLoads`: the load of a step's expert-parallel groups, counted for some layers and micro-steps at a time.

Planning needs one layer at a time, so the counts of a whole step never have to be in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.plan.workload import Workload
from trimtab.planner.schedule.schedule import Schedule
from trimtab.planner.schedule.sequence_counts import SequenceCounts


@dataclass(frozen=True, eq=False)
class StepLoads:
    """The load of G groups with the same number of micro-steps.

    Attributes:
        schedules: of each group, on its own ranks.
        num_layers: MoE layers of the step.
        lengths_G: `[S]` tokens of each sequence of a group; None if the schedules were given without them.
        mixed_GML: `[M, L]` bool of each group, instances with unknown rows.
        count: from micro-steps and layers, `[N]` integers each, to the load of each group.
    """

    schedules: tuple[Schedule, ...]
    num_layers: int
    lengths_G: tuple[Array, ...] | None
    mixed_GML: tuple[Array, ...]
    count: Callable[[Array, Array], list[Workload]]

    @property
    def num_micro_steps(self) -> int:
        return self.schedules[0].num_micro_steps

    def lengths_of(self, group: int) -> Array | None:
        """Tokens of each sequence of a group, if known."""
        return None if self.lengths_G is None else self.lengths_G[group]

    @classmethod
    def of_workloads(
        cls, workloads: Sequence[Workload], schedules: Sequence[Schedule], lengths: Sequence[Array] | None = None
    ) -> StepLoads:
        """Loads that are counted already."""

        def count(micro_steps: Array, layers: Array) -> list[Workload]:
            return [workload.select(micro_steps, layers) for workload in workloads]

        mixed_GML = tuple(workload.mixed_ML for workload in workloads)
        lengths_G = None if lengths is None else tuple(lengths)
        return cls(tuple(schedules), workloads[0].num_layers, lengths_G, mixed_GML, count)

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
        return cls(tuple(part for _, part in parts), sequences.num_layers, lengths_G, tuple(mixed_GML), count)
