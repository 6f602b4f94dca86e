"""Level one, schedule: sequences packed so that all ranks of a micro-step take the same time.

A rank's time in a layer is that of its attention and other dense parts, which grows with the squares of lengths, and of
sending its tokens, which grows with their number. Each sequence, slowest first, is assigned to the place (micro-step
and rank) with the least time so far. Places with similar attention then share a micro-step, so that ranks wait little
for each other, and are dealt out over nodes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, StepCosts
from trimtab.planner.schedule.schedule import Schedule, fill_emptiest

PICOSECONDS = 1e12


def pack_by_time(
    packed: Schedule, lengths: Array, top_k: float, cluster: ClusterSpec, costs: StepCosts, token_budget: int
) -> Schedule:
    """Returns a schedule with the micro-steps of `packed`, in which ranks take similar times.

    Mini-batches whose sequences don't fit the token budget this way stay as they are.

    Args:
        packed: packed by length, on the data ranks of all groups.
        lengths: `[S]` int64 tokens of each sequence.
        top_k: rows of a token in a layer.
        cluster: the ranks of one group.
    """
    operations = costs.operations
    dense_S = _dense_seconds(lengths, costs)
    near_s = operations.even_near_row_s * (1 - 1 / cluster.ranks)
    far_s = operations.even_far_row_s * (1 - 1 / cluster.nodes)
    time_S = dense_S + costs.crossings * top_k * max(near_s, far_s) * lengths
    micro_step, rank = packed.micro_step.copy(), packed.rank.copy()
    mini_batch_S = packed.mini_batch_of_micro_step[packed.micro_step]
    for batch in range(int(packed.mini_batch_of_micro_step.max(initial=-1)) + 1):
        steps = np.flatnonzero(packed.mini_batch_of_micro_step == batch)
        members = np.flatnonzero(mini_batch_S == batch)
        # Integers decide, so that plans are the same on every machine.
        cost_N = np.rint(time_S[members] * PICOSECONDS).astype(np.int64)
        slowest_first = np.argsort(-cost_N, kind="stable")
        places = len(steps) * packed.num_ranks
        place_N = fill_emptiest(slowest_first, cost_N, lengths[members], places, token_budget)
        if place_N.min(initial=0) < 0:
            continue
        attention_P = np.bincount(place_N, dense_S[members], places)
        order = np.argsort(-np.rint(attention_P * PICOSECONDS).astype(np.int64), kind="stable")
        micro_step_P, rank_P = np.empty(len(order), np.int32), np.empty(len(order), np.int32)
        micro_step_P[order] = np.repeat(steps, packed.num_ranks)
        rank_P[order] = np.concatenate([_deal(packed.num_ranks, cluster, m) for m in range(len(steps))])
        micro_step[members], rank[members] = micro_step_P[place_N], rank_P[place_N]
    return replace(packed, micro_step=micro_step, rank=rank)


def dense_rows(lengths: Array, costs: StepCosts) -> Array:
    """Rows `[S]` int64 that take a rank as long as the dense parts of a layer for each sequence."""
    return np.rint(_dense_seconds(lengths, costs) / costs.computed_row_s).astype(np.int64)


def _dense_seconds(lengths: Array, costs: StepCosts) -> Array:
    """Seconds `[S]` of a layer's dense parts, over all passes of a step."""
    operations = costs.operations
    forward_S = operations.token_s * lengths + operations.square_s * np.square(lengths, dtype=np.float64)
    forward_S += operations.reach_s * operations.pairs_within_reach(lengths)
    return (costs.forwards + operations.dense_backward) * forward_S


def _deal(num_ranks: int, cluster: ClusterSpec, micro_step: int) -> Array:
    """`[num_ranks]` int32, the data rank of each place of a micro-step, those with most attention first.

    Neighbouring places belong to the same group, to different nodes, and to ranks with different numbers in their
    nodes. Groups take turns, so that none always has the slowest places.
    """
    place = np.arange(num_ranks)
    groups = num_ranks // cluster.ranks
    group, inside = place // cluster.ranks, place % cluster.ranks
    node, local = inside % cluster.nodes, inside // cluster.nodes
    rank = node * cluster.ranks_per_node + (local + node) % cluster.ranks_per_node
    return ((group + micro_step) % groups * cluster.ranks + rank).astype(np.int32)
