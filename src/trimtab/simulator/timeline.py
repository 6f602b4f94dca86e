"""Timeline model: operations of every rank in sequence, synchronisation between ranks, and concurrent transfers.

The ranks of an expert-parallel group synchronise before every all-to-all; each continues when its own rows are
complete. Weights and gradients of replicas use the links at the same time (`links.py`). Every rank records its time by
part; where ranks synchronise, all take over the record of the last rank. The final parts are therefore those of the
critical path and add up to the step.

Recompute runs all micro-steps forward. Then each mini-batch runs its micro-steps forward and backward, gradients are
returned to the homes, and the optimizer steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.simulator import events as ev
from trimtab.simulator.events import Clock, note
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

# Parts of a step's time.
PARTS = ("attention", "dispatch", "experts", "imbalance", "transfers", "planning", "migration", "optimizer")
ATTENTION, DISPATCH, EXPERTS, IMBALANCE, TRANSFERS, PLANNING, MIGRATION, OPTIMIZER = range(8)
# Memory of copies: none, slots shared by layers, slots for the whole step, or unbounded.
NONE, SHARED, KEPT, UNBOUNDED = range(4)
# Start of weight transfers: when weights are new, when the micro-step begins, or after the layer's router.
AT_STEP, AT_MICRO_STEP, AT_LAYER = range(3)
# With live planning, the plan is known in backward, and weights are transferred one layer ahead.
PLACES_IN_LIVE_BACKWARD = 2
# `paths` of a replica whose weights come from host memory; see `planner/replicas/paths.py`.
HOST_PATH = 1


class Rounds(NamedTuple):
    """The micro-step of each of G groups in each of Q rounds.

    Attributes:
        order_QG: `[Q, G]` int64, -1 for none.
        mini_batch_Q: `[Q]` int64, ascending.
        closes_QG: `[Q, G]` bool, true for the group's last of its mini-batch.
    """

    order_QG: Array
    mini_batch_Q: Array
    closes_QG: Array


class Work(NamedTuple):
    """Seconds of one forward: `[M, R]` of a MoE layer's dense parts and of everything outside; see also `RankWork`."""

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
    """Transfer behaviour of a balancer.

    Attributes:
        store: memory of copies.
        start: start of weight transfers.
        places: layers with shared copies at the same time.
        hops: 2 if moved tokens are first sent to the home rank.
        planning_s: of one layer with live planning; else 0.
        waits_first: true: weights must be present before dispatch.
    """

    store: int
    start: int
    places: int
    hops: int
    planning_s: float
    waits_first: bool


class Groups(NamedTuple):
    """Expert-parallel groups: ranks of each, ranks of a node, and whether groups synchronise in every layer."""

    ranks: int
    ranks_per_node: int
    meet_in_layers: bool


class State(NamedTuple):
    """Transfers in progress between D ranks of all groups.

    Attributes:
        arrival: `[D]` float64, when all weights in transfer have arrived.
        begin: `[G]` float64, when the group's pass over the layers began.
        passed: `[G]` int64, instances with replicas in this pass so far.
        met: `[G, L]` float64, when the ranks synchronised in each layer.
        home_by: `[D]` float64, when all gradients sent so far have arrived at this home.
        under_way: `[places, D]` float64, the same for the instances that may be in transfer at the same time.
        kept_from: `[G, L]` float64, earliest start of transfers of kept copies; -1 when their arrival is known.
        kept_by: `[G, L, R]` float64, when they have arrived.
        done_by: `[G, L, R]` float64, when ranks are done with a layer's experts in the last backward.
    """

    arrival: Array
    begin: Array
    passed: Array
    met: Array
    home_by: Array
    under_way: Array
    kept_from: Array
    kept_by: Array
    done_by: Array


class Run(NamedTuple):
    """Input of a simulation. `replicas` are by instance, `kept` by layer."""

    work: Work
    replicas: Copies
    kept: Copies
    costs: Costs
    recipe: Recipe
    groups: Groups
    clock: Clock
    state: State
    links: Links


