"""Physical experts: the copy of an expert that computes each row; `InstanceReplicas`: the replicas among them.

A row is one (token, expert) pair. Every rank has H = E / R home experts and S slots for replicas. Together these are
R x (H + S) *physical experts*: those of rank r are r * (H + S) to (r + 1) * (H + S) - 1, its home experts in the
order of their rows first. A plan assigns a physical expert to each row. Dispatchers get ids with ranks in the
framework's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.planner.replicas.paths import PEER
from trimtab.runtime.state.expert_places import ExpertPlaces

# The physical expert of a row whose route is unknown.
UNKNOWN = 0xFFFF

# Micro-steps whose decoded replicas are cached.
CACHED_MICRO_STEPS = 4


class Replica(NamedTuple):
    """One replica and its places.

    Attributes:
        expert: id.
        home, row: the home rank, and the row of the expert there.
        rank, slot: the rank of the replica, and the slot there.
        path: `PEER` or `HOST`.
    """

    expert: int
    home: int
    row: int
    rank: int
    slot: int
    path: int


@dataclass(eq=False)
class InstanceReplicas:
    """The replicas of one instance on all ranks, in plan order.

    Attributes:
        experts, ranks: `[P]` int64, the expert and the rank of each replica.
        slots: `[P]` int64, the replica's slot on its rank.
        paths: `[P]` uint8, `PEER` or `HOST`.
        quotas_PR: `[P, R]` int64, tokens from each source rank.
        count: number of replicas on all ranks, P.
    """

    experts: Array
    ranks: Array
    slots: Array
    paths: Array
    quotas_PR: Array
    _located: list[Replica] | None = None

    def __post_init__(self) -> None:
        self.count = len(self.experts)

    def located(self, places: ExpertPlaces) -> list[Replica]:
        """The replicas with their places, in plan order. Places of a session are always the same."""
        if self._located is None:
            homes, rows = places.home_E[self.experts], places.rows_E[self.experts]
            columns = (self.experts, homes, rows, self.ranks, self.slots, self.paths)
            self._located = [Replica(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        return self._located

    @classmethod
    def none(cls, num_ranks: int) -> InstanceReplicas:
        """No replicas."""
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing, nothing, np.empty((0, num_ranks), np.int64))

    @classmethod
    def chosen(cls, experts: Array, ranks: Array, quotas_PR: Array) -> InstanceReplicas:
        """Replicas on the peer path, in this order; a rank's slots are used in this order, too."""
        ranks = ranks.astype(np.int64)
        slots = np.array([np.count_nonzero(ranks[:p] == rank) for p, rank in enumerate(ranks)], np.int64)
        return cls(experts.astype(np.int64), ranks, slots, np.full(len(ranks), PEER, np.uint8), quotas_PR)

    @classmethod
    def of(cls, plan: StepPlan, micro_step: int, layer: int) -> InstanceReplicas:
        """The replicas of one instance of a plan."""
        indices = plan.replicas_of(micro_step, layer)
        mine = slice(indices.start, indices.stop)
        quotas_PR = np.zeros((len(indices), plan.num_ranks), np.int64)
        for p, replica in enumerate(indices):
            quotas = slice(int(plan.quota_starts[replica]), int(plan.quota_starts[replica + 1]))
            quotas_PR[p, plan.quota_sources[quotas]] = plan.quota_tokens[quotas]
        replicas = cls.chosen(plan.replica_experts[mine], plan.replica_ranks[mine], quotas_PR)
        return replace(replicas, paths=plan.replica_paths[mine])


class ReplicasOfStep(Protocol):
    """The replicas of a step's instances.

    Attributes:
        may_have_any: whether any instance has replicas, or may have some later.
    """

    may_have_any: bool

    def count(self, micro_step: int, layer: int) -> int:
        """Replicas of an instance on all ranks; 0 if it has none, or none yet."""
        ...

    def of(self, micro_step: int, layer: int) -> InstanceReplicas:
        """The replicas of an instance with `count` above 0."""
        ...


class PlanReplicas:
    """The replicas of all instances of a plan. `of(micro_step, layer)` returns those of one instance, cached."""

    def __init__(self, plan: StepPlan) -> None:
        self._counts_ML = np.diff(plan.replica_starts).reshape(-1, plan.num_layers).tolist()
        self.may_have_any = len(plan.replica_experts) > 0
        self.of = lru_cache(CACHED_MICRO_STEPS * plan.num_layers)(partial(InstanceReplicas.of, plan))

    def count(self, micro_step: int, layer: int) -> int:
        """Replicas of an instance on all ranks; 0 for a micro-step that the plan does not have."""
        return int(self._counts_ML[micro_step][layer]) if 0 <= micro_step < len(self._counts_ML) else 0


