"""`Program`: what a layer of a micro-step does on this rank; `Layout`: the places of its rows in send and receive
buffers, from counts, without communication.

A rank sends rows ordered by physical expert, then by token. They arrive ordered by source, then by physical expert, and
are regrouped so that the rows of each copy are together. Both orders follow from the counts and the plan.

`SecondPhase`: where rows go that reach whole experts on other ranks from the experts' homes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.runtime.program.grouped_products import RowGroups
from trimtab.runtime.program.physical_experts import InstanceReplicas, PhysicalExperts, PlannedRows
from trimtab.runtime.state.flat_memory import upload


@dataclass(frozen=True, eq=False)
class SecondPhase:
    """One rank's rows of an instance in which whole experts have moved.

    Attributes:
        kept_rows, leaving_rows: int32 indices into the rows of home experts: those that stay, and those of experts that
            have moved, by rank and expert.
        kept_groups: rows of each home expert that stay, 0 for experts that have moved.
        came_groups: rows of each expert that has moved here, by slot.
        send_splits, recv_splits: rows to and from each rank.
    """

    kept_rows: torch.Tensor
    leaving_rows: torch.Tensor
    kept_groups: RowGroups
    came_groups: RowGroups
    send_splits: list[int]
    recv_splits: list[int]

    @classmethod
    def of(cls, experts: PhysicalExperts, home_counts: list[int], replicas: InstanceReplicas) -> SecondPhase:
        """The second phase of this rank, on the host.

        Args:
            home_counts: rows of each home expert of the rank, in the order of rows in its tensors.
            replicas: whole experts, ordered by rank, home and row; their quotas are all rows.
        """
        num_ranks, rank = experts.num_ranks, experts.rank
        tokens_P = replicas.quotas_PR.sum(axis=1)
        starts = np.cumsum(home_counts) - home_counts
        stays = np.ones(sum(home_counts), np.bool_)
        kept_counts = np.array(home_counts, np.int64)
        leaving: list[np.ndarray] = []
        send, receive = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
        for replica, tokens in zip(replicas.located(experts.places), tokens_P.tolist(), strict=True):
            if replica.home == rank:
                rows = np.arange(starts[replica.row], starts[replica.row] + tokens, dtype=np.int32)
                leaving.append(rows)
                stays[rows] = False
                kept_counts[replica.row] = 0
                send[replica.rank] += tokens
            if replica.rank == rank:
                receive[replica.home] += tokens
        came = tokens_P[replicas.ranks == rank]
        return cls(
            torch.from_numpy(np.flatnonzero(stays).astype(np.int32)),
            torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *leaving])),
            RowGroups.on_host(kept_counts),
            RowGroups.on_host(came),
            send.tolist(),
            receive.tolist(),
        )

    def on(self, device: torch.device) -> SecondPhase:
        """The same on a device; the host does not wait for the copies."""
        kept, came = self.kept_groups, self.came_groups
        kept_rows, leaving_rows, *ends = upload([self.kept_rows, self.leaving_rows, kept.ends, came.ends], device)
        kept, came = (replace(groups, ends=end) for groups, end in zip((kept, came), ends, strict=True))
        return replace(self, kept_rows=kept_rows, leaving_rows=leaving_rows, kept_groups=kept, came_groups=came)


class RowPlaces(NamedTuple):
    """The places of one rank's rows: N sent, A arriving.

    Attributes:
        row_tokens: `[N]` int32, the local token (0 .. n-1) of each place in the send buffer.
        row_places: `[n, K]` int32, the place in the send buffer of each (token, k).
        home_rows, replica_rows: int32 indices into the arrived rows, grouped by home expert and by replica slot.
    """

    row_tokens: torch.Tensor
    row_places: torch.Tensor
    home_rows: torch.Tensor
    replica_rows: torch.Tensor


@dataclass(frozen=True, eq=False)
class Program:
    """What one layer of a micro-step does with its rows on this rank, on the host or on a device.

    Attributes:
        recorded_NK: `[n, K]` int64 recorded ids; None if none are replayed.
        known_N: `[n]` bool, whether the route of each token is known; None if all are.
        read_N: `[n]` bool, whether the output of each token is used; None if all are.
        num_read: tokens of known route whose output is used.
        planned: the planned rows of a layer in which a rank has unknown ones, or rows may deviate; on the host. The
            program is then completed by `place_rows` when the ranks have exchanged counts.
        layout: where the rows go; None if the micro-step is not planned, or until the ranks have exchanged counts.
    """

    recorded_NK: torch.Tensor | None = None
    known_N: torch.Tensor | None = None
    read_N: torch.Tensor | None = None
    num_read: int = 0
    planned: PlannedRows | None = None
    layout: Layout | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that a layer reads on its device."""
        own = [self.recorded_NK, self.known_N, self.read_N]
        return [t for t in own if t is not None] + ([] if self.layout is None else self.layout.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        planned = 0 if self.planned is None else self.planned.physical_NK.nbytes
        return planned + sum(tensor.nbytes for tensor in self.tensors)

    def moved(self, copies: Iterator[torch.Tensor]) -> Program:
        """The same program with the next of `copies` of its tensors."""
        own = (None if tensor is None else next(copies) for tensor in (self.recorded_NK, self.known_N, self.read_N))
        recorded_NK, known_N, read_N = own
        layout = None if self.layout is None else self.layout.moved(copies)
        return replace(self, recorded_NK=recorded_NK, known_N=known_N, read_N=read_N, layout=layout)


class Arrivals(NamedTuple):
    """Rows that arrive for the first of a rank's physical experts, as a framework's dispatcher takes them.

    Attributes:
        by_rank: `[R, G]` int64, from each rank; on the host.
        counts: `[G]` int64, from all; on the host.
    """

    by_rank: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, arriving_RG: Array) -> Arrivals:
        """The same as tensors."""
        return cls(torch.from_numpy(np.ascontiguousarray(arriving_RG)), torch.from_numpy(arriving_RG.sum(axis=0)))


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of one rank's rows of one instance.

    Attributes:
        physical_ids: `[n, K]` uint16, the physical expert of each (token, k), with ranks in the framework's order.
        send_splits, recv_splits: rows to and from each rank; without places in the framework's order.
        home_groups, replica_groups: number of rows of each home expert and of each replica slot in use.
        replicas: the instance's replicas on all ranks. Without any, no rank computes replica rows.
        places: the places of rows; None if a framework's dispatcher chooses them.
        arrivals: without places, what arrives for the home experts, and for all physical experts.
        arriving: without places, `[R, H + S]`, the latter by rank where the layout is.
        second: if whole experts have moved, their rows, which first reach the homes; None otherwise.
    """

    physical_ids: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]
    home_groups: RowGroups
    replica_groups: RowGroups
    replicas: InstanceReplicas
    places: RowPlaces | None
    arrivals: tuple[Arrivals, Arrivals] | None = None
    arriving: torch.Tensor | None = None
    second: SecondPhase | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that a layer reads on its device."""
        if self.places is None:
            assert self.arriving is not None
            return [self.physical_ids, self.arriving]
        return [self.physical_ids, *self.places, self.home_groups.ends, self.replica_groups.ends]

    def moved(self, copies: Iterator[torch.Tensor]) -> Layout:
        """The same layout with the next of `copies` of its tensors."""
        if self.places is None:
            return replace(self, physical_ids=next(copies), arriving=next(copies))
        physical_ids, *places = (next(copies) for _ in range(1 + len(self.places)))
        homes, replicas = (replace(groups, ends=next(copies)) for groups in (self.home_groups, self.replica_groups))
        places_now = RowPlaces(*places)
        return replace(self, physical_ids=physical_ids, places=places_now, home_groups=homes, replica_groups=replicas)

    def on(self, device: torch.device) -> Layout:
        """The layout on a device, in one copy; the host does not wait for it."""
        return self.moved(iter(upload(self.tensors, device)))