@kernel
def run_step(rounds, work, replicas, kept, costs, recipe, groups, clock, shown_round, recompute):  # type: ignore[no-untyped-def]
    """Simulate a step on a clock at time 0.

    Args:
        shown_round: whose update is recorded; -1 for none.
        recompute: true: all micro-steps first run forward only.
    """
    num_rounds, num_groups = rounds.order_QG.shape
    num_layers = work.experts_MLR.shape[1]
    time, num_ranks = clock.time, len(clock.time)
    state = State(
        np.zeros(num_ranks),
        np.zeros(num_groups),
        np.zeros(num_groups, np.int64),
        np.zeros((num_groups, num_layers)),
        np.zeros(num_ranks),
        np.zeros((recipe.places, num_ranks)),
        np.zeros((num_groups, num_layers)),
        np.zeros((num_groups, num_layers, groups.ranks)),
        np.zeros((num_groups, num_layers, groups.ranks)),
    )
    run = Run(work, replicas, kept, costs, recipe, groups, clock, state, idle_links(num_ranks, num_layers))
    # Not written as False: numba would compile it once more for a constant.
    for q in range(num_rounds if recompute else 0):
        _pass(run, rounds, q, not recompute)
    for q in range(num_rounds):
        if q > 0 and rounds.mini_batch_Q[q] != rounds.mini_batch_Q[q - 1]:
            state.kept_from[:] = time.min()
        if q == shown_round:
            clock.page[ev.SHOWN], clock.page[ev.ORIGIN] = 1.0, time.min()
        before = 0.0
        for direction in range(2):
            before = time.max()
            _pass(run, rounds, q, direction == 1)
        clock.page[ev.SHOWN] = 0.0
        is_last = q == num_rounds - 1
        if not is_last and rounds.mini_batch_Q[q] == rounds.mini_batch_Q[q + 1]:
            continue
        for d in range(num_ranks):
            _wait(clock, d, state.home_by[d], -1)
        _meet(clock, 0, num_ranks)
        # Sums of dense gradients overlap with the last backward.
        optimizer_s = max(0.0, costs.reduce_s - (time[0] - before)) + costs.optimizer_s
        refresh_s = 0.0 if is_last else costs.refresh_s
        for d in range(num_ranks):
            time[d] += optimizer_s + refresh_s
            clock.parts[d, OPTIMIZER] += optimizer_s
            clock.parts[d, MIGRATION] += refresh_s


@kernel
def _pass(run, rounds, q, backward):  # type: ignore[no-untyped-def]
    """One round's micro-steps, forward or backward: all layers, and the parts outside them.

    Copies kept for the step send their gradients to the homes in the last backward of the mini-batch.
    """
    clock, work, ranks = run.clock, run.work, run.groups.ranks
    order_G, closes_G = rounds.order_QG[q], rounds.closes_QG[q]
    num_layers, factor = work.experts_MLR.shape[1], run.costs.dense_backward if backward else 1.0
    for g in range(len(order_G)):
        first, m = g * ranks, order_G[g]
        run.state.begin[g] = clock.time[first : first + ranks].min()
        run.state.passed[g] = 0
        if backward and m >= 0:
            _compute(clock, first, work.outer_MR[m], factor, ATTENTION, ev.HEAD, -1)
    for i in range(num_layers):
        layer = num_layers - 1 - i if backward else i
        if run.groups.meet_in_layers:
            _meet(clock, 0, len(clock.time))
        for g in range(len(order_G)):
            first, m = g * ranks, order_G[g]
            if m < 0:
                continue
            if not backward:
                _compute(clock, first, work.attention_MR[m], factor, ATTENTION, ev.ATTENTION, layer)
            _moe_layer(run, g, m, layer, backward)
            if backward:
                run.state.done_by[g, layer] = clock.time[first : first + ranks]
                _compute(clock, first, work.attention_MR[m], factor, ATTENTION, ev.ATTENTION, layer)
    for g in range(len(order_G)):
        if not backward and order_G[g] >= 0:
            _compute(clock, g * ranks, work.outer_MR[order_G[g]], factor, ATTENTION, ev.HEAD, -1)
        if backward and closes_G[g] and run.recipe.store == KEPT:
            _send_kept_home(run, g)


