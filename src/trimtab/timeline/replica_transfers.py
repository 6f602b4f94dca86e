"""Transfers of replicas: weights from home or host memory to the replica's rank, gradients back to the home.

Each rank has a link inside its node, one between nodes, and one from host memory. A link moves replicas at its whole
rate, and at the rate that is left while rows of an all-to-all use it. So it has a clock, which runs as fast as the link
moves replicas: the rank's time less the seconds that all-to-alls have taken from the link so far. By that clock a
transfer takes as long as it takes alone, whatever it meets.

A lane is one direction of one link of one rank, for weights or for gradients. Its transfers are moved one after
another. A transfer between two ranks is complete when the lanes of both have moved it. When that is, is found when it
matters, with the all-to-alls up to then. All-to-alls have priority and are not slowed down. A rank that sends weights
and gradients at the same time is not modelled. A transfer takes time from compute, too, on each of its ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.kernels import copy_values, kernel
from trimtab.timeline import recorded_operations as rec
from trimtab.timeline.clocks import wait

# Links of a rank: inside its node, between nodes, from host memory; int64, because numba compiles a function once more
# for every Python int. And the other rows of a moment, see `Transfers`.
NEAR, FAR, HOST, SECONDS, _, _, CALLED, TIME = np.arange(8)
# Of `Transfers.done`.
OF_WEIGHTS, OF_GRADIENTS = np.arange(2)
OUT, IN = np.arange(2)


class Copies(NamedTuple):
    """Replicas by instance or, if they are kept for the step, by layer.

    Attributes:
        starts: `[I + 1]` int64; replicas of i are from `starts[i]` to `starts[i + 1]`.
        homes_P, ranks_P: `[P]` int64, home and rank in the group.
        links_P: `[P]` int64, the link that weights arrive over, of the replica's rank.
        back_P: `[P]` int64, the link of gradients.
    """

    starts: Array
    homes_P: Array
    ranks_P: Array
    links_P: Array
    back_P: Array

    @classmethod
    def of(cls, starts: Array, homes_P: Array, ranks_P: Array, from_host_P: Array, ranks_per_node: int) -> Copies:
        """Replicas by whether their weights are from host memory; so many neighbouring ranks share a node."""
        homes_P, ranks_P = homes_P.astype(np.int64), ranks_P.astype(np.int64)
        back_P = np.where(homes_P // ranks_per_node == ranks_P // ranks_per_node, NEAR, FAR)
        return cls(starts, homes_P, ranks_P, np.where(from_host_P, HOST, back_P), back_P)


class Transfers(NamedTuple):
    """Transfers in progress in G groups of R ranks.

    A *moment* is `[8, R]` float64 of each rank: in the row of a link the seconds that all-to-alls but the last had
    taken from it; in `SECONDS` + link those in which the rows of the last use it; `CALLED`, when that began; `TIME`.

    Attributes:
        weights_s, gradient_s: `[3]` seconds of one expert over each link.
        tax: the part of a transfer's seconds that it takes from compute.
        taxed_GR: `[G, R]` seconds that transfers take from the next compute.
        taken: `[3]`, the part of each link that an all-to-all takes.
        now_G8R: the present moment; its `TIME` is set where it is needed.
        done: `[2, 2, G, 3, R]`, of weights and gradients, `OUT` and `IN`: by each link's clock, when all transfers so
            far are done.
        sent_P, came_P: `[P]`, when a replica's gradient has left its rank and reached the home, by their links' clocks.
        arrival_GR: `[G, R]`, when the weights that a rank needs next have arrived.
        returning_GS: `[G, S]` int64, the last S instances with replicas in this backward, which share slots.
        kept_GL: `[G, L]` bool, whether the arrival of a layer's kept copies is known.
        kept_from_G8R: the moment from which kept copies may be transferred.
        kept_by_GLR: `[G, L, R]`, when they have arrived.
        computed_GL8R: the moments when ranks had computed a layer's experts in the last backward, if copies are kept.
    """

    copies: Copies
    weights_s: Array
    gradient_s: Array
    tax: float
    taxed_GR: Array
    taken: Array
    now_G8R: Array
    done: Array
    sent_P: Array
    came_P: Array
    arrival_GR: Array
    returning_GS: Array
    kept_GL: Array
    kept_from_G8R: Array
    kept_by_GLR: Array
    computed_GL8R: Array

    @classmethod
    def none(
        cls, copies: Copies, costs: OperationCosts, shape_GLR: tuple[int, int, int], places: int, *, keeps: bool
    ) -> Transfers:
        """The state before a step.

        Args:
            shape_GLR: groups, layers and ranks of a group.
            places: layers with copies in shared slots at the same time.
            keeps: whether copies are kept for the step.
        """
        groups, layers, ranks = shape_GLR
        kept_layers = layers if keeps else 0
        return cls(
            copies,
            weights_s=np.array([costs.near_weights_s, costs.far_weights_s, costs.host_weights_s]),
            gradient_s=np.array([costs.near_gradient_s, costs.far_gradient_s, 0.0]),
            tax=costs.transfer_tax,
            taxed_GR=np.zeros((groups, ranks)),
            taken=np.array([1.0 - costs.near_spare, 1.0 - costs.far_spare, 0.0]),
            now_G8R=np.zeros((groups, 8, ranks)),
            done=np.zeros((2, 2, groups, 3, ranks)),
            sent_P=np.zeros(len(copies.ranks_P)),
            came_P=np.zeros(len(copies.ranks_P)),
            arrival_GR=np.zeros((groups, ranks)),
            returning_GS=np.zeros((groups, places), np.int64),
            kept_GL=np.zeros((groups, kept_layers), np.bool_),
            kept_from_G8R=np.zeros((groups, 8, ranks)),
            kept_by_GLR=np.zeros((groups, kept_layers, ranks)),
            computed_GL8R=np.zeros((groups, kept_layers, 8, ranks)),
        )

    def renew_weights(self, time_s: float) -> None:
        """Weights are new, so that kept copies have to be transferred again, from this time on."""
        self.kept_GL[:] = False
        self.kept_from_G8R[:] = self.now_G8R
        self.kept_from_G8R[:, TIME] = time_s

    def lost(self) -> Array:
        """`[3, D]` seconds that all-to-alls have taken from the links of each rank."""
        lost_G3R = self.now_G8R[:, :SECONDS] + self.taken[:, None] * self.now_G8R[:, SECONDS:CALLED]
        return lost_G3R.swapaxes(0, 1).reshape(len(self.taken), -1)


@kernel
def returned_by(transfers):  # type: ignore[no-untyped-def]
    """`[G, R]`, when all gradients that a rank sends or gets have been moved, if no all-to-all begins before."""
    _, _, groups, links, ranks = transfers.done.shape
    returned_GR = np.zeros((groups, ranks))
    for way in range(2):
        for g in range(groups):
            for link in range(links):
                for r in range(ranks):
                    clock = transfers.done[OF_GRADIENTS, way, g, link, r]
                    until = _time_at(transfers.taken, transfers.now_G8R[g], link, r, clock)
                    returned_GR[g, r] = max(returned_GR[g, r], until)
    return returned_GR


@kernel
def note_moment(now_8R, time_R, moment_8R):  # type: ignore[no-untyped-def]
    """Write the present moment of a group's ranks."""
    for row in range(TIME):
        for r in range(len(time_R)):
            moment_8R[row, r] = now_8R[row, r]
    for r in range(len(time_R)):
        moment_8R[TIME, r] = time_R[r]