@dataclass(frozen=True, eq=False)
class PhysicalExperts:
    """The numbers of the physical experts, the same in all layers of a session.

    Attributes:
        places: of the experts.
        rank, num_ranks: this rank, and R.
        num_homes, num_slots: home experts and slots of a rank, H and S.
        home_ids_E: `[E]` int64, the physical expert of each expert at its home.
        outer_ids_P: `[R * (H + S)]` uint16, numbers of the physical experts in the framework's order of ranks; None if
            the session has the same order.
        outer_ranks_R: `[R]` int64, the session's ranks in the framework's order; None as well.
    """

    places: ExpertPlaces
    rank: int
    num_ranks: int
    num_homes: int
    num_slots: int
    home_ids_E: Array
    outer_ids_P: Array | None = None
    outer_ranks_R: Array | None = None

    @classmethod
    def of(cls, places: ExpertPlaces, rank: int, positions: Sequence[int], num_slots: int) -> PhysicalExperts:
        """The physical experts of a session.

        Args:
            positions: the position of every rank in the framework's group.

        Raises:
            InputError: if their numbers don't fit into 16 bits.
        """
        num_ranks = len(positions)
        num_homes = len(places.home_E) // num_ranks
        num_local, outer_ids_P, outer_ranks_R = num_homes + num_slots, None, None
        if num_ranks * num_local >= UNKNOWN:
            raise InputError(
                f"{num_ranks} ranks with {num_homes} experts and {num_slots} slots each are more than {UNKNOWN - 1} "
                "physical experts; use fewer slots_per_rank"
            )
        if list(positions) != list(range(num_ranks)):
            outer_ids_RG = np.array(positions)[:, None] * num_local + np.arange(num_local)
            outer_ids_P, outer_ranks_R = outer_ids_RG.reshape(-1).astype(np.uint16), np.argsort(positions)
        home_ids_E = places.home_E * np.int64(num_local) + places.rows_E
        return cls(places, rank, num_ranks, num_homes, num_slots, home_ids_E, outer_ids_P, outer_ranks_R)

    @property
    def num_local(self) -> int:
        """Physical experts of one rank, H + S."""
        return self.num_homes + self.num_slots

    @property
    def count(self) -> int:
        """Physical experts of all ranks, R * (H + S)."""
        return self.num_ranks * self.num_local

    def replica_ids(self, replicas: InstanceReplicas) -> Array:
        """The physical experts of replicas, `[P]` int64."""
        return replicas.ranks * self.num_local + self.num_homes + replicas.slots


