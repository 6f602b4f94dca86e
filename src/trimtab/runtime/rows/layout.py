"""Where every row of one instance goes: arithmetic on counts, without communication.

A row is one (token, expert) pair. Every rank has H = E / R home experts and S slots for replicas. Together they are the
R x (H + S) *physical experts*: rank r's are r * (H + S) to (r + 1) * (H + S) - 1, its home experts in ascending order
first. A plan gives each row a physical expert. Dispatchers get the ids with ranks counted as in the framework's group.

A rank sends rows ordered by physical expert, there by token. They arrive ordered by source, then by physical expert,
and are regrouped so that each copy's rows are together. Both sides follow from the counts and the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.runtime.rows.expert_compute import RowGroups
from trimtab.runtime.state.flat_memory import upload
from trimtab.runtime.state.home_experts import HomeExperts

# In place of a physical expert, where the router has not chosen yet.
UNKNOWN = 0xFFFF
# Micro-steps whose replicas are kept as one value each.
KEPT_MICRO_STEPS = 4


@dataclass(frozen=True, eq=False)
class InstanceReplicas:
    """The replicas of one instance on all ranks, as the plan lists them.

    Attributes:
        experts, ranks: `[P]` int64.
        slots: `[P]` int64, the slot that each takes on its rank.
        paths: `[P]` uint8, where the weights come from: `PEER` or `HOST`.
        quotas_PR: `[P, R]` int64, tokens from each source rank.
    """

    experts: Array
    ranks: Array
    slots: Array
    paths: Array
    quotas_PR: Array

    @property
    def count(self) -> int:
        return len(self.experts)

    @classmethod
    def none(cls, num_ranks: int) -> InstanceReplicas:
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing, nothing, np.empty((0, num_ranks), np.int64))

    @classmethod
    def of(cls, plan: StepPlan, micro_step: int, layer: int) -> InstanceReplicas:
        indices = plan.replicas_of(micro_step, layer)
        chosen = slice(indices.start, indices.stop)
        ranks = plan.replica_ranks[chosen].astype(np.int64)
        slots = np.array([np.count_nonzero(ranks[:p] == rank) for p, rank in enumerate(ranks)], np.int64)
        quotas_PR = np.zeros((len(ranks), plan.num_ranks), np.int64)
        for p, replica in enumerate(indices):
            quotas = slice(int(plan.quota_starts[replica]), int(plan.quota_starts[replica + 1]))
            quotas_PR[p, plan.quota_sources[quotas]] = plan.quota_tokens[quotas]
        return cls(plan.replica_experts[chosen].astype(np.int64), ranks, slots, plan.replica_paths[chosen], quotas_PR)


class PlanReplicas:
    """The replicas of all instances of a plan."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._counts_ML = np.diff(plan.replica_starts).reshape(-1, plan.num_layers).tolist()
        self.of = lru_cache(KEPT_MICRO_STEPS * plan.num_layers)(self._of)

    def count(self, micro_step: int, layer: int) -> int:
        """On all ranks; 0 for a micro-step that the plan does not have."""
        return int(self._counts_ML[micro_step][layer]) if 0 <= micro_step < len(self._counts_ML) else 0

    def _of(self, micro_step: int, layer: int) -> InstanceReplicas:
        return InstanceReplicas.of(self._plan, micro_step, layer)


