"""Paths of replica weights: from the home rank, or from the mirror in the node's host memory.

An instance fetches all its replicas at once, so the busy time of a link is the sum of its transfers. A peer
transfer occupies two links, out of the home and into the replica's rank: the node's if they share one, else the
network's. A host transfer occupies the rank's link from host memory, for any home, so no expert waits for its home's
link.

Each replica takes the path on which it completes first, given the replicas before it, and in a second pass given all
others. No link is busy for longer than if every rank fetched all its replicas through host memory, and the result is
close to the optimum. (Our own: list scheduling, then best responses.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.kernels import kernel
from trimtab.planner.replicas.replica_table import ReplicaTable

PEER, HOST = 0, 1
SWEEPS = 2
FEMTOSECONDS = 1e15
# The cost of a disabled path: more than any link is ever busy, and far from the int64 limit.
NEVER = 1 << 62


class Links(NamedTuple):
    """Links of the ranks of a cluster. Costs are femtoseconds per byte, `NEVER` if disabled; all int64."""

    num_ranks: int
    ranks_per_node: int
    node_cost: int
    network_cost: int
    host_cost: int


def choose_paths(home_LE: Array, replicas: ReplicaTable, cluster: ClusterSpec) -> Array:
    """Returns the path of every replica of a plan.

    Args:
        home_LE: `[L, E]` int16.
        replicas: of all instances of a step.

    Returns:
        `[P]` uint8, `PEER` or `HOST`; with at most as many host experts on a node as its mirror holds.
    """
    ranks_P, experts_P = replicas.ranks, replicas.experts
    layer_P = layers_of_replicas(replicas.replica_starts, len(home_LE))
    home_P = home_LE[layer_P, experts_P]
    may_P = np.ones(len(ranks_P), np.bool_)
    paths_P: Array = _choose(replicas.replica_starts, home_P, ranks_P, links_of(cluster), may_P)
    if cluster.mirror_experts is not None:
        host = np.flatnonzero(paths_P == HOST)
        node_H = ranks_P[host].astype(np.int64) // cluster.ranks_per_node
        entry_H = layer_P[host] * home_LE.shape[1] + experts_P[host]
        paths_P[host[_beyond_mirror(node_H * home_LE.size + entry_H, home_LE.size, cluster.mirror_experts)]] = PEER
    return paths_P


def choose_given_mirrors(home_LE: Array, replicas: ReplicaTable, links: Links, mirrored_NLE: Array) -> Array:
    """As `choose_paths`, if the mirrors of nodes hold given experts.

    Args:
        mirrored_NLE: `[N, L, E]` bool.
    """
    layer_P = layers_of_replicas(replicas.replica_starts, len(home_LE))
    may_P = mirrored_NLE[replicas.ranks // links.ranks_per_node, layer_P, replicas.experts]
    home_P = home_LE[layer_P, replicas.experts]
    paths_P: Array = _choose(replicas.replica_starts, home_P, replicas.ranks, links, may_P)
    return paths_P


def links_of(cluster: ClusterSpec) -> Links:
    """The links of a cluster's ranks."""
    rates = cluster.node_bytes_per_s, cluster.network_bytes_per_s, cluster.host_bytes_per_s
    return Links(cluster.ranks, cluster.ranks_per_node, *(_cost(rate) for rate in rates))


def layers_of_replicas(replica_starts: Array, num_layers: int) -> Array:
    """The layer `[P]` int64 of every replica."""
    return np.repeat(np.arange(len(replica_starts) - 1), np.diff(replica_starts)) % num_layers


def _cost(bytes_per_s: float) -> int:
    """Femtoseconds per byte as an integer: decisions in integers are the same on every machine."""
    return round(FEMTOSECONDS / bytes_per_s) if bytes_per_s else NEVER


@kernel
def _choose(replica_starts, home_P, ranks_P, links, may_P):  # type: ignore[no-untyped-def]
    """The paths `[P]` uint8. Args: may_P: `[P]` bool, whether the replica may come from host memory."""
    num_ranks, ranks_per_node = links.num_ranks, links.ranks_per_node
    paths_P = np.empty(len(ranks_P), np.uint8)
    # Femtoseconds that links are busy, for each byte of an expert: [inside the node or between nodes, rank].
    out = np.zeros((2, num_ranks), np.int64)
    into = np.zeros((2, num_ranks), np.int64)
    from_host = np.zeros(num_ranks, np.int64)
    for i in range(len(replica_starts) - 1):
        first, end = replica_starts[i], replica_starts[i + 1]
        for sweep in range(SWEEPS):
            for p in range(first, end):
                home, rank = home_P[p], ranks_P[p]
                far = int(home // ranks_per_node != rank // ranks_per_node)
                peer_cost = links.network_cost if far else links.node_cost
                if sweep > 0:
                    if paths_P[p] == HOST:
                        from_host[rank] -= links.host_cost
                    else:
                        out[far, home] -= peer_cost
                        into[far, rank] -= peer_cost
                peer_s = max(out[far, home], into[far, rank]) + peer_cost
                if not may_P[p] or peer_s <= from_host[rank] + links.host_cost:
                    paths_P[p] = PEER
                    out[far, home] += peer_cost
                    into[far, rank] += peer_cost
                else:
                    paths_P[p] = HOST
                    from_host[rank] += links.host_cost
        for p in range(first, end):
            for far in range(2):
                out[far, home_P[p]] = 0
                into[far, ranks_P[p]] = 0
            from_host[ranks_P[p]] = 0
    return paths_P


def _beyond_mirror(entry_H: Array, entries_per_node: int, room: int) -> Array:
    """`[H]` bool, host replicas whose entry (one expert of one layer on one node) does not fit in the mirror.

    The entries that serve most replicas of their node are kept; among equals the lowest.
    """
    entry_N, number_H, served_N = np.unique(entry_H, return_inverse=True, return_counts=True)
    node_N = entry_N // entries_per_node
    order = np.lexsort((entry_N, -served_N, node_N))
    place_N = np.empty(len(order), np.int64)
    place_N[order] = np.arange(len(order)) - np.searchsorted(node_N, node_N[order])
    return np.asarray(place_N[number_H] >= room)