def place_rows(planned: PlannedRows, *, has_places: bool) -> Layout:
    """The layout of one rank's rows of an instance without unknown rows, on the host.

    Args:
        has_places: whether Trimtab sends the rows; else a framework's dispatcher.
    """
    experts, num_homes = planned.experts, planned.experts.num_homes
    sent_R, arriving_RG = planned.sent_P.reshape(experts.num_ranks, -1).sum(axis=1), planned.arriving_RG
    group_sizes = arriving_RG.sum(axis=0)
    num_here = int(np.count_nonzero(planned.replicas.ranks == experts.rank))
    outer_NK = planned.physical_NK if experts.outer_ids_P is None else experts.outer_ids_P[planned.physical_NK]
    if not has_places and experts.outer_ranks_R is not None:
        sent_R, arriving_RG = sent_R[experts.outer_ranks_R], arriving_RG[experts.outer_ranks_R]
    arrivals = None if has_places else (Arrivals.of(arriving_RG[:, :num_homes]), Arrivals.of(arriving_RG))
    return Layout(
        torch.from_numpy(outer_NK),
        sent_R.tolist(),
        arriving_RG.sum(axis=1).tolist(),
        RowGroups.on_host(group_sizes[:num_homes]),
        RowGroups.on_host(group_sizes[num_homes : num_homes + num_here]),
        planned.replicas,
        _places(planned) if has_places else None,
        arrivals,
        None if arrivals is None else arrivals[1].by_rank,
    )


def _places(planned: PlannedRows) -> RowPlaces:
    sent_P, arriving_RG = planned.sent_P, planned.arriving_RG
    row_tokens = torch.empty(planned.physical_NK.size, dtype=torch.int32)
    row_places = torch.empty(planned.physical_NK.shape, dtype=torch.int32)
    _place_rows(planned.physical_NK, np.cumsum(sent_P) - sent_P, row_tokens.numpy(), row_places.numpy())
    arrivals = torch.empty(int(arriving_RG.sum()), dtype=torch.int32)
    _group_arrivals(arriving_RG, arrivals.numpy())
    home_total = int(arriving_RG[:, : planned.experts.num_homes].sum())
    return RowPlaces(row_tokens, row_places, arrivals[:home_total], arrivals[home_total:])


@kernel
def _place_rows(physical_NK, starts_P, row_tokens, row_places_NK):  # type: ignore[no-untyped-def]
    """Assign each row the next place of its physical expert."""
    for n in range(physical_NK.shape[0]):
        for k in range(physical_NK.shape[1]):
            place = starts_P[physical_NK[n, k]]
            starts_P[physical_NK[n, k]] += 1
            row_places_NK[n, k] = place
            row_tokens[place] = n


@kernel
def _group_arrivals(arriving_RG, arrivals):  # type: ignore[no-untyped-def]
    """Indices that reorder rows from (source, group) to (group, source)."""
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
