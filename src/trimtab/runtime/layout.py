"""Where every row of one instance goes: arithmetic on counts, without communication.

A row is one (token, expert) pair. A rank sends rows ordered by destination, there by group, there by token. A group is
one copy on one rank: its home experts in rising order come first, then its replica slots. Rows arrive ordered by
source, then by group, and are regrouped so that each copy's rows are together. Both sides follow from the counts and
the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import torch

from trimtab.planner import StepPlan
from trimtab.runtime.experts import RowGroups
from trimtab.runtime.memory import upload
from trimtab.trace.routing import Array


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


@dataclass(frozen=True, eq=False)
class Layout:
    """One rank's rows of one instance: N sent, A arriving.

    Attributes:
        row_tokens: `[N]` int64, the local token (0 .. n-1) of each place in the send buffer.
        row_places: `[n, K]` int64, the place in the send buffer of each (token, k).
        send_splits, recv_splits: rows to and from each rank.
        home_rows, replica_rows: int64 indices into the arrived rows, grouped by home expert and by replica slot.
        home_groups, replica_groups: how many rows each home expert and each replica slot has.
        num_here: replicas on this rank.
        replicas: the instance's replicas on all ranks. If there is none at all, no rank runs its replica half.
    """

    row_tokens: torch.Tensor
    row_places: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]
    home_rows: torch.Tensor
    replica_rows: torch.Tensor
    home_groups: RowGroups
    replica_groups: RowGroups
    num_here: int
    replicas: InstanceReplicas


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """A `Layout` on the host, with rows of home and replica groups as counts alone."""

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
    """Bring the layouts of any number of instances to the device, all in one copy that the host does not wait for."""
    arrays: list[Array] = []
    for rows in placed:
        ends = (np.cumsum(counts, dtype=np.int32) for counts in (rows.home_counts, rows.replica_counts))
        arrays += [rows.row_tokens, rows.row_places, rows.home_rows, rows.replica_rows, *ends]
    tensors = iter(upload(arrays, device))
    layouts = []
    for rows in placed:
        row_tokens, row_places, home_rows, replica_rows, home_ends, replica_ends = itertools.islice(tensors, 6)
        layouts.append(
            Layout(
                row_tokens=row_tokens,
                row_places=row_places,
                send_splits=rows.send_splits,
                recv_splits=rows.recv_splits,
                home_rows=home_rows,
                replica_rows=replica_rows,
                home_groups=RowGroups(rows.home_counts, home_ends),
                replica_groups=RowGroups(rows.replica_counts, replica_ends),
                num_here=len(rows.replica_counts),
                replicas=rows.replicas,
            )
        )
    return layouts


def place_rows(ids_NK: Array, counts_RE: Array, home_E: Array, rank: int, replicas: InstanceReplicas) -> RowPlaces:
    """Where one rank's rows of an instance go.

    Args:
        ids_NK: `[n, K]` integer expert ids of this rank's tokens.
        counts_RE: `[R, E]` integer tokens by source rank and expert, of all ranks.
        home_E: `[E]` integer homes.

    Raises:
        ValueError: if this rank's ids are not what the counts say.
    """
    num_ranks, num_experts = counts_RE.shape
    if not np.array_equal(np.bincount(ids_NK.reshape(-1), minlength=num_experts), counts_RE[rank]):
        raise ValueError(f"rank {rank}: the tokens of this micro-step are not those that were planned")
    homes = home_E.astype(np.int64)
    homes_per_rank = num_experts // num_ranks
    local_E = np.empty(num_experts, np.int64)
    for r in range(num_ranks):
        local_E[np.flatnonzero(homes == r)] = np.arange(homes_per_rank)

    away_RE = np.zeros((num_ranks, num_experts), np.int64)
    np.add.at(away_RE.T, replicas.experts, replicas.quotas_PR)
    at_home_RE = counts_RE - away_RE

    num_groups = homes_per_rank + int(replicas.slots.max(initial=-1)) + 1
    sent_RG = np.zeros((num_ranks, num_groups), np.int64)
    sent_RG[homes, local_E] = at_home_RE[rank]
    sent_RG[replicas.ranks, homes_per_rank + replicas.slots] = replicas.quotas_PR[:, rank]
    arriving_RG = np.zeros((num_ranks, num_groups), np.int64)
    arriving_RG[:, :homes_per_rank] = at_home_RE[:, homes == rank]
    here = replicas.ranks == rank
    num_here = int(np.count_nonzero(here))
    arriving_RG[:, homes_per_rank + replicas.slots[here]] = replicas.quotas_PR[here].T

    row_tokens = np.empty(ids_NK.size, np.int64)
    row_places = np.empty(ids_NK.shape, np.int64)
    group_starts_RG = (np.cumsum(sent_RG) - sent_RG.reshape(-1)).reshape(sent_RG.shape)
    _place_rows(
        ids_NK,
        group_starts_RG[homes, local_E],
        replicas.experts,
        replicas.quotas_PR[:, rank].copy(),
        group_starts_RG[replicas.ranks, homes_per_rank + replicas.slots],
        row_tokens,
        row_places,
    )
    arrivals = np.empty(int(arriving_RG.sum()), np.int64)
    _group_arrivals(arriving_RG, arrivals)
    group_sizes = arriving_RG.sum(axis=0)
    home_total = int(group_sizes[:homes_per_rank].sum())
    return RowPlaces(
        row_tokens=row_tokens,
        row_places=row_places,
        send_splits=sent_RG.sum(axis=1).tolist(),
        recv_splits=arriving_RG.sum(axis=1).tolist(),
        home_rows=arrivals[:home_total],
        replica_rows=arrivals[home_total:],
        home_counts=group_sizes[:homes_per_rank].tolist(),
        replica_counts=group_sizes[homes_per_rank : homes_per_rank + num_here].tolist(),
        replicas=replicas,
    )


@numba.njit(cache=True, nogil=True)
def _place_rows(  # type: ignore[no-untyped-def]
    ids_NK, home_places_E, replica_experts, quotas_P, replica_places_P, row_tokens, row_places_NK
):
    """Give each row the next place of the copy whose turn it is: the replicas in plan order, then the home."""
    first_replica_E = np.full(len(home_places_E), -1, np.int64)
    next_replica_P = np.full(len(replica_experts), -1, np.int64)
    for p in range(len(replica_experts) - 1, -1, -1):
        next_replica_P[p] = first_replica_E[replica_experts[p]]
        first_replica_E[replica_experts[p]] = p
    next_home_E = home_places_E.copy()
    next_place_P = replica_places_P.copy()
    for n in range(ids_NK.shape[0]):
        for k in range(ids_NK.shape[1]):
            expert = ids_NK[n, k]
            p = first_replica_E[expert]
            while p >= 0 and quotas_P[p] == 0:
                p = next_replica_P[p]
                first_replica_E[expert] = p
            if p >= 0:
                place = next_place_P[p]
                next_place_P[p] += 1
                quotas_P[p] -= 1
            else:
                place = next_home_E[expert]
                next_home_E[expert] += 1
            row_places_NK[n, k] = place
            row_tokens[place] = n


@numba.njit(cache=True, nogil=True)
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