@kernel
def pay_tax(transfers, clocks, g, layer):  # type: ignore[no-untyped-def]
    """The ranks of a group take the time that their transfers have taken from compute."""
    taxed_R = transfers.taxed_GR[g]
    for r in range(len(taxed_R)):
        if taxed_R[r] > 0.0:
            d = g * len(taxed_R) + r
            wait(clocks, d, clocks.time_D[d] + taxed_R[r], layer)
            taxed_R[r] = 0.0


@kernel
def call(taken, now_8R, r, time, near_s, far_s):  # type: ignore[no-untyped-def]
    """Note that an all-to-all of a rank begins, with the seconds of its rows inside the node and between nodes."""
    now_8R[NEAR, r] += taken[NEAR] * now_8R[SECONDS + NEAR, r]
    now_8R[FAR, r] += taken[FAR] * now_8R[SECONDS + FAR, r]
    now_8R[SECONDS + NEAR, r], now_8R[SECONDS + FAR, r] = near_s, far_s
    now_8R[CALLED, r] = time


@kernel
def _clock_at(taken, moment_8R, link, r, time):  # type: ignore[no-untyped-def]
    """What the clock of a link shows at a time."""
    used = min(max(0.0, time - moment_8R[CALLED, r]), moment_8R[SECONDS + link, r])
    return time - moment_8R[link, r] - taken[link] * used


