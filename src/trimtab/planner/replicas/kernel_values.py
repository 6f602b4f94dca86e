"""Arguments of the kernels of replicas and split that travel together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel

PARTS_PER_WHOLE = 1_000_000


class Homes(NamedTuple):
    """Homes of one layer's experts, by expert and by rank.

    Attributes:
        home_E: `[E]` int16, home of each expert.
        experts_by_home: `[E]` int64, experts ordered by home, then by index.
        starts_R: `[R + 1]` int64, rank r is home to `experts_by_home[starts_R[r]:starts_R[r + 1]]`.
    """

    home_E: Array
    experts_by_home: Array
    starts_R: Array

    @classmethod
    def of(cls, home_E: Array, num_ranks: int) -> Homes:
        """Homes of a layer, given by expert."""
        experts_by_home = np.argsort(home_E, kind="stable")
        starts_R = np.searchsorted(home_E[experts_by_home], np.arange(num_ranks + 1))
        return cls(np.asarray(home_E, np.int16), experts_by_home, starts_R)


class InstanceRows(NamedTuple):
    """Load of one instance, summed over source ranks.

    Attributes:
        counts_E: `[E]` int64, tokens of every expert, which replicas may take.
        fixed_R: `[R]` int64, rows that stay at each rank, the expected ones of unknown routes.
        homes: of the layer.
    """

    counts_E: Array
    fixed_R: Array
    homes: Homes


class Prices(NamedTuple):
    """Time that one more row or replica adds to an instance, over all passes of a step: femtoseconds, int64.

    Attributes:
        computed_row: a row on the busiest rank.
        near_row: a row over the busiest link inside a node.
        far_row: a row out of the busiest node or into it, whose ranks share these rows; 0 if they don't matter.
        near_replica, far_replica: a replica on its home's node or on another one.
    """

    computed_row: int
    near_row: int
    far_row: int
    near_replica: int
    far_replica: int


class Limits(NamedTuple):
    """Cluster and settings, all int64.

    Attributes:
        ranks_per_node: of the cluster.
        reach: neighbouring ranks that take each other's replicas: those of a node, or all.
        slots: replicas of a rank.
        threshold_parts: max/mean load up to which an instance is not changed, in parts per million: decisions in
            integers are the same on every machine.
        smallest_share: fewest tokens of a copy, and fewest tokens that stay at home if any do.
        most_rows: rows of a rank that no instance may exceed.
        is_exact: whether no rank may have more rows than the mean, rounded up.
        prices: what replicas reduce and cost.
        sends: most replicas of one rank's experts that keep rows in other nodes.
        forwards: whether a token is sent once to a node, and from there to its ranks; else each row by itself.
    """

    ranks_per_node: int
    reach: int
    slots: int
    threshold_parts: int
    smallest_share: int
    most_rows: int
    is_exact: bool
    prices: Prices
    sends: int
    forwards: bool


class Shares(NamedTuple):
    """Replicas and their tokens, before the split over source ranks.

    Attributes:
        experts: `[P]` int64.
        ranks: `[P]` int64.
        tokens: `[P]` int64, tokens of the expert that the replica computes.
    """

    experts: Array
    ranks: Array
    tokens: Array


@kernel
def empty_shares(replicas):  # type: ignore[no-untyped-def]
    """Memory for the `Shares` of so many replicas."""
    return Shares(np.empty(replicas, np.int64), np.empty(replicas, np.int64), np.empty(replicas, np.int64))


class Placing(NamedTuple):
    """The state of a search for replicas in one instance. All arrays are changed.

    Attributes:
        counts_NE: `[N, E]` int64 tokens by source node and expert.
        loads_R: `[R]` int64 rows of every rank.
        at_home_E: `[E]` int64 tokens that the home computes.
        found: the replicas.
    """

    counts_NE: Array
    loads_R: Array
    at_home_E: Array
    found: Shares