@dataclass(frozen=True, eq=False)
class PhysicalExperts:
    """The numbers of one layer's physical experts.

    Attributes:
        rank, num_ranks: this rank, and R.
        num_homes, num_slots: of a rank, H and S.
        home_ids_E: `[E]` int64, each expert at its home.
        outer_ids_P: `[R * (H + S)]` uint16, their numbers in the order of the framework's group; None if that is ours.
    """

    rank: int
    num_ranks: int
    num_homes: int
    num_slots: int
    home_ids_E: Array
    outer_ids_P: Array | None = None

    @classmethod
    def of(cls, homes: HomeExperts, rank: int, positions: Sequence[int], num_slots: int) -> PhysicalExperts:
        """Those of a layer under its present homes.

        Args:
            positions: of every rank, its place in the framework's group.

        Raises:
            InputError: if there are more than 16 bits can number.
        """
        num_ranks = len(positions)
        num_homes = len(homes.home_E) // num_ranks
        num_local, outer_ids_P = num_homes + num_slots, None
        if num_ranks * num_local >= UNKNOWN:
            raise InputError(
                f"{num_ranks} ranks with {num_homes} experts and {num_slots} slots each are more than {UNKNOWN - 1} "
                "physical experts; use fewer slots_per_rank"
            )
        if list(positions) != list(range(num_ranks)):
            outer_ids_RG = np.array(positions)[:, None] * num_local + np.arange(num_local)
            outer_ids_P = outer_ids_RG.reshape(-1).astype(np.uint16)
        home_ids_E = homes.home_E * np.int64(num_local) + homes.rows_E
        return cls(rank, num_ranks, num_homes, num_slots, home_ids_E, outer_ids_P)

    @property
    def num_local(self) -> int:
        """Of one rank, H + S."""
        return self.num_homes + self.num_slots

    @property
    def count(self) -> int:
        return self.num_ranks * self.num_local

    @property
    def is_here_E(self) -> Array:
        """`[E]` bool, experts that this rank is home to."""
        return self.home_ids_E // self.num_local == self.rank

    def replica_ids(self, replicas: InstanceReplicas) -> Array:
        """`[P]` int64."""
        return replicas.ranks * self.num_local + self.num_homes + replicas.slots


@dataclass(frozen=True, eq=False)
class PlannedRows:
    """Physical experts and counts of one rank's rows of an instance, for rows with known experts.

    Attributes:
        physical_NK: `[n, K]` uint16, the physical expert of each of the rank's rows, or `UNKNOWN`.
        sent_P: `[R * (H + S)]` int64, how many known rows it sends to each physical expert.
        arriving_RG: `[R, H + S]` int64, how many come from each rank to each of its own.
        replicas: of the instance, on all ranks.
        experts: the physical experts.
    """

    physical_NK: Array
    sent_P: Array
    arriving_RG: Array
    replicas: InstanceReplicas
    experts: PhysicalExperts

    @classmethod
    def of(cls, ids_NK: Array, counts_RE: Array, experts: PhysicalExperts, replicas: InstanceReplicas) -> PlannedRows:
        """Of the rows that a source has for an expert, in token order, replicas get theirs first, in plan order.

        Args:
            ids_NK: `[n, K]` integer expert ids of this rank's tokens; E and more are unknown.
            counts_RE: `[R, E]` integer known rows by source rank and expert, of all ranks.

        Raises:
            ValueError: if this rank's ids are not what the counts say.
        """
        rank, home_ids_E, quotas_PR = experts.rank, experts.home_ids_E, replicas.quotas_PR
        replica_ids = experts.replica_ids(replicas)
        sent_P = np.zeros(experts.count, np.int64)
        sent_P[home_ids_E] = counts_RE[rank]
        np.subtract.at(sent_P, home_ids_E[replicas.experts], quotas_PR[:, rank])
        sent_P[replica_ids] = quotas_PR[:, rank]

        is_here_E = experts.is_here_E
        arriving_RG = np.zeros((experts.num_ranks, experts.num_local), np.int64)
        arriving_RG[:, home_ids_E[is_here_E] % experts.num_local] = counts_RE[:, is_here_E]
        left = is_here_E[replicas.experts]
        np.subtract.at(arriving_RG.T, home_ids_E[replicas.experts[left]] % experts.num_local, quotas_PR[left])
        came = replicas.ranks == rank
        arriving_RG[:, experts.num_homes + replicas.slots[came]] = quotas_PR[came].T

        physical_NK = np.empty(ids_NK.shape, np.uint16)
        found_P = np.zeros(experts.count, np.int64)
        quotas_P = quotas_PR[:, rank].copy()
        _choose_copies(ids_NK, home_ids_E, replicas.experts, quotas_P, replica_ids, physical_NK, found_P)
        if not np.array_equal(found_P, sent_P):
            raise ValueError(f"rank {rank}: the tokens of this micro-step are not those that were planned")
        return cls(physical_NK, sent_P, arriving_RG, replicas, experts)

    @classmethod
    def unknown(cls, shape: tuple[int, ...], experts: PhysicalExperts) -> PlannedRows:
        """Of `[n, K]` rows of which nothing is known."""
        nothing_RG = np.zeros((experts.num_ranks, experts.num_local), np.int64)
        replicas = InstanceReplicas.none(experts.num_ranks)
        return cls(np.full(shape, UNKNOWN, np.uint16), nothing_RG.reshape(-1), nothing_RG, replicas, experts)

    @property
    def unknown_tokens(self) -> Array:
        """`[U]` int64, this rank's tokens whose route is unknown."""
        return np.flatnonzero((self.physical_NK == UNKNOWN).any(axis=1))

    def complete(self, ids_UK: Array, counts_RE: Array) -> PlannedRows:
        """The same with the rows that were unknown, which go to their experts' homes.

        Args:
            ids_UK: `[U, K]` integer experts of `unknown_tokens`.
            counts_RE: `[R, E]` how many such rows each source rank has for each expert.
        """
        experts, is_here_E = self.experts, self.experts.is_here_E
        physical_NK, sent_P, arriving_RG = self.physical_NK.copy(), self.sent_P.copy(), self.arriving_RG.copy()
        physical_NK[self.unknown_tokens] = experts.home_ids_E[ids_UK]
        sent_P[experts.home_ids_E] += counts_RE[experts.rank]
        arriving_RG[:, experts.home_ids_E[is_here_E] % experts.num_local] += counts_RE[:, is_here_E]
        return replace(self, physical_NK=physical_NK, sent_P=sent_P, arriving_RG=arriving_RG)