@kernel
def _time_at(taken, moment_8R, link, r, clock):  # type: ignore[no-untyped-def]
    """The first time at which the clock of a link shows a value, if no other all-to-all begins before."""
    seconds, called, time = moment_8R[SECONDS + link, r], moment_8R[CALLED, r], clock + moment_8R[link, r]
    if time <= called:
        return time
    spare = 1.0 - taken[link]
    if time - called <= spare * seconds:
        return called + (time - called) / spare
    return time + taken[link] * seconds


@kernel
def _record(clocks, kind, link, d, layer, own, other):  # type: ignore[no-untyped-def]
    """Record a transfer on a rank's link, with the columns of `recorded_operations`.

    Args:
        own: earliest start, and by the link's clock when it was free and when the transfer is done.
        other: the other rank, and when it is done there.
    """
    n = clocks.num_rows[0]
    if n < len(clocks.rows_NC):
        clocks.num_rows[0] = n + 1
        row = clocks.rows_NC[n]
        row[rec.KIND], row[rec.LANE], row[rec.RANK], row[rec.LAYER] = kind, rec.NODE_LANE + link, d, layer
        row[rec.START], row[rec.FREE], row[rec.END] = own
        row[rec.OTHER], row[rec.OTHER_END] = other


@kernel
def fetch(transfers, clocks, g, i, moment_8R, layer):  # type: ignore[no-untyped-def]
    """Weight transfers of an instance's or layer's copies, `copies.starts[i]` on. Each begins when its ranks have
    reached a moment. Updates `arrival_GR`: when weights arrive if no all-to-all begins before."""
    homes_P, ranks_P, links_P = transfers.copies.homes_P, transfers.copies.ranks_P, transfers.copies.links_P
    weights_s, taken, now_8R = transfers.weights_s, transfers.taken, transfers.now_G8R[g]
    arrival_R, taxed_R = transfers.arrival_GR[g], transfers.taxed_GR[g]
    tax, records = transfers.tax, len(clocks.rows_NC) > 0
    out_3R, in_3R = transfers.done[OF_WEIGHTS, OUT, g], transfers.done[OF_WEIGHTS, IN, g]
    for p in range(transfers.copies.starts[i], transfers.copies.starts[i + 1]):
        home, rank, link = homes_P[p], ranks_P[p], links_P[p]
        free, start, sent = in_3R[link, rank], moment_8R[TIME, rank], 0.0
        if link != HOST:
            start = max(start, moment_8R[TIME, home])
            sent = max(out_3R[link, home], _clock_at(taken, moment_8R, link, home, start)) + weights_s[link]
            out_3R[link, home] = sent
            taxed_R[home] += tax * weights_s[link]
            arrival_R[rank] = max(arrival_R[rank], _time_at(taken, now_8R, link, home, sent))
        came = max(free, _clock_at(taken, moment_8R, link, rank, start)) + weights_s[link]
        in_3R[link, rank] = came
        taxed_R[rank] += tax * weights_s[link]
        arrival_R[rank] = max(arrival_R[rank], _time_at(taken, now_8R, link, rank, came))
        if records and weights_s[link] > 0.0:
            first = g * len(arrival_R)
            other = first + home if link != HOST else np.int64(-1)
            _record(clocks, rec.WEIGHTS, link, first + rank, layer, (start, free, came), (other, sent))


