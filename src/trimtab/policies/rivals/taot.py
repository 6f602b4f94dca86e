"""`taot`: after gating, optimal transport with link costs decides which ranks help which, and with how many tokens.

Source: TAOT (arXiv 2608.03676, in Baidu's LoongForge); our reimplementation from the paper's abstract and the project's
proposal, as the planner is not in its public code. In every layer, the load of ranks above the mean and the spare
capacity of ranks below it are a balanced optimal transport problem with entropy, whose costs are those of the links.
Sinkhorn-Knopp iterations give a flow between ranks as a hint. An integer matching of replicas, combined with the
assignment of tokens, makes it a schedule. Weights of copies are sent while home experts compute. 1.43x end-to-end
training speed is claimed, with less traffic between nodes than other balancers.

Not specified by the source, and our choices:

* costs: 1 inside a node, `far_cost` between nodes, the ratio of NVLink to a 400 Gb/s network;
* the entropy and the number of iterations;
* the matching: pairs of ranks in descending order of flow; the giver's largest expert gets a copy, if the taker has a
  slot or the copy already, for as many tokens as the giver is above the mean and the taker below it. With no more than
  the pair's flow, slots would be used up by small copies;
* tokens that the hints leave: busiest rank first, to the rank with the least cost and then the most room;
* `smallest_share`: smaller flows and copies are left out;
* sources of a copy's tokens: its own rank first, its own node next;
* copies: slots shared by all layers;
* planning time: none is published; UltraEP's is charged.

On equal terms it is the same with the given slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.planning_time import ULTRAEP_SIZES, PlanningTime
from trimtab.policies.policy import Choices, Traits, View
from trimtab.policies.rivals.replica_quotas import split_shares


@dataclass(frozen=True)
class Taot:
    """Replicas by optimal transport between ranks.

    Attributes:
        far_cost: cost of a token between nodes; 1 inside a node.
        entropy: weight of the entropy, in costs inside a node.
        iterations: of Sinkhorn-Knopp.
        smallest_share: fewest tokens of a replica.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="layer", planning=PlanningTime.published(*ULTRAEP_SIZES, source="UltraEP's")
    )
    choices: ClassVar[Choices] = (
        {"far_cost": 9.0, "entropy": 1.0, "smallest_share": 128},
        {"far_cost": 1.0, "entropy": 0.1, "smallest_share": 128},
        {"far_cost": 1.0, "entropy": 0.1, "smallest_share": 2048},
        {"far_cost": 3.0, "entropy": 0.1, "smallest_share": 2048},
        {"far_cost": 9.0, "entropy": 0.1, "smallest_share": 2048},
    )
    far_cost: float = 9.0
    entropy: float = 1.0
    iterations: int = 20
    smallest_share: int = 128

    def plan(self, view: View) -> StepPlan:
        cluster = view.cluster
        transport = Transport(float(self.far_cost), float(self.entropy), self.iterations, self.smallest_share)
        replicas_3P = np.empty((3, cluster.ranks * cluster.slots_per_rank), np.int64)

        def plan_one(_: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            load = InstanceLoad.of(counts_RE.sum(axis=0), home_E, cluster, within_node=False)
            flow_RR = transport_flow(load, transport)
            count = match_replicas(
                load, flow_RR, np.argsort(-flow_RR, axis=None, kind="stable"), transport, replicas_3P
            )
            return split_shares(counts_RE, load, replicas_3P[:, :count])

        return view.plan_instances(plan_one, placement=view.placement, slots=cluster.slots_per_rank)


class Transport(NamedTuple):
    """The settings of `Taot`, for kernels."""

    far_cost: float
    entropy: float
    iterations: int
    smallest_share: int


@kernel
def transport_flow(load, transport):  # type: ignore[no-untyped-def]
    """Tokens from every rank above the mean to every rank below it, `[R, R]` float64; columns are exact."""
    loads_R, num_ranks, per_node = load.loads_R, len(load.loads_R), load.ranks_per_node
    mean = loads_R.sum() / num_ranks
    near, far = math.exp(-1.0 / transport.entropy), math.exp(-transport.far_cost / transport.entropy)
    give_R, take_R = np.ones(num_ranks), np.ones(num_ranks)
    flow_RR = np.zeros((num_ranks, num_ranks))
    givers, takers = np.flatnonzero(loads_R > mean), np.flatnonzero(loads_R < mean)
    for _ in range(transport.iterations):
        for giver in givers:
            scale = 0.0
            for taker in takers:
                scale += take_R[taker] * (near if giver // per_node == taker // per_node else far)
            give_R[giver] = (loads_R[giver] - mean) / scale
        for taker in takers:
            scale = 0.0
            for giver in givers:
                scale += give_R[giver] * (near if giver // per_node == taker // per_node else far)
            take_R[taker] = (mean - loads_R[taker]) / scale
    for giver in givers:
        for taker in takers:
            cost = near if giver // per_node == taker // per_node else far
            flow_RR[giver, taker] = give_R[giver] * cost * take_R[taker]
    return flow_RR


class _Ranks(NamedTuple):
    """Ranks during the matching; kernels change the arrays.

    Attributes:
        excess_R, room_R: `[R]` int64, tokens above the mean and below it.
        free_R: `[R]` int64, slots without a replica.
        left_E: `[E]` int64, tokens of each expert at its home.
        replica_ER: `[E, R]` int64, place of a replica in the list; -1 for none.
    """

    excess_R: Array
    room_R: Array
    free_R: Array
    left_E: Array
    replica_ER: Array


@kernel
def match_replicas(load, flow_RR, pairs_descending, transport, replicas_3P):  # type: ignore[no-untyped-def]
    """Replicas of one instance.

    Args:
        load: `InstanceLoad`.
        flow_RR: `[R, R]` float64, tokens to move between ranks.
        pairs_descending: `[R * R]` int64, flat indices of `flow_RR`, largest first.
        transport: `Transport`.
        replicas_3P: `[3, R * slots]` int64, filled with expert, rank and tokens.

    Returns:
        The number of replicas.
    """
    num_ranks, per_node = len(load.loads_R), load.ranks_per_node
    mean = (load.loads_R.sum() + num_ranks - 1) // num_ranks
    ranks = _Ranks(
        np.maximum(load.loads_R - mean, 0),
        np.maximum(mean - load.loads_R, 0),
        np.full(num_ranks, load.slots),
        load.counts_E.copy(),
        np.full((len(load.counts_E), num_ranks), np.int64(-1)),
    )
    count = np.int64(0)
    for pair in pairs_descending:
        giver, taker = pair // num_ranks, pair % num_ranks
        if flow_RR[giver, taker] < transport.smallest_share:
            break
        tokens = ranks.room_R[taker]
        count = _move(load, (giver, taker, tokens), transport.smallest_share, ranks, replicas_3P, count)
    stuck_R = np.zeros(num_ranks, np.bool_)
    while True:
        giver = np.int64(-1)
        for r in range(num_ranks):
            if ranks.excess_R[r] > 0 and not stuck_R[r] and (giver < 0 or ranks.excess_R[r] > ranks.excess_R[giver]):
                giver = np.int64(r)
        if giver < 0:
            return count
        stuck_R[giver] = True
        tried_R = np.zeros(num_ranks, np.bool_)
        for _ in range(num_ranks):
            best, best_is_near = np.int64(-1), False
            for r in range(num_ranks):
                is_near = r // per_node == giver // per_node
                if tried_R[r] or ranks.room_R[r] == 0 or (best >= 0 and best_is_near and not is_near):
                    continue
                if best < 0 or is_near != best_is_near or ranks.room_R[r] > ranks.room_R[best]:
                    best, best_is_near = np.int64(r), is_near
            if best < 0:
                break
            tried_R[best] = True
            before = ranks.excess_R[giver]
            count = _move(load, (giver, best, before), transport.smallest_share, ranks, replicas_3P, count)
            if ranks.excess_R[giver] < before:
                stuck_R[giver] = False
                break


@kernel
def _move(load, move, smallest_share, ranks, replicas_3P, count):  # type: ignore[no-untyped-def]
    """Move up to a number of tokens from a rank to another; returns the number of replicas.

    They are tokens of the giver's experts with most tokens at home, of those that the taker has or has a slot for.
    """
    giver, taker, tokens = move
    tokens = min(tokens, ranks.excess_R[giver], ranks.room_R[taker])
    home_E, left_E, replica_ER, free_R = load.home_E, ranks.left_E, ranks.replica_ER, ranks.free_R
    while tokens > 0:
        expert = np.int64(-1)
        for e in range(len(home_E)):
            may_move = home_E[e] == giver and (free_R[taker] > 0 or replica_ER[e, taker] >= 0)
            if may_move and (expert < 0 or left_E[e] > left_E[expert]):
                expert = np.int64(e)
        if expert < 0 or left_E[expert] == 0:
            return count
        share = min(tokens, left_E[expert])
        place = replica_ER[expert, taker]
        if place < 0:
            if share < smallest_share:
                return count
            place = count
            count += 1
            replica_ER[expert, taker] = place
            free_R[taker] -= 1
            replicas_3P[0, place], replicas_3P[1, place], replicas_3P[2, place] = expert, taker, 0
        replicas_3P[2, place] += share
        left_E[expert] -= share
        ranks.excess_R[giver] -= share
        ranks.room_R[taker] -= share
        tokens -= share
    return count
