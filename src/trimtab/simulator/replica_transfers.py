"""Transfers of replicas: weights from home or host memory to the replica's rank, gradients back to the home."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.kernels import copy_values, kernel
from trimtab.planner.replicas.paths import HOST
from trimtab.simulator import recorded_operations as rec
from trimtab.simulator.clocks import record, wait
from trimtab.simulator.links import (
    FAR_IN,
    FAR_OUT,
    GRADIENTS,
    HOST_IN,
    NEAR_IN,
    NEAR_OUT,
    Links,
    idle_links,
    serve,
    transfer,
)


class Copies(NamedTuple):
    """Replicas by instance or, if they are kept for the step, by layer.

    Attributes:
        starts: `[I + 1]` int64; replicas of i are from `starts[i]` to `starts[i + 1]`.
        homes_P, ranks_P: `[P]` int64, home and rank in the group.
        paths_P: `[P]` uint8, `PEER` or `HOST`.
    """

    starts: Array
    homes_P: Array
    ranks_P: Array
    paths_P: Array


class Transfers(NamedTuple):
    """Transfers in progress between D ranks of G groups.

    Attributes:
        ranks_per_node: neighbouring ranks that share a node.
        arrival_D: `[D]` float64, when the weights that a rank needs next have arrived.
        returned_D: `[D]` float64, when all gradients sent so far have arrived at this home.
        returning_SD: `[S, D]` float64, the same for the last S instances, which share slots.
        kept_from_GL: `[G, L]` float64, earliest start of transfers of kept copies; -1 when their arrival is known.
        kept_by_GLR: `[G, L, R]` float64, when they have arrived.
        done_by_GLR: `[G, L, R]` float64, when ranks have completed a layer's experts in the last backward.
    """

    copies: Copies
    costs: OperationCosts
    links: Links
    ranks_per_node: int
    arrival_D: Array
    returned_D: Array
    returning_SD: Array
    kept_from_GL: Array
    kept_by_GLR: Array
    done_by_GLR: Array

    @classmethod
    def none(
        cls, copies: Copies, costs: OperationCosts, ranks_per_node: int, shape_GLR: tuple[int, int, int], places: int
    ) -> Transfers:
        """Returns the state before a step.

        Args:
            shape_GLR: groups, layers and ranks of a group.
            places: layers with copies in shared slots at the same time.
        """
        num_groups, num_layers, ranks = shape_GLR
        all_ranks = num_groups * ranks
        return cls(
            copies,
            costs,
            idle_links(all_ranks, num_layers),
            ranks_per_node,
            arrival_D=np.zeros(all_ranks),
            returned_D=np.zeros(all_ranks),
            returning_SD=np.zeros((places, all_ranks)),
            kept_from_GL=np.zeros((num_groups, num_layers)),
            kept_by_GLR=np.zeros(shape_GLR),
            done_by_GLR=np.zeros(shape_GLR),
        )


@kernel
def fetch(transfers, clocks, i, first, release, layer):  # type: ignore[no-untyped-def]
    """Starts weight transfers of an instance's or layer's copies, `copies.starts[i]` on; updates `arrival_D`.

    Args:
        first: first rank of the group.
        release: earliest start.
    """
    copies, costs, links = transfers.copies, transfers.costs, transfers.links
    for p in range(copies.starts[i], copies.starts[i + 1]):
        home, rank = first + copies.homes_P[p], first + copies.ranks_P[p]
        if copies.paths_P[p] == HOST:
            lane, since = rec.HOST_LANE, max(links.free[HOST_IN, rank], release)
            until = serve(links, HOST_IN, rank, release, costs.host_weights_s, 1.0)
        elif home // transfers.ranks_per_node == rank // transfers.ranks_per_node:
            lane, since = rec.NODE_LANE, max(links.free[NEAR_IN, rank], release)
            until = transfer(links, NEAR_OUT, (home, rank), release, costs.near_weights_s, costs.near_spare)
        else:
            lane, since = rec.NETWORK_LANE, max(links.free[FAR_IN, rank], release)
            until = transfer(links, FAR_OUT, (home, rank), release, costs.far_weights_s, costs.far_spare)
        record(clocks, rec.WEIGHTS, lane, rank, layer, (since, until))
        transfers.arrival_D[rank] = max(transfers.arrival_D[rank], until)


@kernel
def fetch_kept(transfers, clocks, g, layer):  # type: ignore[no-untyped-def]
    """Starts weight transfers of a layer's kept copies after a change of weights; sets the group's `arrival_D`.

    Completion is computed when first needed: only then the all-to-alls on their links are known.
    """
    kept_by_R, release = transfers.kept_by_GLR[g, layer], transfers.kept_from_GL[g, layer]
    first = g * len(kept_by_R)
    arrival_R = transfers.arrival_D[first : first + len(kept_by_R)]
    if release >= 0.0:
        fetch(transfers, clocks, layer, first, release, layer)
        transfers.kept_from_GL[g, layer] = -1.0
        copy_values(arrival_R, kept_by_R)
    copy_values(kept_by_R, arrival_R)


@kernel
def return_gradients(transfers, clocks, i, first, k, layer):  # type: ignore[no-untyped-def]
    """Starts transfers of the gradients of instance i's replicas.

    Args:
        first: first rank of the group.
        k: number of the instance in this pass. With shared slots, homes first wait for the gradients that used its
            place before; -1 with unbounded memory.
    """
    copies = transfers.copies
    returning_D = transfers.returning_SD[k % len(transfers.returning_SD)]
    if k >= len(transfers.returning_SD):
        for p in range(copies.starts[i], copies.starts[i + 1]):
            home = first + copies.homes_P[p]
            wait(clocks, home, returning_D[home], layer)
    returning_D[first : first + transfers.kept_by_GLR.shape[2]] = 0.0
    for p in range(copies.starts[i], copies.starts[i + 1]):
        home = first + copies.homes_P[p]
        arrival = _return(transfers, clocks, p, first, clocks.time_D[first + copies.ranks_P[p]], layer)
        returning_D[home] = max(returning_D[home], arrival)


@kernel
def return_kept_gradients(transfers, clocks, g):  # type: ignore[no-untyped-def]
    """Starts transfers of kept copies' gradients after each layer; computed when the pass's all-to-alls are known."""
    copies = transfers.copies
    for layer in range(len(copies.starts) - 2, -1, -1):
        for p in range(copies.starts[layer], copies.starts[layer + 1]):
            done_R = transfers.done_by_GLR[g, layer]
            _return(transfers, clocks, p, g * len(done_R), done_R[copies.ranks_P[p]], layer)


@kernel
def _return(transfers, clocks, p, first, release, layer):  # type: ignore[no-untyped-def]
    """Starts the transfer of one replica's gradient. Returns the time of its arrival."""
    copies, costs, links = transfers.copies, transfers.costs, transfers.links
    home, rank = first + copies.homes_P[p], first + copies.ranks_P[p]
    if home // transfers.ranks_per_node == rank // transfers.ranks_per_node:
        lane, shown, work, spare = GRADIENTS + NEAR_OUT, rec.NODE_LANE, costs.near_gradient_s, costs.near_spare
    else:
        lane, shown, work, spare = GRADIENTS + FAR_OUT, rec.NETWORK_LANE, costs.far_gradient_s, costs.far_spare
    since = max(links.free[lane, rank], release)
    until = transfer(links, lane, (rank, home), release, work, spare)
    record(clocks, rec.GRADIENTS, shown, rank, layer, (since, until))
    transfers.returned_D[home] = max(transfers.returned_D[home], until)
    return until