@kernel
def _moe_layer(run, g, m, layer, backward):  # type: ignore[no-untyped-def]
    """Dispatch, experts and combine of one instance, or their backward."""
    clock, links, work, recipe, state, costs = run.clock, run.links, run.work, run.recipe, run.state, run.costs
    first, last = g * run.groups.ranks, (g + 1) * run.groups.ranks
    instance = m * work.experts_MLR.shape[1] + layer
    replicas = (run.replicas.starts[instance], run.replicas.starts[instance + 1])
    is_brought = replicas[1] > replicas[0] and (recipe.store == SHARED or recipe.store == UNBOUNDED)
    near_R, far_R, hop_R = work.near_MLR[m, layer], work.far_MLR[m, layer], work.hop_MLR[m, layer]
    if recipe.hops == 1 and not backward:
        _plan(clock, first, last, recipe.planning_s, layer)
    _meet(clock, first, last)
    k = state.passed[g]
    if is_brought:
        state.met[g, k] = clock.time[first]
        state.passed[g] += 1
    release = _release(state, recipe, g, k, clock.time[first], backward)
    # The last instances of forward are still in their places; unbounded copies all are.
    is_there = backward and (recipe.store == UNBOUNDED or k < recipe.places)
    waits_first = recipe.waits_first and not backward
    state.arrival[first:last] = 0.0
    if is_brought and not is_there and waits_first:
        _bring(clock, links, state.arrival, run.replicas, replicas, first, run.groups, costs, release, layer)
        for d in range(first, last):
            _wait(clock, d, state.arrival[d], layer)
        _meet(clock, first, last)
    _all_to_all(clock, links, first, near_R, far_R, costs.dispatch_s, ev.COMBINE if backward else ev.DISPATCH, layer)
    if recipe.hops == 2 and not backward:
        # Planned while experts that do not move compute.
        release = clock.time[first:last].max()
        note(clock, ev.PLANNING, ev.CPU_LANE, first, layer, release, release + recipe.planning_s)
        release += recipe.planning_s
    if is_brought and not is_there and not waits_first:
        _bring(clock, links, state.arrival, run.replicas, replicas, first, run.groups, costs, release, layer)
    if recipe.store == KEPT:
        _bring_kept(run, g, layer)
    factor = costs.expert_backward if backward else 1.0
    if recipe.hops == 2:
        moved_R = work.moved_MLR[m, layer]
        _compute_in_two_hops(
            clock, first, work.experts_MLR[m, layer], moved_R, hop_R, factor, state.arrival, release, layer
        )
    else:
        for d in range(first, last):
            _wait(clock, d, state.arrival[d], layer)
        _compute(clock, first, work.experts_MLR[m, layer], factor, EXPERTS, ev.EXPERTS, layer)
    if backward and is_brought:
        _send_instance_home(run, replicas, first, k, layer)
    _meet(clock, first, last)
    _all_to_all(clock, links, first, near_R, far_R, costs.dispatch_s, ev.DISPATCH if backward else ev.COMBINE, layer)


@kernel
def _plan(clock, first, last, planning_s, layer):  # type: ignore[no-untyped-def]
    """All ranks wait for the layer's plan, which starts when its counts are known."""
    if planning_s > 0.0:
        _meet(clock, first, last)
        for d in range(first, last):
            note(clock, ev.PLANNING, ev.CPU_LANE, d, layer, clock.time[d], clock.time[d] + planning_s)
            clock.time[d] += planning_s
            clock.parts[d, PLANNING] += planning_s


@kernel
def _release(state, recipe, g, k, now, backward):  # type: ignore[no-untyped-def]
    """Earliest transfer start for a pass's k-th instance with replicas: when a place is free."""
    is_live = recipe.start == AT_LAYER
    if is_live and not backward:
        return now
    places = PLACES_IN_LIVE_BACKWARD if is_live else recipe.places
    return state.begin[g] if k < places else state.met[g, k - (places - 1)]


