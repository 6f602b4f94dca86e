"""`ReplicaTable`: replicas and quotas of instances, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.replicas.kernel_values import Shares


class ReplicaTable(NamedTuple):
    """Replicas and quotas of I instances, as in `StepPlan`: of all instances of a step, or of one layer's.

    Attributes:
        replica_starts: `[I + 1]` int64, replicas of instance i are `replica_starts[i]:replica_starts[i + 1]`.
        experts: `[P]` int16.
        ranks: `[P]` int16.
        quota_starts: `[P + 1]` int64, quotas of replica p are `quota_starts[p]:quota_starts[p + 1]`.
        sources: `[Q]` int16.
        tokens: `[Q]` int32.
    """

    replica_starts: Array
    experts: Array
    ranks: Array
    quota_starts: Array
    sources: Array
    tokens: Array

    @classmethod
    def none(cls, instances: int) -> ReplicaTable:
        """No replicas in any instance."""
        nothing = np.zeros(0, np.int16)
        starts, ends = np.zeros(instances + 1, np.int64), np.zeros(1, np.int64)
        return cls(starts, nothing, nothing, ends, nothing, nothing.astype(np.int32))

    @classmethod
    def concatenate(cls, tables: Sequence[ReplicaTable]) -> ReplicaTable:
        """The instances of several tables, one after another."""
        replicas = starts_of(np.concatenate([np.diff(table.replica_starts) for table in tables]))
        quotas = starts_of(np.concatenate([np.diff(table.quota_starts) for table in tables]))
        columns = zip(*((t.experts, t.ranks, t.sources, t.tokens) for t in tables), strict=True)
        experts, ranks, sources, tokens = (np.concatenate(column) for column in columns)
        return cls(replicas, experts, ranks, quotas, sources, tokens)

    @property
    def instances_P(self) -> Array:
        """The instance `[P]` int64 of every replica."""
        return np.repeat(np.arange(len(self.replica_starts) - 1), np.diff(self.replica_starts))

    def far_P(self, home_LE: Array, ranks_per_node: int) -> Array:
        """`[P]` bool, replicas on another node than their home.

        Args:
            home_LE: `[L, E]` int16; the instances are those of L layers, with those of a micro-step next to each other.
        """
        home_P = home_LE[self.instances_P % len(home_LE), self.experts]
        return np.asarray(home_P // ranks_per_node != self.ranks // ranks_per_node)

    @property
    def shares(self) -> Shares:
        """The replicas without their split."""
        tokens = np.diff(np.concatenate([[0], np.cumsum(self.tokens, dtype=np.int64)])[self.quota_starts])
        return Shares(self.experts.astype(np.int64), self.ranks.astype(np.int64), tokens)

    def select(self, instances: Array, wanted: Array | bool = True) -> ReplicaTable:
        """Returns the given instances in the given order.

        Args:
            instances: `[N]` integers.
            wanted: `[N]` bool; the other instances lose their replicas.
        """
        replicas_N = np.diff(self.replica_starts)[instances] * wanted
        replicas = _ranges(self.replica_starts[instances], replicas_N)
        quotas_P = np.diff(self.quota_starts)[replicas]
        quotas = _ranges(self.quota_starts[replicas], quotas_P)
        return ReplicaTable(
            starts_of(replicas_N), self.experts[replicas], self.ranks[replicas], starts_of(quotas_P),
            self.sources[quotas], self.tokens[quotas],
        )  # fmt: skip

    @classmethod
    def from_instances(cls, replicas: Sequence[Array], quotas: Sequence[Array], num_ranks: int) -> ReplicaTable:
        """Join the replicas `[P, 2]` (expert, rank) and quotas `[P, num_ranks]` of instances, both integer."""
        replicas_P2 = np.concatenate([np.empty((0, 2), np.int64), *replicas])
        quotas_PR = np.concatenate([np.empty((0, num_ranks), np.int64), *quotas])
        used = np.nonzero(quotas_PR)
        return cls(
            starts_of(np.array([len(instance) for instance in replicas], np.int64)),
            replicas_P2[:, 0].astype(np.int16),
            replicas_P2[:, 1].astype(np.int16),
            starts_of(np.count_nonzero(quotas_PR, axis=1)),
            used[1].astype(np.int16),
            quotas_PR[used].astype(np.int32),
        )

    @classmethod
    def join_layers(cls, layers: Sequence[ReplicaTable]) -> ReplicaTable:
        """Join tables of L layers with M instances each; instance m * L + l of the result is instance m of layer l."""
        num_layers, num_micro_steps = len(layers), len(layers[0].replica_starts) - 1
        replicas_ML = np.stack([np.diff(table.replica_starts) for table in layers], axis=1)
        quotas_ML = np.stack([np.diff(table.quota_starts[table.replica_starts]) for table in layers], axis=1)
        replica_starts, quota_starts = starts_of(replicas_ML.reshape(-1)), starts_of(quotas_ML.reshape(-1))
        replicas, quotas = int(replica_starts[-1]), int(quota_starts[-1])
        joined = cls(
            replica_starts,
            np.empty(replicas, np.int16),
            np.empty(replicas, np.int16),
            np.empty(replicas + 1, np.int64),
            np.empty(quotas, np.int16),
            np.empty(quotas, np.int32),
        )
        joined.quota_starts[-1] = quotas
        # Copied directly, since an index of all quotas would need more memory than the quotas.
        for layer, table in enumerate(layers):
            instances = np.arange(num_micro_steps) * num_layers + layer
            _copy_instances(table, instances, quota_starts, joined)
        return joined


def starts_of(sizes: Array) -> Array:
    """Starts `[N + 1]` int64 of N neighbouring parts of the given sizes."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _ranges(starts: Array, sizes: Array) -> Array:
    """Indices `starts[n]` to `starts[n] + sizes[n] - 1`, for every n in turn."""
    return np.arange(int(sizes.sum())) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)


@kernel
def _copy_instances(table, instances, quota_starts, joined):  # type: ignore[no-untyped-def]
    """Copy instance m of a table to instance `instances[m]` of another, whose quotas of instance i start at
    `quota_starts[i]`."""
    for m in range(len(instances)):
        place = joined.replica_starts[instances[m]]
        quota = quota_starts[instances[m]]
        for p in range(table.replica_starts[m], table.replica_starts[m + 1]):
            joined.experts[place] = table.experts[p]
            joined.ranks[place] = table.ranks[p]
            joined.quota_starts[place] = quota
            place += 1
            for q in range(table.quota_starts[p], table.quota_starts[p + 1]):
                joined.sources[quota] = table.sources[q]
                joined.tokens[quota] = table.tokens[q]
                quota += 1
