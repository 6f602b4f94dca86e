"""The event simulation: every rank's operations one after another, the ranks meeting where they do, transfers beside.

The ranks of an expert-parallel group meet before every all-to-all; each goes on when its own rows are through. Weights
and gradients of replicas travel over the links meanwhile (`links.py`). Every rank carries the parts of its time so far;
where ranks meet, all take over those of the last to come. So in the end the parts are those of the critical path, and
add up to the step.

Recompute runs all micro-steps forward. Then each mini-batch runs its micro-steps forward and backward, the gradients
come home, and the optimizer steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from trimtab.simulator import events as ev
from trimtab.simulator.events import Events, note
from trimtab.simulator.links import (
    FAR_IN,
    FAR_OUT,
    GRADIENTS,
    HOST_IN,
    NEAR_IN,
    NEAR_OUT,
    Links,
    idle_links,
    occupy,
    serve,
)
from trimtab.trace.routing import Array

# What a step's time goes to.
PARTS = ("attention", "dispatch", "experts", "imbalance", "transfers", "planning", "migration", "optimizer")
ATTENTION, DISPATCH, EXPERTS, IMBALANCE, TRANSFERS, PLANNING, MIGRATION, OPTIMIZER = range(8)
# Where copies are kept: nowhere, in places that layers share, for the whole step, or as long as need be.
NONE, SHARED, KEPT, UNBOUNDED = range(4)
# When their weights may start: once weights are new, when the micro-step begins, or after the layer's router.
AT_STEP, AT_MICRO_STEP, AT_LAYER = range(3)
# Who plans from live routing knows the plan in backward, and brings weights one layer ahead.
PLACES_IN_LIVE_BACKWARD = 2
# `paths` of a replica whose weights come from host memory; see `planner/paths.py`.
HOST_PATH = 1


class Rounds(NamedTuple):
    """Which micro-step each of G groups runs in each of Q rounds.

    Attributes:
        order_QG: `[Q, G]` int64, -1 for none.
        mini_batch_Q: `[Q]` int64, rising.
        closes_QG: `[Q, G]` bool, is it the group's last of its mini-batch?
    """

    order_QG: Array
    mini_batch_Q: Array
    closes_QG: Array


class Work(NamedTuple):
    """Seconds of one forward: `[M, R]` of a MoE layer's dense parts and of all that is outside; see also `RankWork`."""

    attention_MR: Array
    outer_MR: Array
    experts_MLR: Array
    moved_MLR: Array
    near_MLR: Array
    far_MLR: Array
    hop_MLR: Array


class Copies(NamedTuple):
    """Replicas by instance or by layer: `starts [I + 1]`; homes and ranks in the group, and paths, `[P]` int64."""

    starts: Array
    homes: Array
    ranks: Array
    paths: Array


class Costs(NamedTuple):
    """Seconds, as in `OperationCosts`; and of refreshing the mirrors once."""

    near_weights_s: float
    far_weights_s: float
    host_weights_s: float
    near_gradient_s: float
    far_gradient_s: float
    near_spare: float
    far_spare: float
    dense_backward: float
    expert_backward: float
    dispatch_s: float
    optimizer_s: float
    reduce_s: float
    refresh_s: float


class Recipe(NamedTuple):
    """How a balancer goes about it.

    Attributes:
        store: where copies are kept.
        start: when their weights may start.
        places: layers that shared copies are kept for at a time.
        hops: 2 if moved tokens first travel to the home rank.
        planning_s: of one layer, where that is planned live; else 0.
        waits_first: must weights be there before tokens leave?
    """

    store: int
    start: int
    places: int
    hops: int
    planning_s: float
    waits_first: bool


class Groups(NamedTuple):
    """Expert-parallel groups: ranks of each, ranks of a node, and whether groups meet in every layer."""

    ranks: int
    ranks_per_node: int
    meet_in_layers: bool


class State(NamedTuple):
    """Where the ranks are, D of all groups.

    Attributes:
        time: `[D]` float64 seconds.
        parts: `[D, 8]` float64, what each rank's time went to.
        arrival: `[D]` float64, when the weights that are being brought are all there.
        begin: `[G]` float64, when the group's pass over the layers began.
        passed: `[G]` int64, instances with replicas in this pass so far.
        met: `[G, L]` float64, when the ranks met in each of them.
        home_by: `[D]` float64, when all gradients sent so far are at this home.
        under_way: `[places, D]` float64, the same for the instances that may be under way at a time.
        kept_from: `[G, L]` float64, when copies that stay may set out; -1 once it is known when they come.
        kept_by: `[G, L, R]` float64, when they are there.
        done_by: `[G, L, R]` float64, when ranks are done with a layer of the mini-batch's last backward.
        links: of all ranks.
    """

    time: Array
    parts: Array
    arrival: Array
    begin: Array
    passed: Array
    met: Array
    home_by: Array
    under_way: Array
    kept_from: Array
    kept_by: Array
    done_by: Array
    links: Links


