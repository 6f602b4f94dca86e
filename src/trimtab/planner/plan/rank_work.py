"""Work of every rank in every instance under a plan, in seconds, without waiting."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import LEAST_USED, MOST_USED, OperationCosts
from trimtab.kernels import kernel
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.timeline.layer_passes import RankWork

# Experts of so many ranks a group at most are counted by group: with more, hardly any two of a token's are on a rank.
RANKS_PER_GROUP = 2


def rank_work(
    replicas: ReplicaTable,
    home_LE: Array,
    counts_MLRE: Array,
    ranks_per_node: int,
    costs: OperationCosts,
    *,
    hops: int = 1,
) -> RankWork:
    """The work of every rank in M micro-steps and L layers.

    Args:
        replicas: of M * L instances, those of a micro-step next to each other.
        home_LE: `[L, E]` int16.
        counts_MLRE: `[M, L, R, E]` int32 rows by source rank and expert (`Workload.estimated_MLRE`).
        hops: 2 if moved tokens are first sent to the home rank.
    """
    shape = counts_MLRE.shape[:3]
    experts, moved, near, far, hop = (np.zeros(shape) for _ in range(5))
    work = RankWork(experts, moved, near, far, hop, np.zeros(shape, np.int64))
    _fill(counts_MLRE, home_LE, replicas, (ranks_per_node, hops), costs, work)
    return work


@kernel
def _fill(counts_MLRE, home_LE, replicas, limits, costs, work):  # type: ignore[no-untyped-def]
    """Adds the work of all instances to `work`, which is 0; `limits` are ranks per node and hops."""
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLRE.shape
    per_node, hops = limits
    # Transfers of an instance over the links of every rank: inside its node or between nodes, out or in.
    sent_22R, moving = np.empty((2, 2, num_ranks)), np.empty((2, num_ranks), np.int64)
    # Rows of a source that stay at home, and a place without rows.
    at_home, kept_E = np.empty(num_experts, np.int64), np.zeros(num_experts + 1)
    # The last quota of every source, and the one before each quota.
    last_R, before_Q = np.empty(num_ranks, np.int64), np.empty(len(replicas.tokens), np.int64)
    replica_Q = np.empty(len(replicas.tokens), np.int64)
    # Of a source: its rows for each rank, the part of its tokens that has none there, and copies that it may use.
    rows_R, without_R, copies_R = np.empty(num_ranks), np.empty(num_ranks), np.empty(num_ranks, np.int64)
    kept_R, to_R = np.empty(num_ranks), np.empty(num_ranks)
    # Of a source, rows by place and group of experts, where a token's experts are in few groups. A place is a rank, or
    # a node.
    groups = costs.expert_groups if costs.top_k > 1 and num_experts % costs.expert_groups == 0 else 1
    place_size = 1 if num_ranks <= RANKS_PER_GROUP * groups else per_node
    rows_PG, group_size = np.empty((num_ranks // place_size, groups)), num_experts // groups
    for m in range(num_micro_steps):
        for layer in range(num_layers):
            home_E = home_LE[layer]
            experts_HR = _experts_of_ranks(home_E, num_ranks)
            sent_22R[:] = 0.0
            moving[:] = 0
            at_home[:] = 0
            last_R[:] = -1
            instance = m * num_layers + layer
            for p in range(replicas.replica_starts[instance], replicas.replica_starts[instance + 1]):
                expert, rank = replicas.experts[p], replicas.ranks[p]
                share = np.int64(0)
                for q in range(replicas.quota_starts[p], replicas.quota_starts[p + 1]):
                    share += replicas.tokens[q]
                    replica_Q[q] = p
                    before_Q[q] = last_R[replicas.sources[q]]
                    last_R[replicas.sources[q]] = q
                at_home[expert] -= share
                work.loads_MLR[m, layer, rank] += share
                if hops == 1:
                    work.experts_MLR[m, layer, rank] += _copy_seconds(share, costs)
                else:
                    work.moved_MLR[m, layer, rank] += _copy_seconds(share, costs)
                    moving[0, home_E[expert]] += share
                    moving[1, rank] += share
            for source in range(num_ranks):
                counts_E, rows = counts_MLRE[m, layer, source], np.int64(0)
                for e in range(num_experts):
                    at_home[e] += counts_E[e]
                for e in range(num_experts):
                    kept_E[e] = counts_E[e]
                    rows += counts_E[e]
                tokens = max(1.0, rows / costs.top_k)
                part = 1.0 / tokens
                for rank in range(num_ranks):
                    rows_R[rank], without_R[rank], copies_R[rank] = 0.0, 1.0, len(experts_HR)
                q = last_R[source] if hops == 1 else -1
                rows_PG[:] = 0.0
                while q >= 0:
                    expert, rank = replicas.experts[replica_Q[q]], replicas.ranks[replica_Q[q]]
                    if groups > 1:
                        rows_PG[rank // place_size, expert // group_size] += replicas.tokens[q]
                    kept_E[expert] -= replicas.tokens[q]
                    rows_R[rank] += replicas.tokens[q]
                    without_R[rank] *= max(0.0, 1.0 - replicas.tokens[q] * part)
                    copies_R[rank] += 1
                    q = before_Q[q]
                # Short loops, which the compiler turns into vector instructions.
                for expert_R in experts_HR:
                    for rank in range(num_ranks):
                        kept_R[rank] = kept_E[expert_R[rank]]
                    for rank in range(num_ranks):
                        rows_R[rank] += kept_R[rank]
                    for rank in range(num_ranks):
                        rest = 1.0 - kept_R[rank] * part
                        without_R[rank] *= rest if rest > 0.0 else 0.0
                if groups > 1:
                    for e in range(num_experts):
                        rows_PG[home_E[e] // place_size, e // group_size] += kept_E[e]
                sent = rows_R, without_R, copies_R, rows_PG, to_R
                _send(source, tokens, sent, np.int64(per_node), costs, sent_22R)
            for e in range(num_experts):
                work.loads_MLR[m, layer, home_E[e]] += at_home[e]
                work.experts_MLR[m, layer, home_E[e]] += _copy_seconds(at_home[e], costs)
            for r in range(num_ranks):
                work.near_MLR[m, layer, r] = max(sent_22R[0, 0, r], sent_22R[0, 1, r]) * costs.near_row_s
                work.far_MLR[m, layer, r] = max(sent_22R[1, 0, r], sent_22R[1, 1, r]) * costs.far_row_s
                work.hop_MLR[m, layer, r] = max(moving[0, r], moving[1, r]) * costs.hop_row_s


@kernel
def _experts_of_ranks(home_E, num_ranks):  # type: ignore[no-untyped-def]
    """`[H, R]` uint32, the experts of every rank, and E where a rank has fewer than others."""
    count_R = np.zeros(num_ranks, np.int64)
    for e in range(len(home_E)):
        count_R[home_E[e]] += 1
    experts_HR = np.full((count_R.max(), num_ranks), len(home_E), np.uint32)
    count_R[:] = 0
    for e in range(len(home_E)):
        experts_HR[count_R[home_E[e]], home_E[e]] = e
        count_R[home_E[e]] += 1
    return experts_HR


@kernel
def _send(source, tokens, sent, per_node, costs, sent_22R):  # type: ignore[no-untyped-def]
    """Adds a source's transfers to those of all links.

    With forwarding, rows for another node go to the rank there with the source's local number, and from it to others; a
    token once to a node and once to a rank.
    """
    near_out, near_in, far_out, far_in = sent_22R[0, 0], sent_22R[0, 1], sent_22R[1, 0], sent_22R[1, 1]
    rows_R, without_R, copies_R, rows_PG, to_R = sent
    groups = rows_PG.shape[1]
    if groups > 1:
        chosen = _chosen_groups(rows_PG, costs)
    places_of_node = per_node * len(rows_PG) // len(rows_R)
    for to in range(len(rows_R)):
        if groups > 1 and len(rows_PG) == len(rows_R):
            to_R[to] = tokens * _used_by_group(rows_PG[to : to + 1], chosen, costs)
        else:
            to_R[to] = _transfers(rows_R[to], without_R[to], copies_R[to], tokens, costs.top_k)
    for first in range(0, len(rows_R), per_node):
        relay, rows, without, copies = first + source % per_node, 0.0, 1.0, np.int64(0)
        for to in range(first, first + per_node):
            rows += rows_R[to]
            without *= without_R[to]
            copies += copies_R[to]
        if relay != source:
            if groups > 1:
                place = first // per_node * places_of_node
                to_node = tokens * _used_by_group(rows_PG[place : place + places_of_node], chosen, costs)
            else:
                to_node = _transfers(rows, without, copies, tokens, costs.top_k)
            far_out[source] += to_node
            if not costs.forwards:
                for to in range(first, first + per_node):
                    far_in[to] += rows_R[to]
                    to_R[to] = 0.0
                continue
            far_in[relay] += to_node
        to_R[relay] = 0.0
        for to in range(first, first + per_node):
            near_out[relay] += to_R[to]
    for to in range(len(rows_R)):
        near_in[to] += to_R[to]


@kernel
def _transfers(rows, without, copies, tokens, top_k):  # type: ignore[no-untyped-def]
    """Transfers of rows to a place, if those of a token share one.

    How many of T tokens use experts of a place follows from counts of rows if a token's experts do not depend on each
    other: T (1 - product of 1 - p), with p the part of the tokens that use an expert there. As the k experts of a token
    differ, it is rather more: with more than k experts there rather T (1 - (1 - x)^k), with x the part of the rows.
    Where the router limits a token to groups of experts, see `transfers_to`.

    Args:
        without: the product.
        copies: of experts there.
    """
    if top_k == 1:
        return rows
    if copies > top_k:
        rest = max(0.0, 1.0 - rows / (tokens * top_k))
        power, exponent = 1.0, top_k
        while exponent:
            if exponent & 1:
                power *= rest
            rest *= rest
            exponent >>= 1
        without = min(without, power)
    return tokens * (1.0 - without)


@kernel
def _chosen_groups(rows_PG, costs):  # type: ignore[no-untyped-def]
    """Of a source's tokens by group: its rows, at least 1; the odds that a token chooses it; the part of a token's
    rows beyond one a group that are in it then. And the sum of the products of odds of `groups_per_token` groups.

    As in `transfers_to`.
    """
    groups = rows_PG.shape[1]
    total_G, odds_G, others_G, rows = np.zeros(groups), np.empty(groups), np.empty(groups), 0.0
    for place in range(len(rows_PG)):
        for g in range(groups):
            total_G[g] += rows_PG[place, g]
    for g in range(groups):
        rows += total_G[g]
    for g in range(groups):
        share = total_G[g] / max(rows, 1.0)
        chosen = min(max(costs.groups_per_token * share, LEAST_USED), MOST_USED)
        odds_G[g] = chosen / (1.0 - chosen)
        others_G[g] = max(0.0, costs.top_k * share / chosen - 1.0) / max(1, costs.top_k - costs.groups_per_token)
        total_G[g] = max(total_G[g], 1.0)
    return total_G, odds_G, others_G, _symmetric_sum(odds_G, costs.groups_per_token)


@kernel
def _used_by_group(rows_PG, chosen, costs):  # type: ignore[no-untyped-def]
    """The part of a source's tokens that have a row at a place, for its rows there by part of the place and group."""
    total_G, odds_G, others_G, products = chosen
    missed_G = np.empty(len(total_G))
    for g in range(len(total_G)):
        rows = 0.0
        for part in range(len(rows_PG)):
            rows += rows_PG[part, g]
        there = rows / total_G[g]
        rest, power = max(0.0, 1.0 - there * others_G[g]), odds_G[g] * max(0.0, 1.0 - there)
        for _ in range(max(1, costs.top_k - costs.groups_per_token)):
            power *= rest
        missed_G[g] = power
    return 1.0 - _symmetric_sum(missed_G, costs.groups_per_token) / products