@dataclass(frozen=True, eq=False)
class PlannedRows:
    """Physical experts and counts of one rank's rows of an instance, for rows with known experts.

    Attributes:
        ids_NK: `[n, K]` integer recorded experts; E and more are unknown.
        physical_NK: `[n, K]` uint16, the physical expert of each of the rank's rows, or `UNKNOWN`.
        sent_P: `[R * (H + S)]` int64, number of known rows that the rank sends to each physical expert.
        arriving_RG: `[R, H + S]` int64, number of known rows from each rank to each of its own physical experts.
        replicas: replicas of the instance on all ranks.
        experts: the physical experts.
    """

    ids_NK: Array
    physical_NK: Array
    sent_P: Array
    arriving_RG: Array
    replicas: InstanceReplicas
    experts: PhysicalExperts

    @classmethod
    def of(
        cls, ids_NK: Array, counts_E: Array, arriving_RH: Array, experts: PhysicalExperts, replicas: InstanceReplicas
    ) -> PlannedRows:
        """Assign each row to a copy: of a source's rows for an expert, in token order, replicas get their quotas
        first, in plan order, and the home gets the rest.

        Args:
            ids_NK: `[n, K]` integer expert ids of this rank's tokens; E and more are unknown.
            counts_E: `[E]` integer known rows of this rank.
            arriving_RH: `[R, H]` integer known rows of every rank for this rank's home experts.

        Raises:
            ValueError: if the counts of this rank's ids differ from `counts_E`.
        """
        rank, home_ids_E, quotas_PR = experts.rank, experts.home_ids_E, replicas.quotas_PR
        replica_ids = experts.replica_ids(replicas)
        sent_P = np.zeros(experts.count, np.int64)
        sent_P[home_ids_E] = counts_E
        np.subtract.at(sent_P, home_ids_E[replicas.experts], quotas_PR[:, rank])
        sent_P[replica_ids] = quotas_PR[:, rank]

        arriving_RG = np.zeros((experts.num_ranks, experts.num_local), np.int64)
        arriving_RG[:, : experts.num_homes] = arriving_RH
        left = experts.places.home_E[replicas.experts] == rank
        np.subtract.at(arriving_RG.T, experts.places.rows_E[replicas.experts[left]], quotas_PR[left])
        came = replicas.ranks == rank
        arriving_RG[:, experts.num_homes + replicas.slots[came]] = quotas_PR[came].T

        physical_NK = np.empty(ids_NK.shape, np.uint16)
        found_P = np.zeros(experts.count, np.int64)
        quotas_P = quotas_PR[:, rank].copy()
        _choose_copies(ids_NK, home_ids_E, replicas.experts, quotas_P, replica_ids, physical_NK, found_P)
        if not np.array_equal(found_P, sent_P):
            raise ValueError(f"rank {rank}: the tokens of this micro-step are not those that were planned")
        return cls(ids_NK, physical_NK, sent_P, arriving_RG, replicas, experts)

    @classmethod
    def unknown(cls, shape: tuple[int, ...], experts: PhysicalExperts) -> PlannedRows:
        """`[n, K]` rows whose experts are all unknown, in an instance without replicas."""
        nothing_RG = np.zeros((experts.num_ranks, experts.num_local), np.int64)
        unknown_NK, replicas = np.full(shape, UNKNOWN, np.uint16), InstanceReplicas.none(experts.num_ranks)
        return cls(unknown_NK, unknown_NK, nothing_RG.reshape(-1), nothing_RG, replicas, experts)

    @property
    def unknown_tokens(self) -> Array:
        """`[U]` int64, this rank's tokens whose route is unknown."""
        return np.flatnonzero((self.physical_NK == UNKNOWN).any(axis=1))

    def with_ids(self, ids_NK: Array) -> tuple[PlannedRows, int]:
        """The rows for experts that may be other than the recorded ones. `arriving_RG` stays; see `receiving`.

        A row keeps its planned physical expert if its token was recorded with its expert, in any order. Other rows go
        to their experts' homes.

        Args:
            ids_NK: `[n, K]` integer experts.

        Returns:
            The rows, and the number of those that differ from a recorded token.
        """
        physical_NK, sent_P = np.empty_like(self.physical_NK), np.zeros_like(self.sent_P)
        deviating = _follow(self.ids_NK, self.physical_NK, ids_NK, self.experts.home_ids_E, physical_NK, sent_P)
        return replace(self, physical_NK=physical_NK, sent_P=sent_P), int(deviating)

    def receiving(self, sent_RP: Array) -> PlannedRows:
        """The same rows, with those that arrive if the ranks send `[R, R * (H + S)]` rows to each physical expert."""
        experts = self.experts
        by_rank_RRG = sent_RP.reshape(experts.num_ranks, experts.num_ranks, experts.num_local)
        return replace(self, arriving_RG=np.ascontiguousarray(by_rank_RRG[:, experts.rank]))


@kernel
def _follow(recorded_NK, planned_NK, ids_NK, home_ids_E, physical_NK, sent_P):  # type: ignore[no-untyped-def]
    """Assign each row its planned physical expert or its home; count rows by physical expert, and deviating ones."""
    num_deviating = 0
    for n in range(ids_NK.shape[0]):
        for k in range(ids_NK.shape[1]):
            place = k
            if recorded_NK[n, k] != ids_NK[n, k]:
                place = -1
                for other in range(ids_NK.shape[1]):
                    if recorded_NK[n, other] == ids_NK[n, k]:
                        place = other
            if place >= 0:
                physical = np.int64(planned_NK[n, place])
            else:
                physical = home_ids_E[ids_NK[n, k]]
                num_deviating += planned_NK[n, 0] != UNKNOWN
            physical_NK[n, k] = physical
            sent_P[physical] += 1
    return num_deviating


@kernel
def _choose_copies(  # type: ignore[no-untyped-def]
    ids_NK, home_ids_E, replica_experts, quotas_P, replica_ids_P, physical_NK, rows_P
):
    """Assign each row the first replica of its expert with quota left, else the home; count rows by physical expert."""
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
