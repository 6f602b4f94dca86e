"""Slices: replicas and split of some micro-steps and layers of a step whose header is known.

The header of a step is its plan without replicas: schedule, homes, and the rules by which replicas and split follow.
Slices don't depend on each other, so that ranks can share the work, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.plan.workload import Workload
from trimtab.planner.replicas.kernel_values import Limits
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.planner.replicas.replica_table import ReplicaTable


class SliceRules(NamedTuple):
    """By which rules replicas and split follow a header, and what is expected of them.

    Attributes:
        limits: of the chosen strategy.
        max_vio: expected max/mean - 1 of rank loads, mean over instances.
        replicas: expected replicas of an instance, mean.
        most_returns: expected replicas of one home in an instance, most.
        saved_s: predicted seconds that replicas and homes save in the whole step.
    """

    limits: Limits
    max_vio: float
    replicas: float
    most_returns: int
    saved_s: float


@dataclass(frozen=True, eq=False)
class SlicePlanner:
    """Plans slices of one expert-parallel group. Every rank with the same arguments makes the same slices.

    Attributes:
        workload: of the group.
        home_LE: `[L, E]` int16 homes.
        limits: see `SliceRules`.
    """

    workload: Workload
    home_LE: Array
    limits: Limits

    def plan(self, micro_steps: range, layers: range) -> list[ReplicaTable]:
        """For each of the layers a table of the micro-steps' instances."""
        chosen = slice(micro_steps.start, micro_steps.stop)
        counts_MLRE, fixed_MLR = self.workload.token_counts_MLRE[chosen], self._fixed_MLR[chosen]
        return [
            plan_layer(counts_MLRE, fixed_MLR[:, layer], layer, self.home_LE[layer], self.limits) for layer in layers
        ]

    @cached_property
    def _fixed_MLR(self) -> Array:
        return self.workload.expected_loads(self.home_LE)


def rounds_of(num_micro_steps: int) -> list[range]:
    """The micro-steps of each round of slices: the first alone, so that it is soon there, then twice as many each."""
    ends = [0]
    while ends[-1] < num_micro_steps:
        ends.append(min(num_micro_steps, max(1, 2 * ends[-1])))
    return [range(start, end) for start, end in pairwise(ends)]


def layers_of_rank(num_layers: int, rank: int, num_ranks: int) -> range:
    """The layers of slices that a rank plans."""
    return range(rank * num_layers // num_ranks, (rank + 1) * num_layers // num_ranks)


def to_bytes(tables: Sequence[ReplicaTable]) -> bytes:
    """Tables as bytes, the same on every machine."""
    sizes = np.array([[len(table.replica_starts), len(table.experts), len(table.tokens)] for table in tables], "<i8")
    parts = [np.array([len(tables)], "<i8").tobytes(), sizes.tobytes()]
    for table in tables:
        parts += [np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes() for array in table]
    return b"".join(parts)


def from_bytes(data: bytes | memoryview) -> list[ReplicaTable]:
    """Read `to_bytes` back."""
    (count,) = np.frombuffer(data, "<i8", 1).tolist()
    sizes = np.frombuffer(data, "<i8", 3 * count, 8).reshape(count, 3).tolist()
    place = 8 + 24 * count
    tables = []
    for instances, replicas, quotas in sizes:
        lengths = (instances, replicas, replicas, replicas + 1, quotas, quotas)
        arrays = []
        for length, dtype in zip(lengths, ("<i8", "<i2", "<i2", "<i8", "<i2", "<i4"), strict=True):
            # Copies, whose memory is aligned and not read-only, as the kernels are compiled for.
            arrays.append(np.frombuffer(data, dtype, length, place).copy())
            place += arrays[-1].nbytes
        tables.append(ReplicaTable(*arrays))
    return tables
