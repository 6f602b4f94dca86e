"""`StepPlan`: the plan of one step as plain arrays, equal on all ranks."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.errors import InputError
from trimtab.figures import plural
from trimtab.files import write_atomically
from trimtab.planner.placement.placement import Placement
from trimtab.planner.plan.row_counts import RowCounts, add_replicas, count_rows
from trimtab.planner.plan.workload import ExpertLoads, Workload
from trimtab.planner.replicas.paths import HOST, choose_paths, layers_of_replicas
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.planner.schedule.schedule import Schedule


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Schedule, placement, and for every instance the replicas and the quotas that leave home.

    Instance i is micro-step i // L, layer i % L. Replica p of instance i (`replica_starts[i] <= p <
    replica_starts[i + 1]`) is a copy of `replica_experts[p]` on `replica_ranks[p]`; a rank's replicas take its slots in
    plan order. Quota q of replica p (`quota_starts[p] <= q < quota_starts[p + 1]`) sends it `quota_tokens[q]` tokens of
    `quota_sources[q]`. Of the known tokens that one source has for one expert, taken in token order, the replicas get
    their quotas first, in plan order; the rest stays at home, as do tokens of unknown route. A plan therefore
    determines where every known token is computed.

    Attributes:
        micro_step, rank: `[S]` int32, the schedule.
        mini_batch_of_micro_step: `[M]` int32, the schedule.
        home: `[L, E]` int16, the placement.
        mixed_ML: `[M, L]` bool, instances with rows of unknown route, which replicas and quotas do not include.
        replica_starts: `[M * L + 1]` int64.
        replica_experts, replica_ranks: `[P]` int16.
        replica_paths: `[P]` uint8, source of the weights: `PEER`, the home rank, or `HOST`, the mirror of the
            replica's own node; see `planner/replicas/paths.py`.
        quota_starts: `[P + 1]` int64.
        quota_sources: `[Q]` int16.
        quota_tokens: `[Q]` int32, at least 1.
        num_ranks, ranks_per_node, slots_per_rank: the cluster's.
        settings: the planner's settings, and groups, token budget and costs where they are known, as one JSON object;
            "" if another balancer made the plan. Part of the hash.
    """

    micro_step: Array
    rank: Array
    mini_batch_of_micro_step: Array
    home: Array
    mixed_ML: Array
    replica_starts: Array
    replica_experts: Array
    replica_ranks: Array
    replica_paths: Array
    quota_starts: Array
    quota_sources: Array
    quota_tokens: Array
    num_ranks: int
    ranks_per_node: int
    slots_per_rank: int
    settings: str = ""

    def __repr__(self) -> str:
        micro_steps, layers = plural(self.num_micro_steps, "micro-step"), plural(self.num_layers, "layer")
        size = f"{micro_steps} of {layers} on {plural(self.num_ranks, 'rank')}"
        sequences, replicas = plural(len(self.micro_step), "sequence"), plural(self.num_replicas, "replica")
        return f"StepPlan({size}, {sequences}, {replicas})"

    @classmethod
    def from_instances(
        cls,
        schedule: Schedule,
        placement: Placement,
        replicas: Sequence[Array],
        quotas: Sequence[Array],
        *,
        mixed_ML: Array,
        cluster: ClusterSpec,
        settings: str = "",
    ) -> StepPlan:
        """Join per-instance replicas `[P, 2]` (expert, rank) and quotas `[P, R]`, both integer, into one plan."""
        table = ReplicaTable.from_instances(replicas, quotas, schedule.num_ranks)
        return cls.from_replicas(schedule, placement, table, mixed_ML=mixed_ML, cluster=cluster, settings=settings)

    @classmethod
    def from_replicas(
        cls,
        schedule: Schedule,
        placement: Placement,
        replicas: ReplicaTable,
        *,
        mixed_ML: Array,
        cluster: ClusterSpec,
        settings: str = "",
    ) -> StepPlan:
        """Add schedule, homes and paths to the replicas of all instances."""
        return cls(
            micro_step=schedule.micro_step,
            rank=schedule.rank,
            mini_batch_of_micro_step=schedule.mini_batch_of_micro_step,
            home=placement.home,
            mixed_ML=mixed_ML,
            replica_starts=replicas.replica_starts,
            replica_experts=replicas.experts,
            replica_ranks=replicas.ranks,
            replica_paths=choose_paths(placement.home, replicas, cluster),
            quota_starts=replicas.quota_starts,
            quota_sources=replicas.sources,
            quota_tokens=replicas.tokens,
            num_ranks=schedule.num_ranks,
            ranks_per_node=cluster.ranks_per_node,
            slots_per_rank=cluster.slots_per_rank,
            settings=settings,
        )

    def without_replicas(self) -> StepPlan:
        """Returns the same schedule and homes without replicas."""
        return self.with_replicas(ReplicaTable.none(self.mixed_ML.size), np.zeros(0, np.uint8))

    def with_replicas(self, replicas: ReplicaTable, paths_P: Array) -> StepPlan:
        """Returns the same schedule and homes with these replicas, `[P]` uint8 `paths_P` of them."""
        return replace(
            self,
            replica_starts=replicas.replica_starts,
            replica_experts=replicas.experts,
            replica_ranks=replicas.ranks,
            replica_paths=paths_P,
            quota_starts=replicas.quota_starts,
            quota_sources=replicas.sources,
            quota_tokens=replicas.tokens,
        )

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.micro_step, self.rank, self.mini_batch_of_micro_step, self.num_ranks)

    @property
    def placement(self) -> Placement:
        return Placement(self.home)

    @property
    def num_micro_steps(self) -> int:
        return len(self.mixed_ML)

    @property
    def num_layers(self) -> int:
        return int(self.home.shape[0])

    @property
    def num_replicas(self) -> int:
        return len(self.replica_experts)

    @cached_property
    def hash(self) -> str:
        """A digest of all fields. Ranks compare it before they execute a plan."""
        digest = hashlib.blake2b(digest_size=16)
        for name in self.__dataclass_fields__:
            array = np.asarray(getattr(self, name))
            digest.update(f"{name} {array.dtype.str[1:]} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
        return digest.hexdigest()

    def replicas_of(self, micro_step: int, layer: int) -> range:
        """Indices of the replicas of one instance."""
        instance = micro_step * self.num_layers + layer
        return range(int(self.replica_starts[instance]), int(self.replica_starts[instance + 1]))

    @property
    def replicas(self) -> ReplicaTable:
        """Replicas and quotas of all instances, without paths."""
        return ReplicaTable(
            self.replica_starts, self.replica_experts, self.replica_ranks,
            self.quota_starts, self.quota_sources, self.quota_tokens,
        )  # fmt: skip

    @property
    def far_replicas(self) -> Array:
        """`[P]` bool, replicas on another node than their home."""
        return self.replicas.far_P(self.home, self.ranks_per_node)

    def mirror_entries(self, node: int) -> Array:
        """Entries of a node's mirror for this plan: `[N, 2]` int64, layer and expert, ascending and unique."""
        mine = (self.replica_paths == HOST) & (self.replica_ranks // self.ranks_per_node == node)
        layers = layers_of_replicas(self.replica_starts, self.num_layers)
        return np.unique(np.stack([layers[mine], self.replica_experts[mine]], axis=1), axis=0)

    def rank_loads(self, workload: Workload | ExpertLoads) -> Array:
        """Rows `[M, L, R]` int64 that each rank computes under this plan; estimated where routes are unknown."""
        loads_MLR = workload.home_loads(self.home)
        return add_replicas(loads_MLR, self.home, self.replicas) if self.num_replicas else loads_MLR

    def rows(self, workload: Workload) -> RowCounts:
        """Rows by rank and between nodes. Unknown rows are included as `Workload.estimated_MLRE`, at the homes."""
        return count_rows(workload.estimated_MLRE, 0, self.home, self.replicas, self.ranks_per_node)

    def check(self, workload: Workload) -> None:
        """Check the plan against its workload.

        Raises:
            InputError: naming the first broken invariant: shapes, homes that exist, replicas away from home, no
                expert twice on a rank, no more copies on a rank than its share of homes and its slots, tokens
                conserved, quotas of known rows only.
        """
        self.check_form(workload.num_micro_steps, workload.num_layers, workload.num_ranks, workload.num_experts)
        self.check_mixed(workload.mixed_ML)
        self.check_quotas(workload.token_counts_MLRE)

    def check_mixed(self, mixed_ML: Array) -> None:
        """`check`, of instances with unknown rows alone."""
        _require(np.array_equal(self.mixed_ML, mixed_ML), "it has other instances with unknown routes")

    def check_form(self, *shape: int) -> None:
        """`check`, of all that does not depend on counts.

        Args:
            shape: micro-steps, layers, ranks and experts.
        """
        mine = (self.num_micro_steps, self.num_layers, self.num_ranks, self.home.shape[1])
        _require(mine == shape, f"it is for [micro-steps, layers, ranks, experts] {mine}, the workload has {shape}")
        places = self.num_micro_steps, self.num_ranks
        for place_S, most in zip((self.micro_step, self.rank), places, strict=True):
            fits = bool(np.all((place_S >= 0) & (place_S < most)))
            _require(fits, "a sequence has no place among its micro-steps and ranks")
        batches = self.mini_batch_of_micro_step
        _require(len(self.micro_step) == len(self.rank), "its schedule's arrays differ in length")
        _require(self.ranks_per_node > 0 and self.num_ranks % self.ranks_per_node == 0, "its nodes are not whole")
        _require(len(batches) == self.num_micro_steps, "its micro-steps and their mini-batches differ in number")
        _require(bool(np.all(np.diff(batches, prepend=0) >= 0)), "its mini-batches don't rise from 0")
        _require(bool(np.all((self.home >= 0) & (self.home < self.num_ranks))), "an expert's home doesn't exist")
        for starts, end, of in (
            (self.replica_starts, self.num_replicas, self.num_micro_steps * self.num_layers),
            (self.quota_starts, len(self.quota_tokens), self.num_replicas),
        ):
            fits = len(starts) == of + 1 and starts[0] == 0 and starts[-1] == end
            _require(fits and bool(np.all(np.diff(starts) >= 0)), "its row starts don't rise from 0 to the end")
        lengths = {len(self.replica_experts), len(self.replica_ranks), len(self.replica_paths)}
        _require(len(lengths) == 1, "its replica arrays differ in length")
        _require(bool(np.all(self.replica_paths <= HOST)), "a replica's path is neither peer nor host")
        _require(len(self.quota_sources) == len(self.quota_tokens), "its quota arrays differ in length")
        self._check_replicas(shape[3])
        sources = self.quota_sources.astype(np.int64)
        _require(bool(np.all(self.quota_tokens >= 1)), "a quota is below one token")
        _require(bool(np.all((sources >= 0) & (sources < self.num_ranks))), "a quota's source rank doesn't exist")
        pairs = self._replicas_Q * self.num_ranks + sources
        _require(len(np.unique(pairs)) == len(pairs), "a replica has two quotas from one source")

    def _check_replicas(self, num_experts: int) -> None:
        experts, ranks = self.replica_experts.astype(np.int64), self.replica_ranks.astype(np.int64)
        _require(bool(np.all((experts >= 0) & (experts < num_experts))), "a replica's expert doesn't exist")
        _require(bool(np.all((ranks >= 0) & (ranks < self.num_ranks))), "a replica's rank doesn't exist")
        instance = self.replicas.instances_P
        _require(
            bool(np.all(self.home[instance % self.num_layers, experts] != ranks)), "a replica sits on its own home"
        )
        copies = (instance * self.num_ranks + ranks) * num_experts + experts
        _require(len(np.unique(copies)) == len(copies), "an expert has two replicas on one rank")
        layers = np.arange(self.num_layers)[:, None]
        copies_LR = np.zeros((self.num_layers, self.num_ranks), np.int64)
        np.add.at(copies_LR, (np.broadcast_to(layers, self.home.shape), self.home), 1)
        copies_IR = np.tile(copies_LR, (self.num_micro_steps, 1))
        np.add.at(copies_IR, (instance, ranks), 1)
        room = -(-num_experts // self.num_ranks) + self.slots_per_rank
        _require(copies_IR.max(initial=0) <= room, "a rank holds more copies than its share of homes and its slots")

    def check_quotas(self, counts_MLRE: Array, first_rank: int = 0) -> None:
        """`check`, of the quotas of some source ranks alone; `check_form` comes first.

        Args:
            counts_MLRE: `[M, L, n, E]` integer, known rows of ranks `first_rank` to `first_rank + n - 1`.
        """
        counts_IRE = counts_MLRE.reshape(-1, *counts_MLRE.shape[2:])
        sources = self.quota_sources.astype(np.int64) - first_rank
        mine = np.flatnonzero((sources >= 0) & (sources < counts_IRE.shape[1]))
        replica = self._replicas_Q[mine]
        places = self.replicas.instances_P[replica], sources[mine], self.replica_experts[replica].astype(np.int64)
        cells, cell_Q = np.unique(np.ravel_multi_index(places, counts_IRE.shape), return_inverse=True)
        sent = np.bincount(cell_Q, self.quota_tokens[mine], len(cells))
        fits = bool(np.all(sent <= counts_IRE.reshape(-1)[cells]))
        _require(fits, "a source sends replicas more tokens than it has for the expert")

    @property
    def _replicas_Q(self) -> Array:
        """The replica `[Q]` int64 of every quota."""
        return np.repeat(np.arange(self.num_replicas), np.diff(self.quota_starts))

    def to_bytes(self) -> bytes:
        """All fields in a fixed order as an uncompressed `.npz`, the same on every machine."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for field in fields(self):
                array = np.asarray(getattr(self, field.name))
                member = io.BytesIO()
                np.save(member, np.asarray(array, array.dtype.newbyteorder("<"), order="C"))
                archive.writestr(zipfile.ZipInfo(f"{field.name}.npy"), member.getvalue())
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "plan") -> StepPlan:
        """Read `to_bytes` back. Raises InputError, naming `source`, if the data is not a plan."""
        # Sessions make plans and read none.
        from trimtab.trace.containers.tensors import array_of_npy

        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = [archive.getinfo(f"{field.name}.npy") for field in fields(cls)]
                # Nothing is compressed, so that a small file can't hold large arrays.
                if sum(member.file_size for member in members) > len(data):
                    raise InputError("members overlap or are compressed")
                values: dict[str, Any] = {
                    field.name: array_of_npy(archive.read(member), field.name)
                    for field, member in zip(fields(cls), members, strict=True)
                }
            for name, (dtype, ndim) in _LAYOUT.items():
                if (values[name].dtype, values[name].ndim) != (np.dtype(dtype), ndim):
                    raise InputError(f"{name} has another dtype or shape")
            values |= {name: int(values[name]) for name in ("num_ranks", "ranks_per_node", "slots_per_rank")}
            values["settings"] = str(values["settings"])
        except (KeyError, OSError, OverflowError, TypeError, ValueError, EOFError, RuntimeError, *_ZIP_ERRORS):
            raise InputError(f"{source}: not a step plan written by Trimtab") from None
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, atomically."""
        write_atomically(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepPlan:
        """Read a plan written by `save`. Raises InputError if the file is missing or not a plan."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"{path}: no such file; expected a step plan (.npz)")
        return cls.from_bytes(path.read_bytes(), str(path))


_ZIP_ERRORS = struct.error, zipfile.BadZipFile, zlib.error
# Dtype and dimensions of what a file holds; `settings` is a text of any length.
_LAYOUT = {
    "micro_step": ("<i4", 1), "rank": ("<i4", 1), "mini_batch_of_micro_step": ("<i4", 1), "home": ("<i2", 2),
    "mixed_ML": ("?", 2), "replica_starts": ("<i8", 1), "replica_experts": ("<i2", 1), "replica_ranks": ("<i2", 1),
    "replica_paths": ("|u1", 1), "quota_starts": ("<i8", 1), "quota_sources": ("<i2", 1), "quota_tokens": ("<i4", 1),
    "num_ranks": ("<i8", 0), "ranks_per_node": ("<i8", 0), "slots_per_rank": ("<i8", 0),
}  # fmt: skip


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise InputError(f"invalid plan: {problem}")
