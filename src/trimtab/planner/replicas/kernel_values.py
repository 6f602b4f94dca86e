"""Arguments of the kernels of replicas and split that travel together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array

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


class Instance(NamedTuple):
    """Load of one instance, summed over source ranks.

    Attributes:
        counts_E: `[E]` int64, tokens of every expert, which replicas may take.
        fixed_R: `[R]` int64, rows that stay at each rank, the expected ones of unknown routes.
        homes: of the layer.
    """

    counts_E: Array
    fixed_R: Array
    homes: Homes


class Limits(NamedTuple):
    """Cluster and settings, all int64.

    Attributes:
        ranks_per_node: of the cluster.
        slots: replicas of a rank.
        threshold_parts: max/mean load up to which an instance is not changed, in parts per million: decisions in
            integers are the same on every machine.
        smallest_share: fewest tokens of a copy, and fewest tokens that stay at home if any do.
    """

    ranks_per_node: int
    slots: int
    threshold_parts: int
    smallest_share: int


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


class PlacementStrategy(NamedTuple):
    """How the greedy attempt chooses a rank for a replica, and its tokens.

    Attributes:
        fill: fill the taker to the target; otherwise it takes only the giver's excess.
        near: prefer a part of the excess in the giver's node to the whole excess on another node.
    """

    fill: bool
    near: bool
