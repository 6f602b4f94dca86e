"""`ReplicaTable`: replicas and quotas of instances, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
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
    def join_layers(cls, layers: Sequence[ReplicaTable]) -> ReplicaTable:
        """Join tables of L layers with M instances each; instance m * L + l of the result is instance m of layer l."""
        starts = [np.concatenate([np.diff(table[i]) for table in layers]) for i in (0, 3)]
        values = [np.concatenate([table[i] for table in layers]) for i in (1, 2, 4, 5)]
        by_layer = cls(starts_of(starts[0]), values[0], values[1], starts_of(starts[1]), values[2], values[3])
        return by_layer.select(np.arange(len(starts[0])).reshape(len(layers), -1).T.reshape(-1))


def starts_of(sizes: Array) -> Array:
    """Starts `[N + 1]` int64 of N neighbouring parts of the given sizes."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _ranges(starts: Array, sizes: Array) -> Array:
    """Indices `starts[n]` to `starts[n] + sizes[n] - 1`, for every n in turn."""
    return np.arange(int(sizes.sum())) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
