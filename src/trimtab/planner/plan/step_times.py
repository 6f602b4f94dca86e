"""Times of a step outside the exchange of rows: dense parts, moves of homes, refreshing the mirrors."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.planner.replicas.paths import HOST, layers_of_replicas
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.planner.schedule.schedule import Schedule


def dense_seconds(schedule: Schedule, lengths: Array, costs: OperationCosts) -> tuple[Array, Array]:
    """Forward of a layer's dense parts, and of everything outside MoE layers, both `[M, R]` float64.

    Args:
        schedule: on R ranks.
        lengths: `[S]` tokens of each sequence.
    """
    shape = schedule.num_micro_steps, schedule.num_ranks
    place = schedule.micro_step, schedule.rank
    inside_MR, outside_MR = np.full(shape, costs.layer_s), np.full(shape, costs.outer_s)
    for amounts, in_layer_s, outer_s in (
        (lengths, costs.token_s, costs.outer_token_s),
        (np.square(lengths, dtype=np.float64), costs.square_s, costs.outer_square_s),
        (costs.pairs_within_reach(lengths), costs.reach_s, costs.outer_reach_s),
    ):
        sums_MR = np.zeros(shape)
        np.add.at(sums_MR, place, amounts)
        inside_MR += in_layer_s * sums_MR
        outside_MR += outer_s * sums_MR
    return inside_MR, outside_MR


def exchange_seconds(schedule: Schedule, lengths: Array, costs: OperationCosts) -> tuple[Array, Array]:
    """What ranks that share a sequence send each other: in a MoE layer, and outside of MoE layers, `[2, M, R]` float64.

    Of forward and backward. The ring of context parallelism runs beside attention; what takes longer counts.

    Args:
        lengths: `[S]` tokens of each piece.
    """
    shape = schedule.num_micro_steps, schedule.num_ranks
    tokens_MR, attention_MR = np.zeros(shape), np.zeros(shape)
    place = schedule.micro_step, schedule.rank
    np.add.at(tokens_MR, place, lengths)
    pairs_S = costs.pairs_within_reach(lengths)
    np.add.at(attention_MR, place, costs.square_s * np.square(lengths, dtype=np.float64) + costs.reach_s * pairs_S)
    # Backward sends keys and values again, and their gradients.
    ring_2MR = tokens_MR * costs.ring_token_s * np.array([1.0, 2.0])[:, None, None]
    beside_2MR = attention_MR * np.array([1.0, costs.dense_backward])[:, None, None]
    inside_2MR = tokens_MR * costs.exchange_token_s + np.maximum(0.0, ring_2MR - beside_2MR)
    return inside_2MR, np.stack([tokens_MR * costs.outer_exchange_token_s] * 2)


def moving_seconds(before_LE: Array, home_LE: Array, ranks_per_node: int, costs: OperationCosts) -> float:
    """Time of all moves of homes at once; the busiest link determines it.

    Args:
        before_LE, home_LE: `[L, E]` integers, homes before and after.
    """
    moved = before_LE != home_LE
    was, is_now = before_LE[moved].astype(np.int64), home_LE[moved].astype(np.int64)
    near = was // ranks_per_node == is_now // ranks_per_node
    return max(
        float(np.bincount(ends[chosen], minlength=1).max()) * seconds
        for chosen, seconds in ((near, costs.near_state_s), (~near, costs.far_state_s))
        for ends in (was, is_now)
    )


def refresh_seconds(
    home_LE: Array, replicas: ReplicaTable, paths_P: Array, num_ranks: int, ranks_per_node: int, costs: OperationCosts
) -> float:
    """Time to write the nodes' mirrors: home ranks copy to their own node's memory, or send to other nodes.

    Args:
        home_LE: `[L, E]` integers.
        replicas: of M * L instances, those of a micro-step next to each other.
        paths_P: `[P]` uint8; the mirror of a node holds the experts of its replicas from host memory.
    """
    host = np.flatnonzero(paths_P == HOST)
    if not len(host):
        return 0.0
    num_layers, num_experts = home_LE.shape
    layer_P = layers_of_replicas(replicas.replica_starts, num_layers)[host]
    node_P = replicas.ranks[host].astype(np.int64) // ranks_per_node
    entries = np.unique((node_P * num_layers + layer_P) * num_experts + replicas.experts[host])
    node_X, place_X = np.divmod(entries, num_layers * num_experts)
    home_X = home_LE.reshape(-1)[place_X].astype(np.int64)
    near_X = home_X // ranks_per_node == node_X
    written_R, sent_R = (np.bincount(home_X[chosen], minlength=num_ranks) for chosen in (near_X, ~near_X))
    far_s = costs.far_weights_s or costs.host_weights_s
    return float(max(written_R.max() * costs.host_weights_s, sent_R.max() * far_s))