class Run(NamedTuple):
    """All that a simulation is made of. `replicas` are by instance, `kept` by layer."""

    work: Work
    replicas: Copies
    kept: Copies
    costs: Costs
    recipe: Recipe
    groups: Groups
    events: Events
    state: State


@numba.njit(cache=True, nogil=True)
def run_step(rounds, work, replicas, kept, costs, recipe, groups, events, shown_round):  # type: ignore[no-untyped-def]
    """Run a step.

    Args:
        shown_round: whose update is written to `events`; -1 for none.

    Returns:
        Seconds of the step, and its parts `[8]` float64.
    """
    num_rounds, num_groups = rounds.order_QG.shape
    num_layers = work.experts_MLR.shape[1]
    num_ranks = num_groups * groups.ranks
    state = State(
        np.zeros(num_ranks),
        np.zeros((num_ranks, len(PARTS))),
        np.zeros(num_ranks),
        np.zeros(num_groups),
        np.zeros(num_groups, np.int64),
        np.zeros((num_groups, num_layers)),
        np.zeros(num_ranks),
        np.zeros((recipe.places, num_ranks)),
        np.zeros((num_groups, num_layers)),
        np.zeros((num_groups, num_layers, groups.ranks)),
        np.zeros((num_groups, num_layers, groups.ranks)),
        idle_links(num_ranks, num_layers),
    )
    run = Run(work, replicas, kept, costs, recipe, groups, events, state)
    time, parts = state.time, state.parts
    for q in range(num_rounds):
        _forward(run, rounds.order_QG[q])
    for q in range(num_rounds):
        if q > 0 and rounds.mini_batch_Q[q] != rounds.mini_batch_Q[q - 1]:
            state.kept_from[:] = time.min()
        events.shown[0] = q == shown_round
        if events.shown[0]:
            events.origin[0] = time.min()
        _forward(run, rounds.order_QG[q])
        before = time.max()
        _backward(run, rounds.order_QG[q], rounds.closes_QG[q])
        events.shown[0] = False
        is_last = q == num_rounds - 1
        if not is_last and rounds.mini_batch_Q[q] == rounds.mini_batch_Q[q + 1]:
            continue
        for d in range(num_ranks):
            _wait(run, d, state.home_by[d], -1)
        _meet(run, 0, num_ranks)
        # Sums of dense gradients run beside the last backward.
        optimizer_s = max(0.0, costs.reduce_s - (time[0] - before)) + costs.optimizer_s
        refresh_s = 0.0 if is_last else costs.refresh_s
        for d in range(num_ranks):
            time[d] += optimizer_s + refresh_s
            parts[d, OPTIMIZER] += optimizer_s
            parts[d, MIGRATION] += refresh_s
    return time[0], parts[0]


@numba.njit(cache=True, nogil=True)
def _forward(run, order_G):  # type: ignore[no-untyped-def]
    """All layers of one round's micro-steps, and what is outside them."""
    _begin(run, order_G)
    for layer in range(run.work.experts_MLR.shape[1]):
        if run.groups.meet_in_layers:
            _meet(run, 0, len(run.state.time))
        for g in range(len(order_G)):
            m = order_G[g]
            if m >= 0:
                _compute(run, g, run.work.attention_MR[m], 1.0, ATTENTION, ev.ATTENTION, layer)
                _moe_layer(run, g, m, layer, False)
    for g in range(len(order_G)):
        if order_G[g] >= 0:
            _compute(run, g, run.work.outer_MR[order_G[g]], 1.0, ATTENTION, ev.HEAD, -1)