@kernel
def fetch_kept(transfers, clocks, g, layer):  # type: ignore[no-untyped-def]
    """Weight transfers of a layer's kept copies after a change of weights; sets the group's `arrival_GR`."""
    kept_by_R, arrival_R = transfers.kept_by_GLR[g, layer], transfers.arrival_GR[g]
    if not transfers.kept_GL[g, layer]:
        transfers.kept_GL[g, layer] = True
        fetch(transfers, clocks, g, layer, transfers.kept_from_G8R[g], layer)
        copy_values(arrival_R, kept_by_R)
    copy_values(kept_by_R, arrival_R)


@kernel
def return_gradients(transfers, clocks, g, i, k, layer):  # type: ignore[no-untyped-def]
    """Transfers of the gradients of instance i's replicas.

    Args:
        k: number of the instance in this backward. With shared slots, homes first wait for the gradients that used its
            place before; -1 with unbounded memory.
    """
    copies, taken, returning_S = transfers.copies, transfers.taken, transfers.returning_GS[g]
    now_8R = transfers.now_G8R[g]
    ranks, place = now_8R.shape[1], k % len(returning_S)
    first = g * ranks
    if k >= len(returning_S):
        before = returning_S[place]
        for p in range(copies.starts[before], copies.starts[before + 1]):
            home, link = copies.homes_P[p], copies.back_P[p]
            sent = _time_at(taken, now_8R, link, copies.ranks_P[p], transfers.sent_P[p])
            came = _time_at(taken, now_8R, link, home, transfers.came_P[p])
            until = max(sent, came)
            if until > clocks.time_D[first + home]:
                wait(clocks, first + home, until, layer)
    returning_S[place] = i
    copy_values(clocks.time_D[first : first + ranks], now_8R[TIME])
    _return(transfers, clocks, g, i, now_8R, layer)


@kernel
def return_kept_gradients(transfers, clocks, g):  # type: ignore[no-untyped-def]
    """Transfers of kept copies' gradients after each layer; at the end of a backward, which they do not delay."""
    for layer in range(len(transfers.copies.starts) - 2, -1, -1):
        _return(transfers, clocks, g, layer, transfers.computed_GL8R[g, layer], layer)


@kernel
def _return(transfers, clocks, g, i, moment_8R, layer):  # type: ignore[no-untyped-def]
    """Transfers of the gradients of an instance's or layer's copies, each from a moment of its rank on."""
    homes_P, ranks_P, back_P = transfers.copies.homes_P, transfers.copies.ranks_P, transfers.copies.back_P
    sent_P, came_P, gradient_s, taken = transfers.sent_P, transfers.came_P, transfers.gradient_s, transfers.taken
    out_3R, in_3R = transfers.done[OF_GRADIENTS, OUT, g], transfers.done[OF_GRADIENTS, IN, g]
    taxed_R, tax, records = transfers.taxed_GR[g], transfers.tax, len(clocks.rows_NC) > 0
    for p in range(transfers.copies.starts[i], transfers.copies.starts[i + 1]):
        home, rank, link = homes_P[p], ranks_P[p], back_P[p]
        free, start = out_3R[link, rank], moment_8R[TIME, rank]
        sent_P[p] = max(free, _clock_at(taken, moment_8R, link, rank, start)) + gradient_s[link]
        came_P[p] = max(in_3R[link, home], _clock_at(taken, moment_8R, link, home, start)) + gradient_s[link]
        out_3R[link, rank], in_3R[link, home] = sent_P[p], came_P[p]
        taxed_R[rank] += tax * gradient_s[link]
        taxed_R[home] += tax * gradient_s[link]
        if records and gradient_s[link] > 0.0:
            first = g * moment_8R.shape[1]
            own = start, free, sent_P[p]
            _record(clocks, rec.GRADIENTS, link, first + rank, layer, own, (first + home, came_P[p]))
