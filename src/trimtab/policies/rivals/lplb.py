"""`lplb`: replicas in a fixed graph of ranks, and after gating a linear program for the tokens on each edge.

Source: DeepSeek's Linear-Programming-Based Load Balancer (github.com/deepseek-ai/LPLB). Once per step the experts of a
group of ranks are packed onto its ranks by history (EPLB without replicas), and every rank's hottest experts get one
replica each, on the rank given by the graph. For every instance a program on the GPU (about 100 us inside a node)
finds the tokens of each replica that minimise the busiest rank's load. All sources send the same fraction of theirs.

Not specified by the source, and our choices:

* the graph for other sizes than its examples: see `links`;
* the choice between optimal flows: the one that moves the fewest tokens;
* the solver: an interior-point method on one multiprocessor there, HiGHS here. Flows are rounded down to tokens;
* homes that don't divide evenly over a group: they stay;
* no history: homes stay, and the first experts of every rank are used as its hottest.

On equal terms homes are given; graph and program are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from trimtab.array_type import Array
from trimtab.planner import Placement, StepPlan
from trimtab.planner.placement.packing import pack_evenly
from trimtab.planner.plan.solver import highs, new_solver
from trimtab.policies.planning_time import PlanningTime
from trimtab.policies.policy import Traits, View

_COST_OF_A_MOVE = 1e-4  # of a token, in tokens of the busiest rank: too little to leave a rank busier
_ROUNDING = 1e-6
_PURPOSE = "policy lplb"


@dataclass(frozen=True)
class Lplb:
    """Flow over fixed links.

    Attributes:
        topology: `cube` balances groups of eight neighbouring ranks, `torus` all ranks together.
        window: steps of history.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="layer",
        planning=PlanningTime.published((8, 100.0), source="LPLB's README"),
        transfers_start="step",
        copies="layer slots",
        relocates=True,
    )
    topology: Literal["cube", "torus"] = "cube"
    window: int = 4

    def __post_init__(self) -> None:
        """Raises InputError if highspy is not installed."""
        highs(_PURPOSE)

    def plan(self, view: View) -> StepPlan:
        cluster = view.cluster
        group_size, source_RK = links(
            cluster.ranks, cluster.ranks_per_node, cluster.slots_per_rank, topology=self.topology
        )
        past_PLE = view.past_counts_PLE[-self.window :]
        home_LE = view.placement.home.astype(np.int64)
        replicas_LP2 = []
        for layer in range(view.num_layers):
            heat_E = past_PLE[:, layer].sum(axis=0)
            if len(past_PLE) and not view.equal_terms:
                home_LE[layer] = _reorder(heat_E, home_LE[layer], cluster.ranks, group_size)
            replicas_LP2.append(_hottest(heat_E, home_LE[layer], source_RK))
        flow = _Flow(cluster.ranks, group_size)

        def plan_one(layer: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            replicas_P2 = replicas_LP2[layer]
            tokens_P = flow.solve(counts_RE.sum(axis=0), home_E, replicas_P2)
            return replicas_P2, _split_alike(counts_RE, replicas_P2[:, 0], tokens_P)

        placement = Placement(home_LE.astype(view.placement.home.dtype))
        return view.plan_instances(plan_one, placement=placement, slots=cluster.slots_per_rank)


def links(num_ranks: int, ranks_per_node: int, slots: int, *, topology: Literal["cube", "torus"]) -> tuple[int, Array]:
    """The graph of replicas.

    `cube` links blocks of eight ranks as the source's cube with diagonals does, if blocks fill a node. Otherwise each
    node is a torus, or all ranks are if a node has one rank. `torus` links all ranks: in one direction with the
    next node, in the other with the next rank of the node. Within one node the directions are the two factors of its
    size that are nearest each other (16 ranks: the source's hypercube). With one slot, or a prime size, it is a ring.
    With more slots than directions, the same directions are used again for the next hottest experts.

    Returns:
        Ranks in a group, neighbours, that balance among themselves; and `[R, slots]` int64: the rank whose k-th
        hottest expert has its replica in slot k. A rank that names itself leaves the slot empty.
    """
    if topology == "cube" and ranks_per_node > 1:
        group_size = 8 if ranks_per_node % 8 == 0 else ranks_per_node
    else:
        group_size = num_ranks
    at = np.arange(group_size)
    ring = (at + 1) % group_size
    if slots <= 1:
        columns = [ring]
    elif topology == "cube" and group_size == 8:
        columns = [at // 4 * 4 + (at - 1) % 4, np.where(at < 4, 4 + (at + 2) % 4, at - 4)]
    else:
        per_row = ranks_per_node if 1 < ranks_per_node < group_size else _nearest_factor(group_size)
        columns = [(at + per_row) % group_size, at // per_row * per_row + (at + 1) % per_row]
        columns = [ring if np.array_equal(column, at) else column for column in columns]
    in_group = np.arange(num_ranks) % group_size
    first_of_group = np.arange(num_ranks) - in_group
    chosen = [first_of_group + columns[k % len(columns)][in_group] for k in range(slots)]
    return group_size, np.array(chosen, np.int64).reshape(slots, num_ranks).T


def _nearest_factor(size: int) -> int:
    """The largest factor up to the square root."""
    return max(factor for factor in range(1, size + 1) if size % factor == 0 and factor * factor <= size)


def _reorder(heat_E: Array, home_E: Array, num_ranks: int, group_size: int) -> Array:
    """`[E]`: homes of every group's experts, packed onto its ranks by heat. Groups with uneven homes stay."""
    new_E = home_E.copy()
    for first in range(0, num_ranks, group_size):
        experts = np.flatnonzero((home_E >= first) & (home_E < first + group_size))
        if len(np.unique(np.bincount(home_E[experts] - first, minlength=group_size))) == 1:
            pack, _ = pack_evenly(heat_E[experts].astype(np.float32), group_size)
            new_E[experts] = first + pack
    return new_E


def _hottest(heat_E: Array, home_E: Array, source_RK: Array) -> Array:
    """Replicas `[P, 2]` (expert, rank): in slot k of rank r, the k-th hottest expert of rank `source_RK[r, k]`."""
    hottest_first = np.argsort(-heat_E, kind="stable")
    of_rank = [hottest_first[home_E[hottest_first] == rank] for rank in range(len(source_RK))]
    replicas = [
        (of_rank[source][k], rank)
        for (rank, k), source in np.ndenumerate(source_RK)
        if source != rank and k < len(of_rank[source])
    ]
    return np.array(replicas, np.int64).reshape(-1, 2)


class _Flow:
    """The linear program of all groups at once, since they share nothing: the sum of their busiest ranks is least."""

    def __init__(self, num_ranks: int, group_size: int) -> None:
        self.num_ranks = num_ranks
        self.group_size = group_size
        self.solver = new_solver(_PURPOSE)

    def solve(self, load_E: Array, home_E: Array, replicas_P2: Array) -> Array:
        """`[P]` int64, tokens that each replica gets from its expert's home. Every expert has at most one replica.

        Columns: tokens of each replica, then the busiest rank of each group. Rows: the load of each rank, below the
        busiest of its group.
        """
        num_replicas, num_groups = len(replicas_P2), self.num_ranks // self.group_size
        if not num_replicas:
            return np.empty(0, np.int64)
        most_P = load_E[replicas_P2[:, 0]].astype(np.float64)
        at_home_R = np.bincount(home_E, weights=load_E, minlength=self.num_ranks)
        ranks = np.arange(self.num_ranks)
        highspy = highs(_PURPOSE)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = num_replicas + num_groups, self.num_ranks
        lp.col_cost_ = np.r_[np.full(num_replicas, _COST_OF_A_MOVE), np.ones(num_groups)]
        lp.col_lower_ = np.zeros(lp.num_col_)
        lp.col_upper_ = np.r_[most_P, np.full(num_groups, highspy.kHighsInf)]
        lp.row_lower_ = np.full(self.num_ranks, -highspy.kHighsInf)
        lp.row_upper_ = -at_home_R.astype(np.float64)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.r_[
            np.arange(num_replicas) * 2, num_replicas * 2 + np.arange(num_groups + 1) * self.group_size
        ].astype(np.int32)
        both_ends = np.stack([home_E[replicas_P2[:, 0]], replicas_P2[:, 1]], axis=1).ravel()
        lp.a_matrix_.index_ = np.r_[both_ends, ranks].astype(np.int32)
        lp.a_matrix_.value_ = np.r_[np.tile([-1.0, 1.0], num_replicas), np.full(self.num_ranks, -1.0)]
        self.solver.passModel(lp)
        self.solver.run()
        tokens_P = np.array(self.solver.getSolution().col_value[:num_replicas])
        return np.clip(np.floor(tokens_P + _ROUNDING), 0, most_P).astype(np.int64)


def _split_alike(counts_RE: Array, experts_P: Array, tokens_P: Array) -> Array:
    """Quotas `[P, R]`: every source sends the same part of its tokens, rounded so that a replica's quotas add up."""
    counts_PR = counts_RE[:, experts_P].T
    until_PR = np.cumsum(counts_PR, axis=1) * tokens_P[:, None] // np.maximum(counts_PR.sum(axis=1), 1)[:, None]
    quotas_PR: Array = np.diff(until_PR, axis=1, prepend=0)
    return quotas_PR