@kernel
def _symmetric_sum(values_G, degree):  # type: ignore[no-untyped-def]
    """The sum of the products of `degree` of the values."""
    sums = np.zeros(degree + 1)
    sums[0] = 1.0
    for value in values_G:
        for size in range(degree, 0, -1):
            sums[size] += value * sums[size - 1]
    return sums[-1]


@kernel
def _copy_seconds(rows, costs):  # type: ignore[no-untyped-def]
    """Forward through one copy of an expert."""
    if rows <= 0:
        return 0.0
    tiles = -(-rows // costs.tile_rows)
    return costs.copy_s + max(tiles * costs.tile_s, costs.weights_s) + rows * costs.row_s


def even_work(counts_MLRE: Array, ranks_per_node: int, costs: OperationCosts) -> RankWork:
    """The experts' work and all rows spread evenly over ranks, with rows from all ranks: the ideal run."""
    num_ranks = counts_MLRE.shape[2]
    near, far = (ranks_per_node - 1) / num_ranks, (num_ranks - ranks_per_node) / num_ranks
    if costs.forwards:
        near += far * (ranks_per_node - 1) / ranks_per_node
    rows_MLE = counts_MLRE.sum(axis=2, dtype=np.int64)
    # Added up one after another, as the kernel does.
    seconds_ML1 = np.cumsum(costs.copy_seconds(rows_MLE), axis=2)[:, :, -1:]
    rows_MLR = counts_MLRE.sum(axis=3, dtype=np.int64)
    share_ML1 = -(-rows_MLE.sum(axis=2, keepdims=True) // num_ranks)
    sent_MLR = np.maximum(rows_MLR, share_ML1)
    nothing_MLR = np.zeros(sent_MLR.shape)
    return RankWork(
        experts_MLR=nothing_MLR + seconds_ML1 / num_ranks,
        moved_MLR=nothing_MLR,
        near_MLR=near * sent_MLR * costs.even_near_row_s,
        far_MLR=far * sent_MLR * costs.even_far_row_s,
        hop_MLR=nothing_MLR,
        loads_MLR=np.broadcast_to(share_ML1, sent_MLR.shape).copy(),
    )