@numba.njit(cache=True, nogil=True)
def _backward(run, order_G, closes_G):  # type: ignore[no-untyped-def]
    """The same backward. Copies that stay for the step send their gradients home in the mini-batch's last one."""
    factor = run.costs.dense_backward
    _begin(run, order_G)
    for g in range(len(order_G)):
        if order_G[g] >= 0:
            _compute(run, g, run.work.outer_MR[order_G[g]], factor, ATTENTION, ev.HEAD, -1)
    for layer in range(run.work.experts_MLR.shape[1] - 1, -1, -1):
        if run.groups.meet_in_layers:
            _meet(run, 0, len(run.state.time))
        for g in range(len(order_G)):
            m = order_G[g]
            if m < 0:
                continue
            _moe_layer(run, g, m, layer, True)
            run.state.done_by[g, layer] = run.state.time[g * run.groups.ranks : (g + 1) * run.groups.ranks]
            _compute(run, g, run.work.attention_MR[m], factor, ATTENTION, ev.ATTENTION, layer)
    for g in range(len(order_G)):
        if closes_G[g] and run.recipe.store == KEPT:
            _send_kept_home(run, g)


@numba.njit(cache=True, nogil=True)
def _begin(run, order_G):  # type: ignore[no-untyped-def]
    ranks = run.groups.ranks
    for g in range(len(order_G)):
        run.state.begin[g] = run.state.time[g * ranks : (g + 1) * ranks].min()
        run.state.passed[g] = 0


@numba.njit(cache=True, nogil=True)
def _moe_layer(run, g, m, layer, backward):  # type: ignore[no-untyped-def]
    """Dispatch, experts and combine of one instance, or their backward."""
    work, recipe, state = run.work, run.recipe, run.state
    first, last = g * run.groups.ranks, (g + 1) * run.groups.ranks
    instance = m * work.experts_MLR.shape[1] + layer
    has_replicas = run.replicas.starts[instance + 1] > run.replicas.starts[instance]
    is_brought = has_replicas and (recipe.store == SHARED or recipe.store == UNBOUNDED)
    if recipe.hops == 1 and not backward:
        _plan(run, first, last, layer)
    _meet(run, first, last)
    k = state.passed[g]
    if is_brought:
        state.met[g, k] = state.time[first]
        state.passed[g] += 1
    release = _release(run, g, k, backward)
    # The last instances of forward are still in their places; copies without bounds all are.
    is_there = backward and (recipe.store == UNBOUNDED or k < recipe.places)
    waits_first = recipe.waits_first and not backward
    state.arrival[first:last] = 0.0
    if is_brought and not is_there and waits_first:
        _bring(run, first, run.replicas, instance, release, layer)
        for d in range(first, last):
            _wait(run, d, state.arrival[d], layer)
        _meet(run, first, last)
    _all_to_all(run, g, m, layer, ev.COMBINE if backward else ev.DISPATCH)
    if recipe.hops == 2 and not backward:
        # Planned beside the experts that stay.
        release = state.time[first:last].max()
        note(run.events, ev.PLANNING, ev.CPU_LANE, first, layer, release, release + recipe.planning_s)
        release += recipe.planning_s
    if is_brought and not is_there and not waits_first:
        _bring(run, first, run.replicas, instance, release, layer)
    if recipe.store == KEPT:
        _bring_kept(run, g, layer)
    if recipe.hops == 2:
        _compute_in_two_hops(run, g, m, layer, release, backward)
    else:
        for d in range(first, last):
            _wait(run, d, state.arrival[d], layer)
        factor = run.costs.expert_backward if backward else 1.0
        _compute(run, g, work.experts_MLR[m, layer], factor, EXPERTS, ev.EXPERTS, layer)
    if backward and is_brought:
        _send_instance_home(run, g, instance, k, layer)
    _meet(run, first, last)
    _all_to_all(run, g, m, layer, ev.DISPATCH if backward else ev.COMBINE)


@numba.njit(cache=True, nogil=True)
def _plan(run, first, last, layer):  # type: ignore[no-untyped-def]
    """The layer's counts are known; all wait for its plan."""
    planning_s = run.recipe.planning_s
    if planning_s > 0.0:
        _meet(run, first, last)
        for d in range(first, last):
            time = run.state.time[d]
            note(run.events, ev.PLANNING, ev.CPU_LANE, d, layer, time, time + planning_s)
            run.state.time[d] += planning_s
            run.state.parts[d, PLANNING] += planning_s


@numba.njit(cache=True, nogil=True)
def _release(run, g, k, backward):  # type: ignore[no-untyped-def]
    """When the weights of a pass's k-th instance with replicas may start: as soon as there is a place for them."""
    state, recipe = run.state, run.recipe
    is_live = recipe.start == AT_LAYER
    if is_live and not backward:
        return state.time[g * run.groups.ranks]
    places = PLACES_IN_LIVE_BACKWARD if is_live else recipe.places
    return state.begin[g] if k < places else state.met[g, k - (places - 1)]