@dataclass(frozen=True, eq=False)
class Layout:
    """One rank's rows of one instance: N sent, A arriving.

    Attributes:
        physical_ids: `[n, K]` uint16, the physical expert of each (token, k).
        row_tokens: `[N]` int64, the local token (0 .. n-1) of each place in the send buffer.
        row_places: `[n, K]` int64, the place in the send buffer of each (token, k).
        send_splits, recv_splits: rows to and from each rank.
        home_rows, replica_rows: int64 indices into the arrived rows, grouped by home expert and by replica slot.
        home_groups, replica_groups: how many rows each home expert and each replica slot in use has.
        replicas: the instance's replicas on all ranks. If there is none at all, no rank runs its replica half.
    """

    physical_ids: torch.Tensor
    row_tokens: torch.Tensor
    row_places: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]
    home_rows: torch.Tensor
    replica_rows: torch.Tensor
    home_groups: RowGroups
    replica_groups: RowGroups
    replicas: InstanceReplicas


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """A `Layout` on the host, with rows of home and replica groups as counts alone."""

    physical_ids: Array
    row_tokens: Array
    row_places: Array
    send_splits: list[int]
    recv_splits: list[int]
    home_rows: Array
    replica_rows: Array
    home_counts: list[int]
    replica_counts: list[int]
    replicas: InstanceReplicas


def upload_layouts(placed: Sequence[RowPlaces], device: torch.device) -> list[Layout]:
    """Bring the layouts of any number of instances to the device, in two copies that the host does not wait for."""
    rows_of, ends_of = [], []
    for rows in placed:
        rows_of += [rows.physical_ids, rows.row_tokens, rows.row_places, rows.home_rows, rows.replica_rows]
        ends_of += [np.cumsum(counts, dtype=np.int32) for counts in (rows.home_counts, rows.replica_counts)]
    # Apart, since those who keep the ends of groups should not keep the memory of all rows.
    tensors, ends = iter(upload(rows_of, device)), iter(upload(ends_of, device))
    layouts = []
    for rows in placed:
        physical_ids, row_tokens, row_places, home_rows, replica_rows = itertools.islice(tensors, 5)
        layouts.append(
            Layout(
                physical_ids=physical_ids,
                row_tokens=row_tokens,
                row_places=row_places,
                send_splits=rows.send_splits,
                recv_splits=rows.recv_splits,
                home_rows=home_rows,
                replica_rows=replica_rows,
                home_groups=RowGroups(rows.home_counts, next(ends)),
                replica_groups=RowGroups(rows.replica_counts, next(ends)),
                replicas=rows.replicas,
            )
        )
    return layouts


