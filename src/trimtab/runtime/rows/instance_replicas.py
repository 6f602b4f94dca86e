"""`InstanceReplicas`: the replicas of one instance, decoded from a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import numpy as np

from trimtab.array_type import Array
from trimtab.planner import StepPlan
from trimtab.planner.replicas.paths import PEER
from trimtab.runtime.state.home_experts import HomeExperts

# Micro-steps whose decoded replicas are cached.
CACHED_MICRO_STEPS = 4


class Replica(NamedTuple):
    """One replica and its places.

    Attributes:
        expert: logical id.
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


@dataclass(frozen=True, eq=False)
class InstanceReplicas:
    """The replicas of one instance on all ranks, in plan order.

    Attributes:
        experts, ranks: `[P]` int64, the expert and the rank of each replica.
        slots: `[P]` int64, the replica's slot on its rank.
        paths: `[P]` uint8, `PEER` or `HOST`.
        quotas_PR: `[P, R]` int64, tokens from each source rank.
    """

    experts: Array
    ranks: Array
    slots: Array
    paths: Array
    quotas_PR: Array

    @property
    def count(self) -> int:
        """Number of replicas on all ranks, P."""
        return len(self.experts)

    def located(self, layer: HomeExperts) -> list[Replica]:
        """The replicas with their places, in plan order, under the present homes of a layer."""
        homes, rows = layer.home_E[self.experts], layer.rows_E[self.experts]
        columns = (self.experts, homes, rows, self.ranks, self.slots, self.paths)
        return [Replica(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

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
        chosen = slice(indices.start, indices.stop)
        ranks = plan.replica_ranks[chosen].astype(np.int64)
        slots = np.array([np.count_nonzero(ranks[:p] == rank) for p, rank in enumerate(ranks)], np.int64)
        quotas_PR = np.zeros((len(ranks), plan.num_ranks), np.int64)
        for p, replica in enumerate(indices):
            quotas = slice(int(plan.quota_starts[replica]), int(plan.quota_starts[replica + 1]))
            quotas_PR[p, plan.quota_sources[quotas]] = plan.quota_tokens[quotas]
        return cls(plan.replica_experts[chosen].astype(np.int64), ranks, slots, plan.replica_paths[chosen], quotas_PR)


class ReplicasOfStep(Protocol):
    """The replicas of a step's instances."""

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
        self.of = lru_cache(CACHED_MICRO_STEPS * plan.num_layers)(partial(InstanceReplicas.of, plan))

    def count(self, micro_step: int, layer: int) -> int:
        """Replicas of an instance on all ranks; 0 for a micro-step that the plan does not have."""
        return int(self._counts_ML[micro_step][layer]) if 0 <= micro_step < len(self._counts_ML) else 0