@kernel
def _compute(clock, first, seconds_R, factor, part, kind, layer):  # type: ignore[no-untyped-def]
    """Every rank of a group computes. What exceeds the mean is imbalance."""
    mean_s = factor * seconds_R.mean()
    for r in range(len(seconds_R)):
        d, own_s = first + r, factor * seconds_R[r]
        note(clock, kind, ev.COMPUTE_LANE, d, layer, clock.time[d], clock.time[d] + own_s)
        clock.time[d] += own_s
        clock.parts[d, part] += mean_s
        clock.parts[d, IMBALANCE] += own_s - mean_s


@kernel
def _compute_in_two_hops(clock, first, stay_R, moved_R, hop_R, factor, arrival, release, layer):  # type: ignore[no-untyped-def]
    """Experts that do not move compute while others and their rows are sent inside the node; outputs are sent back."""
    mean_s = factor * (stay_R.mean() + moved_R.mean())
    for r in range(len(stay_R)):
        d = first + r
        stay_s, moved_s, hop_s = factor * stay_R[r], factor * moved_R[r], hop_R[r]
        rows_are_here = max(clock.time[d], release) + hop_s
        note(clock, ev.EXPERTS, ev.COMPUTE_LANE, d, layer, clock.time[d], clock.time[d] + stay_s)
        clock.time[d] += stay_s
        if moved_s > 0.0:
            _wait(clock, d, max(rows_are_here, arrival[d]), layer)
            note(clock, ev.EXPERTS, ev.COMPUTE_LANE, d, layer, clock.time[d], clock.time[d] + moved_s)
        clock.time[d] += moved_s + hop_s
        clock.parts[d, EXPERTS] += mean_s
        clock.parts[d, IMBALANCE] += stay_s + moved_s - mean_s
        clock.parts[d, DISPATCH] += hop_s


@kernel
def _all_to_all(clock, links, first, near_R, far_R, dispatch_s, kind, layer):  # type: ignore[no-untyped-def]
    for r in range(len(near_R)):
        d = first + r
        time, taken_s = clock.time[d], dispatch_s + max(near_R[r], far_R[r])
        occupy(links, d, time, near_R[r], far_R[r])
        note(clock, kind, ev.COMPUTE_LANE, d, layer, time, time + taken_s)
        note(clock, kind, ev.NODE_LANE, d, layer, time, time + near_R[r])
        note(clock, kind, ev.NETWORK_LANE, d, layer, time, time + far_R[r])
        clock.time[d] += taken_s
        clock.parts[d, DISPATCH] += taken_s


@kernel
def _meet(clock, first, last):  # type: ignore[no-untyped-def]
    """All ranks wait for the last one and take over its parts."""
    latest = first
    for d in range(first, last):
        if clock.time[d] > clock.time[latest]:
            latest = d
    for d in range(first, last):
        if d != latest:
            clock.time[d] = clock.time[latest]
            clock.parts[d] = clock.parts[latest]


@kernel
def _wait(clock, d, until, layer):  # type: ignore[no-untyped-def]
    """A rank waits for replicas or gradients."""
    time = clock.time[d]
    if until > time:
        note(clock, ev.WAITING, ev.COMPUTE_LANE, d, layer, time, until)
        clock.parts[d, TRANSFERS] += until - time
        clock.time[d] = until


