"""Slices: replicas and split of some micro-steps and layers of a step whose header is known.

The header of a step is its plan without replicas: schedule, homes, and the rules by which replicas and split follow.
Slices don't depend on each other, so that ranks can share the work, in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.plan.row_counts import add_replicas
from trimtab.planner.plan.workload import Workload
from trimtab.planner.replicas.kernel_values import Limits
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.planner.replicas.paths import Links, choose_given_mirrors
from trimtab.planner.replicas.replica_table import ReplicaTable


class SliceRules(NamedTuple):
    """By which rules replicas and split follow a header, and what is expected of them.

    Attributes:
        limits: of the chosen strategy.
        links: by which weights may travel.
        mirrors: of each group, `[N, 3]` integers, node, layer and expert of what mirrors hold.
        max_vio: expected max/mean - 1 of rank loads, mean over instances.
        replicas: expected replicas of an instance, mean.
        most_returns: expected replicas of one home in an instance, most.
        saved_s: predicted seconds that replicas and homes save in the whole step.
    """

    limits: Limits
    links: Links
    mirrors: tuple[Array, ...]
    max_vio: float
    replicas: float
    most_returns: int
    saved_s: float

    @property
    def digest(self) -> str:
        """Of what slices depend on."""
        whole = hashlib.blake2b(repr((self.limits, self.links)).encode(), digest_size=8)
        for entries in self.mirrors:
            whole.update(np.ascontiguousarray(entries, "<i8").tobytes())
        return whole.hexdigest()

    def mirrored(self, group: int, shape: tuple[int, int, int]) -> Array:
        """`[N, L, E]` bool, experts of a group that the mirrors of nodes hold."""
        mirrored_NLE = np.zeros(shape, np.bool_)
        mirrored_NLE[tuple(self.mirrors[group].T)] = True
        return mirrored_NLE


@dataclass(frozen=True, eq=False)
class SlicePlanner:
    """Plans slices of one expert-parallel group. Every rank with the same arguments makes the same slices.

    Attributes:
        workload: of the group, in the layers from `first_layer` on that are planned here.
        home_LE: `[L, E]` int16 homes.
        limits, links: see `SliceRules`.
        mirrored_NLE: `[N, L, E]` bool, experts that the mirrors of nodes hold.
        first_layer: of the workload.
    """

    workload: Workload
    home_LE: Array
    limits: Limits
    links: Links
    mirrored_NLE: Array
    first_layer: int = 0

    @classmethod
    def of(
        cls, rules: SliceRules, group: int, workload: Workload, home_LE: Array, first_layer: int = 0
    ) -> SlicePlanner:
        """The planner of a group."""
        nodes = rules.links.num_ranks // rules.links.ranks_per_node
        mirrored_NLE = rules.mirrored(group, (nodes, *home_LE.shape))
        return cls(workload, home_LE, rules.limits, rules.links, mirrored_NLE, first_layer)

    def paths(self, replicas: ReplicaTable) -> Array:
        """`[P]` uint8, the paths of replicas of all layers of some micro-steps."""
        return choose_given_mirrors(self.home_LE, replicas, self.links, self.mirrored_NLE)

    def plan(self, micro_steps: range, layers: range) -> list[ReplicaTable]:
        """For each of the layers a table of the micro-steps' instances."""
        chosen = slice(micro_steps.start, micro_steps.stop)
        counts_MLRE, fixed_MLR = self.workload.token_counts_MLRE[chosen], self._fixed_MLR[chosen]
        places = [layer - self.first_layer for layer in layers]
        return [
            plan_layer(counts_MLRE, fixed_MLR[:, place], place, self.home_LE[layer], self.limits)
            for layer, place in zip(layers, places, strict=True)
        ]

    def loads(self, micro_steps: range, tables: Sequence[ReplicaTable]) -> Array:
        """Rows `[M, L, R]` int64 of every rank, with these replicas of all layers of the workload."""
        loads_MLR = self._home_loads_MLR[micro_steps.start : micro_steps.stop]
        return add_replicas(loads_MLR, self._home_LE, ReplicaTable.join_layers(tables))

    @property
    def _home_LE(self) -> Array:
        return self.home_LE[self.first_layer : self.first_layer + self.workload.num_layers]

    @cached_property
    def _home_loads_MLR(self) -> Array:
        return self.workload.home_loads(self._home_LE)

    @cached_property
    def _fixed_MLR(self) -> Array:
        return self.workload.expected_loads(self._home_LE)


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