@numba.njit(cache=True, nogil=True)
def _compute(run, g, seconds_R, factor, part, kind, layer):  # type: ignore[no-untyped-def]
    """Every rank of a group computes. What exceeds the mean is imbalance."""
    mean_s = factor * seconds_R.mean()
    for r in range(run.groups.ranks):
        d = g * run.groups.ranks + r
        own_s, time = factor * seconds_R[r], run.state.time[d]
        note(run.events, kind, ev.COMPUTE_LANE, d, layer, time, time + own_s)
        run.state.time[d] += own_s
        run.state.parts[d, part] += mean_s
        run.state.parts[d, IMBALANCE] += own_s - mean_s


@numba.njit(cache=True, nogil=True)
def _compute_in_two_hops(run, g, m, layer, release, backward):  # type: ignore[no-untyped-def]
    """Experts that stay compute while others and their rows move on inside the node; what they yield goes back."""
    state, work = run.state, run.work
    factor = run.costs.expert_backward if backward else 1.0
    stay_R, moved_R, hop_R = work.experts_MLR[m, layer], work.moved_MLR[m, layer], work.hop_MLR[m, layer]
    mean_s = factor * (stay_R.mean() + moved_R.mean())
    for r in range(run.groups.ranks):
        d = g * run.groups.ranks + r
        stay_s, moved_s, hop_s = factor * stay_R[r], factor * moved_R[r], hop_R[r]
        rows_are_here = max(state.time[d], release) + hop_s
        note(run.events, ev.EXPERTS, ev.COMPUTE_LANE, d, layer, state.time[d], state.time[d] + stay_s)
        state.time[d] += stay_s
        if moved_s > 0.0:
            _wait(run, d, max(rows_are_here, state.arrival[d]), layer)
            note(run.events, ev.EXPERTS, ev.COMPUTE_LANE, d, layer, state.time[d], state.time[d] + moved_s)
        state.time[d] += moved_s + hop_s
        state.parts[d, EXPERTS] += mean_s
        state.parts[d, IMBALANCE] += stay_s + moved_s - mean_s
        state.parts[d, DISPATCH] += hop_s


@numba.njit(cache=True, nogil=True)
def _all_to_all(run, g, m, layer, kind):  # type: ignore[no-untyped-def]
    for r in range(run.groups.ranks):
        d = g * run.groups.ranks + r
        near_s, far_s, time = run.work.near_MLR[m, layer, r], run.work.far_MLR[m, layer, r], run.state.time[d]
        taken_s = run.costs.dispatch_s + max(near_s, far_s)
        occupy(run.state.links, d, time, near_s, far_s)
        note(run.events, kind, ev.COMPUTE_LANE, d, layer, time, time + taken_s)
        note(run.events, kind, ev.NODE_LANE, d, layer, time, time + near_s)
        note(run.events, kind, ev.NETWORK_LANE, d, layer, time, time + far_s)
        run.state.time[d] += taken_s
        run.state.parts[d, DISPATCH] += taken_s


@numba.njit(cache=True, nogil=True)
def _meet(run, first, last):  # type: ignore[no-untyped-def]
    """All wait for the last to come, and take over its parts."""
    time, parts = run.state.time, run.state.parts
    latest = first
    for d in range(first, last):
        if time[d] > time[latest]:
            latest = d
    for d in range(first, last):
        if d != latest:
            time[d] = time[latest]
            parts[d] = parts[latest]


@numba.njit(cache=True, nogil=True)
def _wait(run, d, until, layer):  # type: ignore[no-untyped-def]
    """A rank waits for replicas or gradients."""
    time = run.state.time[d]
    if until > time:
        note(run.events, ev.WAITING, ev.COMPUTE_LANE, d, layer, time, until)
        run.state.parts[d, TRANSFERS] += until - time
        run.state.time[d] = until