@kernel
def _bring(clock, links, arrival, copies, chosen, first, groups, costs, release, layer):  # type: ignore[no-untyped-def]
    """Starts weight transfers of the copies `chosen[0]` to `chosen[1]`; sets `arrival`, when a rank has all of its
    copies."""
    for p in range(chosen[0], chosen[1]):
        home, rank = first + copies.homes[p], first + copies.ranks[p]
        if copies.paths[p] == HOST_PATH:
            lane, since = ev.HOST_LANE, max(links.free[HOST_IN, rank], release)
            there = serve(links, HOST_IN, rank, release, costs.host_weights_s, 1.0)
        elif copies.homes[p] // groups.ranks_per_node == copies.ranks[p] // groups.ranks_per_node:
            lane, since = ev.NODE_LANE, max(links.free[NEAR_IN, rank], release)
            sent = serve(links, NEAR_OUT, home, release, costs.near_weights_s, costs.near_spare)
            there = max(sent, serve(links, NEAR_IN, rank, release, costs.near_weights_s, costs.near_spare))
        else:
            lane, since = ev.NETWORK_LANE, max(links.free[FAR_IN, rank], release)
            sent = serve(links, FAR_OUT, home, release, costs.far_weights_s, costs.far_spare)
            there = max(sent, serve(links, FAR_IN, rank, release, costs.far_weights_s, costs.far_spare))
        note(clock, ev.WEIGHTS, lane, rank, layer, since, there)
        arrival[rank] = max(arrival[rank], there)


@kernel
def _bring_kept(run, g, layer):  # type: ignore[no-untyped-def]
    """Starts weight transfers of a layer's kept copies after a change of weights; `arrival` as in `_bring`.

    Completion is computed when first needed: only then the all-to-alls on their links are known.
    """
    state, first = run.state, g * run.groups.ranks
    last, since = first + run.groups.ranks, state.kept_from[g, layer]
    if since >= 0.0:
        chosen = (run.kept.starts[layer], run.kept.starts[layer + 1])
        _bring(run.clock, run.links, state.arrival, run.kept, chosen, first, run.groups, run.costs, since, layer)
        state.kept_by[g, layer] = state.arrival[first:last]
        state.kept_from[g, layer] = -1.0
    state.arrival[first:last] = state.kept_by[g, layer]


@kernel
def _send_instance_home(run, chosen, first, k, layer):  # type: ignore[no-untyped-def]
    """Starts transfers of the gradients of an instance's replicas. With bounded memory, homes first wait for the
    oldest."""
    clock, state, copies = run.clock, run.state, run.replicas
    under_way = state.under_way[k % run.recipe.places]
    if run.recipe.store == SHARED and k >= run.recipe.places:
        for p in range(chosen[0], chosen[1]):
            home = first + copies.homes[p]
            _wait(clock, home, under_way[home], layer)
    under_way[first : first + run.groups.ranks] = 0.0
    for p in range(chosen[0], chosen[1]):
        home = first + copies.homes[p]
        left = clock.time[first + copies.ranks[p]]
        there = _send_home(clock, run.links, state.home_by, copies, p, first, run.groups, run.costs, layer, left)
        under_way[home] = max(under_way[home], there)


@kernel
def _send_kept_home(run, g):  # type: ignore[no-untyped-def]
    """Starts transfers of kept copies' gradients after each layer; computed when the pass's all-to-alls are known."""
    kept, state, first = run.kept, run.state, g * run.groups.ranks
    for layer in range(len(kept.starts) - 2, -1, -1):
        for p in range(kept.starts[layer], kept.starts[layer + 1]):
            left = state.done_by[g, layer, kept.ranks[p]]
            _send_home(run.clock, run.links, state.home_by, kept, p, first, run.groups, run.costs, layer, left)


@kernel
def _send_home(clock, links, home_by, copies, p, first, groups, costs, layer, release):  # type: ignore[no-untyped-def]
    """Starts the transfer of one replica's gradient. Returns the time of its arrival."""
    home, rank = first + copies.homes[p], first + copies.ranks[p]
    near = copies.homes[p] // groups.ranks_per_node == copies.ranks[p] // groups.ranks_per_node
    lane = GRADIENTS + (NEAR_OUT if near else FAR_OUT)
    seconds = costs.near_gradient_s if near else costs.far_gradient_s
    spare = costs.near_spare if near else costs.far_spare
    since = max(links.free[lane, rank], release)
    sent = serve(links, lane, rank, release, seconds, spare)
    there = max(sent, serve(links, lane + 1, home, release, seconds, spare))
    note(clock, ev.GRADIENTS, ev.NODE_LANE if near else ev.NETWORK_LANE, rank, layer, since, there)
    home_by[home] = max(home_by[home], there)
    return there