def place_rows(planned: PlannedRows) -> RowPlaces:
    """Where one rank's rows of an instance go, all of whose experts are known."""
    experts, num_homes = planned.experts, planned.experts.num_homes
    sent_P, arriving_RG = planned.sent_P, planned.arriving_RG
    row_tokens = np.empty(planned.physical_NK.size, np.int64)
    row_places = np.empty(planned.physical_NK.shape, np.int64)
    _place_rows(planned.physical_NK, np.cumsum(sent_P) - sent_P, row_tokens, row_places)
    arrivals = np.empty(int(arriving_RG.sum()), np.int64)
    _group_arrivals(arriving_RG, arrivals)
    group_sizes = arriving_RG.sum(axis=0)
    home_total = int(group_sizes[:num_homes].sum())
    num_here = int(np.count_nonzero(planned.replicas.ranks == experts.rank))
    return RowPlaces(
        physical_ids=planned.physical_NK if experts.outer_ids_P is None else experts.outer_ids_P[planned.physical_NK],
        row_tokens=row_tokens,
        row_places=row_places,
        send_splits=sent_P.reshape(experts.num_ranks, -1).sum(axis=1).tolist(),
        recv_splits=arriving_RG.sum(axis=1).tolist(),
        home_rows=arrivals[:home_total],
        replica_rows=arrivals[home_total:],
        home_counts=group_sizes[:num_homes].tolist(),
        replica_counts=group_sizes[num_homes : num_homes + num_here].tolist(),
        replicas=planned.replicas,
    )


@kernel
def _choose_copies(  # type: ignore[no-untyped-def]
    ids_NK, home_ids_E, replica_experts, quotas_P, replica_ids_P, physical_NK, rows_P
):
    """Give each row the copy whose turn it is, the replicas in plan order, then the home; and count them."""
    first_replica_E = np.full(len(home_ids_E), -1, np.int64)
    next_replica_P = np.full(len(replica_experts), -1, np.int64)
    for p in range(len(replica_experts) - 1, -1, -1):
        next_replica_P[p] = first_replica_E[replica_experts[p]]
        first_replica_E[replica_experts[p]] = p
    for n in range(ids_NK.shape[0]):
        for k in range(ids_NK.shape[1]):
            expert = ids_NK[n, k]
            if expert >= len(home_ids_E):
                physical_NK[n, k] = UNKNOWN
                continue
            p = first_replica_E[expert]
            while p >= 0 and quotas_P[p] == 0:
                p = next_replica_P[p]
                first_replica_E[expert] = p
            physical = home_ids_E[expert]
            if p >= 0:
                quotas_P[p] -= 1
                physical = replica_ids_P[p]
            physical_NK[n, k] = physical
            rows_P[physical] += 1


@kernel
def _place_rows(physical_NK, starts_P, row_tokens, row_places_NK):  # type: ignore[no-untyped-def]
    """Give each row the next place of its physical expert."""
    for n in range(physical_NK.shape[0]):
        for k in range(physical_NK.shape[1]):
            place = starts_P[physical_NK[n, k]]
            starts_P[physical_NK[n, k]] += 1
            row_places_NK[n, k] = place
            row_tokens[place] = n


@kernel
def _group_arrivals(arriving_RG, arrivals):  # type: ignore[no-untyped-def]
    """Indices that bring rows ordered by (source, group) into the order (group, source)."""
    num_ranks, num_groups = arriving_RG.shape
    starts_RG = np.empty((num_ranks, num_groups), np.int64)
    start = 0
    for r in range(num_ranks):
        for g in range(num_groups):
            starts_RG[r, g] = start
            start += arriving_RG[r, g]
    place = 0
    for g in range(num_groups):
        for r in range(num_ranks):
            for row in range(arriving_RG[r, g]):
                arrivals[place] = starts_RG[r, g] + row
                place += 1