@numba.njit(cache=True, nogil=True)
def _bring(run, first, copies, number, release, layer):  # type: ignore[no-untyped-def]
    """Weights of an instance's or a layer's replicas set out; `arrival` becomes when a rank has all of its."""
    links, costs = run.state.links, run.costs
    for p in range(copies.starts[number], copies.starts[number + 1]):
        home, rank = first + copies.homes[p], first + copies.ranks[p]
        near = copies.homes[p] // run.groups.ranks_per_node == copies.ranks[p] // run.groups.ranks_per_node
        if copies.paths[p] == HOST_PATH:
            lane, since = ev.HOST_LANE, max(links.free[HOST_IN, rank], release)
            there = serve(links, HOST_IN, rank, release, costs.host_weights_s, 1.0)
        elif near:
            lane, since = ev.NODE_LANE, max(links.free[NEAR_IN, rank], release)
            sent = serve(links, NEAR_OUT, home, release, costs.near_weights_s, costs.near_spare)
            there = max(sent, serve(links, NEAR_IN, rank, release, costs.near_weights_s, costs.near_spare))
        else:
            lane, since = ev.NETWORK_LANE, max(links.free[FAR_IN, rank], release)
            sent = serve(links, FAR_OUT, home, release, costs.far_weights_s, costs.far_spare)
            there = max(sent, serve(links, FAR_IN, rank, release, costs.far_weights_s, costs.far_spare))
        note(run.events, ev.WEIGHTS, lane, rank, layer, since, there)
        run.state.arrival[rank] = max(run.state.arrival[rank], there)


@numba.njit(cache=True, nogil=True)
def _bring_kept(run, g, layer):  # type: ignore[no-untyped-def]
    """Weights of a layer's copies that stay set out with new weights, layer by layer; `arrival` as in `_bring`.

    They are served when they are first asked for: only then it is known which all-to-alls ran over their links.
    """
    state, first = run.state, g * run.groups.ranks
    last = first + run.groups.ranks
    if state.kept_from[g, layer] >= 0.0:
        _bring(run, first, run.kept, layer, state.kept_from[g, layer], layer)
        state.kept_by[g, layer] = state.arrival[first:last]
        state.kept_from[g, layer] = -1.0
    state.arrival[first:last] = state.kept_by[g, layer]


@numba.njit(cache=True, nogil=True)
def _send_instance_home(run, g, instance, k, layer):  # type: ignore[no-untyped-def]
    """Gradients of an instance's replicas set out. Where room is bounded, homes first wait for the oldest under way."""
    state, copies = run.state, run.replicas
    first, slot = g * run.groups.ranks, k % run.recipe.places
    is_bounded = run.recipe.store == SHARED
    for p in range(copies.starts[instance], copies.starts[instance + 1]):
        home = first + copies.homes[p]
        if is_bounded and k >= run.recipe.places:
            _wait(run, home, state.under_way[slot, home], layer)
    state.under_way[slot, first : first + run.groups.ranks] = 0.0
    for p in range(copies.starts[instance], copies.starts[instance + 1]):
        home = first + copies.homes[p]
        there = _send_home(run, g, copies, p, layer, state.time[first + copies.ranks[p]])
        state.under_way[slot, home] = max(state.under_way[slot, home], there)


@numba.njit(cache=True, nogil=True)
def _send_kept_home(run, g):  # type: ignore[no-untyped-def]
    """Gradients of copies that stay set out as each layer is done, served when the pass's all-to-alls are known."""
    for layer in range(len(run.kept.starts) - 2, -1, -1):
        for p in range(run.kept.starts[layer], run.kept.starts[layer + 1]):
            _send_home(run, g, run.kept, p, layer, run.state.done_by[g, layer, run.kept.ranks[p]])


@numba.njit(cache=True, nogil=True)
def _send_home(run, g, copies, p, layer, release):  # type: ignore[no-untyped-def]
    """One replica's gradient sets out. Returns when it is home."""
    links, costs, first = run.state.links, run.costs, g * run.groups.ranks
    home, rank = first + copies.homes[p], first + copies.ranks[p]
    near = copies.homes[p] // run.groups.ranks_per_node == copies.ranks[p] // run.groups.ranks_per_node
    lane = GRADIENTS + (NEAR_OUT if near else FAR_OUT)
    seconds = costs.near_gradient_s if near else costs.far_gradient_s
    spare = costs.near_spare if near else costs.far_spare
    since = max(links.free[lane, rank], release)
    sent = serve(links, lane, rank, release, seconds, spare)
    there = max(sent, serve(links, lane + 1, home, release, seconds, spare))
    note(run.events, ev.GRADIENTS, ev.NODE_LANE if near else ev.NETWORK_LANE, rank, layer, since, there)
    run.state.home_by[home] = max(run.state.home_by[home], there)
    return there
