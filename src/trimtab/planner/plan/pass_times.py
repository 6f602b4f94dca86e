"""Predicted time of forward and backward passes, by part: a short form of the simulator's timeline.

The ranks of a group wait for each other before every all-to-all. Weights of replicas arrive, and gradients return, over
the links of their ranks, one transfer after another; a transfer starts when a place of the ring is free. Each link has
a clock, which runs slowly while rows of an all-to-all use the link, and transfers are timed by it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.replicas.paths import HOST as IN_HOST_MEMORY

# Parts of a step's time, in the order in which bars are stacked.
PARTS = {
    "attention": "attention and other dense parts",
    "dispatch": "dispatch and combine",
    "experts": "experts, if all ranks had the same load",
    "imbalance": "waiting for the busiest rank",
    "transfers": "waiting for replicas and their gradients",
    "planning": "waiting for a plan",
    "migration": "moving homes and refreshing mirrors",
    "optimizer": "optimizer and gradient sums",
}
# Indices into `PARTS`; int64, because numba compiles a function once more for every Python int.
ATTENTION, DISPATCH, EXPERTS, IMBALANCE, TRANSFERS, PLANNING, MIGRATION, OPTIMIZER = np.arange(len(PARTS))
# Links of a rank: inside its node, between nodes, from host memory.
NEAR, FAR, HOST = np.arange(3)


class PassInput(NamedTuple):
    """The work of M micro-steps with L layers on R ranks.

    Attributes:
        attention_MR, outer_MR: `[M, R]` float64 seconds, forward of a layer's dense parts and of those outside layers.
        near_MLR, far_MLR: `[M, L, R]` float64 seconds in which rows of an all-to-all use the links.
        experts_MLR: `[M, L, R]` float64 seconds, forward.
        starts: `[M * L + 1]` int64, replicas of instance m * L + l are from `starts[m * L + l]` on.
        homes_P, ranks_P: `[P]` int64.
        paths_P: `[P]` uint8.
        ranks_per_node: neighbouring ranks that share a node.
        places: layers with replicas in shared slots at the same time.
    """

    attention_MR: Array
    outer_MR: Array
    near_MLR: Array
    far_MLR: Array
    experts_MLR: Array
    starts: Array
    homes_P: Array
    ranks_P: Array
    paths_P: Array
    ranks_per_node: int
    places: int


class Clocks(NamedTuple):
    """Clocks of R ranks, and what each did since they last waited for each other; `[R]` float64 each.

    Attributes:
        time: seconds.
        links: `[3, R]`, seconds in which each link could have moved replicas: `NEAR`, `FAR` and `HOST`.
        dispatch, experts, attention, waited: seconds since the last meeting.
        fetched: `[2, 3, R]`, when each link, out and in, has completed all weights so far, by its clock in `links`;
            `returned`: the same of gradients.
    """

    time: Array
    links: Array
    dispatch: Array
    experts: Array
    attention: Array
    waited: Array
    fetched: Array
    returned: Array


@kernel
def time_passes(given, costs, closes_M, parts_MBP):  # type: ignore[no-untyped-def]
    """Fill `parts_MBP` `[M, 2, P]` float64 with the seconds by part of each micro-step's forward and backward.

    Args:
        given: `PassInput`.
        costs: `OperationCosts`.
        closes_M: `[M]` bool, micro-steps after which the optimizer steps; their backward waits for all gradients.
    """
    num_micro_steps, _, num_ranks = given.experts_MLR.shape
    clocks = Clocks(
        np.zeros(num_ranks),
        np.zeros((3, num_ranks)),
        np.zeros(num_ranks),
        np.zeros(num_ranks),
        np.zeros(num_ranks),
        np.zeros(num_ranks),
        np.zeros((2, 3, num_ranks)),
        np.zeros((2, 3, num_ranks)),
    )
    for m in range(num_micro_steps):
        for backward in range(2):
            _one_pass(given, costs, clocks, m, backward == 1, parts_MBP[m, backward])
        if closes_M[m]:
            late = 0.0
            for way in range(2):
                for link in range(3):
                    for r in range(num_ranks):
                        late = max(late, clocks.returned[way, link, r] - clocks.links[link, r])
            parts_MBP[m, 1, TRANSFERS] += late


@kernel
def _one_pass(given, costs, clocks, m, backward, parts_P):  # type: ignore[no-untyped-def]
    """The layers of a micro-step, forward or backward, and the parts outside them."""
    num_layers, num_ranks = given.experts_MLR.shape[1:]
    dense, grouped = (costs.dense_backward, costs.expert_backward) if backward else (1.0, 1.0)
    # The links' clocks when the pass began, and when the ranks met before each instance with replicas.
    began = clocks.links.copy()
    met = np.empty((num_layers, 3, num_ranks))
    # Of the last instances, when a home has all their gradients, by the clock of its link between nodes.
    returned = np.zeros((given.places, num_ranks))
    wait_R = np.zeros(num_ranks)
    count = 0
    mean_attention = 0.0
    if backward:
        mean_attention += _dense(clocks, given.outer_MR[m], dense)
    for i in range(num_layers):
        layer = num_layers - 1 - i if backward else i
        if not backward:
            mean_attention += _dense(clocks, given.attention_MR[m], dense)
        _meet(clocks, mean_attention, 0.0, parts_P)
        mean_attention = 0.0
        instance = m * num_layers + layer
        first, end = given.starts[instance], given.starts[instance + 1]
        if end > first:
            for link in range(3):
                for r in range(num_ranks):
                    met[count, link, r] = clocks.links[link, r]
        _all_to_all(clocks, given, m, layer, costs)
        if end > first and (not backward or count >= given.places):
            released = began if count < given.places else met[count - given.places + 1]
            wait_R[:] = 0.0
            for p in range(first, end):
                rank = given.ranks_P[p]
                wait_R[rank] = max(wait_R[rank], _fetch(given, costs, clocks, p, released))
            for r in range(num_ranks):
                _wait(clocks, r, wait_R[r])
        mean_experts = 0.0
        for r in range(num_ranks):
            seconds = grouped * given.experts_MLR[m, layer, r]
            clocks.experts[r] += seconds
            mean_experts += seconds
            _advance(clocks, r, seconds)
        if backward and end > first:
            place = count % given.places
            if count >= given.places:
                for p in range(first, end):
                    home = given.homes_P[p]
                    _wait(clocks, home, returned[place, home] - clocks.links[FAR, home])
            returned[place] = 0.0
            for p in range(first, end):
                home = given.homes_P[p]
                late = _return(given, costs, clocks, p)
                returned[place, home] = max(returned[place, home], clocks.links[FAR, home] + late)
        if end > first:
            count += 1
        _meet(clocks, 0.0, mean_experts / num_ranks, parts_P)
        _all_to_all(clocks, given, m, layer, costs)
        if backward:
            mean_attention += _dense(clocks, given.attention_MR[m], dense)
    if not backward:
        mean_attention += _dense(clocks, given.outer_MR[m], dense)
    _meet(clocks, mean_attention, 0.0, parts_P)


@kernel
def _advance(clocks, r, seconds):  # type: ignore[no-untyped-def]
    """A rank spends time in which its links are free."""
    clocks.time[r] += seconds
    for link in range(3):
        clocks.links[link, r] += seconds


@kernel
def _dense(clocks, seconds_R, factor):  # type: ignore[no-untyped-def]
    """Dense parts; returns their mean over ranks."""
    mean = 0.0
    for r in range(len(seconds_R)):
        clocks.attention[r] += factor * seconds_R[r]
        mean += factor * seconds_R[r] / len(seconds_R)
        _advance(clocks, r, factor * seconds_R[r])
    return mean


@kernel
def _all_to_all(clocks, given, m, layer, costs):  # type: ignore[no-untyped-def]
    """Rows use the links; what they leave is `near_spare` and `far_spare`."""
    for r in range(len(clocks.time)):
        near_s, far_s = given.near_MLR[m, layer, r], given.far_MLR[m, layer, r]
        seconds = costs.dispatch_s + max(near_s, far_s)
        clocks.dispatch[r] += seconds
        clocks.time[r] += seconds
        clocks.links[NEAR, r] += seconds - (1.0 - costs.near_spare) * near_s
        clocks.links[FAR, r] += seconds - (1.0 - costs.far_spare) * far_s
        clocks.links[HOST, r] += seconds


@kernel
def _wait(clocks, r, seconds):  # type: ignore[no-untyped-def]
    if seconds > 0.0:
        clocks.waited[r] += seconds
        _advance(clocks, r, seconds)


@kernel
def _meet(clocks, mean_attention, mean_experts, parts_P):  # type: ignore[no-untyped-def]
    """All ranks wait for the latest one, whose time since they last met counts by part."""
    latest = 0
    for r in range(len(clocks.time)):
        if clocks.time[r] > clocks.time[latest]:
            latest = r
    parts_P[DISPATCH] += clocks.dispatch[latest]
    parts_P[TRANSFERS] += clocks.waited[latest]
    parts_P[ATTENTION] += mean_attention
    parts_P[EXPERTS] += mean_experts
    parts_P[IMBALANCE] += clocks.attention[latest] - mean_attention + clocks.experts[latest] - mean_experts
    now = clocks.time[latest]
    for r in range(len(clocks.time)):
        _advance(clocks, r, now - clocks.time[r])
        clocks.dispatch[r] = clocks.waited[r] = clocks.attention[r] = clocks.experts[r] = 0.0


@kernel
def _fetch(given, costs, clocks, p, released):  # type: ignore[no-untyped-def]
    """Transfer of one replica's weights; returns the seconds until they have arrived.

    Args:
        released: `[3, R]`, the links' clocks when it may begin.
    """
    home, rank = given.homes_P[p], given.ranks_P[p]
    if given.paths_P[p] == IN_HOST_MEMORY:
        arrival_R = clocks.fetched[1, HOST]
        arrival_R[rank] = max(arrival_R[rank], released[HOST, rank]) + costs.host_weights_s
        return arrival_R[rank] - clocks.links[HOST, rank]
    near = home // given.ranks_per_node == rank // given.ranks_per_node
    link, seconds = (NEAR, costs.near_weights_s) if near else (FAR, costs.far_weights_s)
    sent_R, arrival_R = clocks.fetched[0, link], clocks.fetched[1, link]
    sent_R[home] = max(sent_R[home], released[link, home]) + seconds
    arrival_R[rank] = max(arrival_R[rank], released[link, rank]) + seconds
    return max(sent_R[home] - clocks.links[link, home], arrival_R[rank] - clocks.links[link, rank])


@kernel
def _return(given, costs, clocks, p):  # type: ignore[no-untyped-def]
    """Transfer of one replica's gradient to its home; returns the seconds until it has arrived."""
    home, rank = given.homes_P[p], given.ranks_P[p]
    near = home // given.ranks_per_node == rank // given.ranks_per_node
    link, seconds = (NEAR, costs.near_gradient_s) if near else (FAR, costs.far_gradient_s)
    sent_R, arrival_R = clocks.returned[0, link], clocks.returned[1, link]
    sent_R[rank] = max(sent_R[rank], clocks.links[link, rank]) + seconds
    arrival_R[home] = max(arrival_R[home], clocks.links[link, home]) + seconds
    return max(sent_R[rank] - clocks.links[link, rank], arrival_R[home] - clocks.links[link, home])
