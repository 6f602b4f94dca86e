"""EPLB's packing: copies of hot experts, packed evenly onto nodes and ranks.

Source: DeepSeek's Expert Parallelism Load Balancer (github.com/deepseek-ai/EPLB). Outputs are the same except for the
order of copies with equal loads: the source uses an unstable sort, which differs between processors; ours sorts by
index.
"""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.kernels import copy_values, kernel


def rebalance(load_E: Array, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int) -> tuple[Array, Array]:
    """EPLB's plan for one layer.

    Groups of experts are packed onto nodes, experts copied inside each node, and copies packed onto its ranks. If the
    nodes don't divide the groups, all ranks count as one node and all experts as one group.

    Args:
        load_E: `[E]` tokens of each expert. Compared as float32, as in the source.
        num_slots: physical experts over all ranks, copies included.

    Returns:
        `[num_slots]` int64, the expert in each slot (slots of rank 0 first), and `[E]` int64, copies of each expert.

    Raises:
        InputError: if the groups don't divide the experts, or the ranks the slots.
    """
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    if len(load_E) % num_groups or num_slots % num_ranks or num_ranks % num_nodes or num_slots < len(load_E):
        raise InputError(
            f"EPLB can't place {len(load_E)} experts of {num_groups} groups in {num_slots} slots on {num_ranks} ranks; "
            "groups should divide experts, and ranks slots"
        )
    return _rebalance(np.asarray(load_E).astype(np.float32), num_slots, num_groups, num_nodes, num_ranks)


@kernel
def _rebalance(load_E, num_slots, num_groups, num_nodes, num_ranks):  # type: ignore[no-untyped-def]
    num_experts = len(load_E)
    group_size = num_experts // num_groups
    experts_per_node = num_experts // num_nodes
    slots_per_node = num_slots // num_nodes
    slots_per_rank = num_slots // num_ranks

    group_load_G = np.zeros(num_groups, np.float32)
    for e in range(num_experts):
        group_load_G[e // group_size] += load_E[e]
    node_G, place_G = pack_evenly(group_load_G, num_nodes)
    expert_N = np.empty(num_experts, np.int64)  # experts in the order of nodes
    for e in range(num_experts):
        group = e // group_size
        expert_N[node_G[group] * experts_per_node + place_G[group] * group_size + e % group_size] = e

    expert_of_slot = np.empty(num_slots, np.int64)
    copies_E = np.ones(num_experts, np.int64)
    for node in range(num_nodes):
        experts = expert_N[node * experts_per_node : (node + 1) * experts_per_node]
        expert_of_copy = np.empty(slots_per_node, np.int64)
        copy_values(experts, expert_of_copy)
        for copy in range(experts_per_node, slots_per_node):
            hottest = experts[0]
            for e in experts:
                if _share(load_E[e], copies_E[e]) > _share(load_E[hottest], copies_E[hottest]):
                    hottest = e
            expert_of_copy[copy] = hottest
            copies_E[hottest] += 1
        share_of_copy = np.empty(slots_per_node, np.float32)
        for copy in range(slots_per_node):
            share_of_copy[copy] = _share(load_E[expert_of_copy[copy]], copies_E[expert_of_copy[copy]])
        rank_of_copy, place_of_copy = pack_evenly(share_of_copy, num_ranks // num_nodes)
        for copy in range(slots_per_node):
            slot = node * slots_per_node + rank_of_copy[copy] * slots_per_rank + place_of_copy[copy]
            expert_of_slot[slot] = expert_of_copy[copy]
    return expert_of_slot, copies_E


@kernel
def pack_evenly(weight_N, num_packs):  # type: ignore[no-untyped-def]
    """Packs items, heaviest first, into the lightest pack with room; all packs get the same number.

    Args:
        weight_N: `[N]` float32; `num_packs` should divide N.

    Returns:
        `[N]` int64 each: the pack of each item and its position there. With one item per pack, the order is kept.
    """
    per_pack = len(weight_N) // num_packs
    pack_N = np.arange(len(weight_N))
    place_N = np.zeros(len(weight_N), np.int64)
    if per_pack == 1:
        return pack_N, place_N
    weight_of_pack = np.zeros(num_packs, np.float32)
    filled = np.zeros(num_packs, np.int64)
    for n in _heaviest_first(weight_N):
        lightest = -1
        for pack in range(num_packs):
            if filled[pack] < per_pack and (lightest < 0 or weight_of_pack[pack] < weight_of_pack[lightest]):
                lightest = pack
        pack_N[n] = lightest
        place_N[n] = filled[lightest]
        weight_of_pack[lightest] += weight_N[n]
        filled[lightest] += 1
    return pack_N, place_N


@kernel
def _heaviest_first(weight_N):  # type: ignore[no-untyped-def]
    """Stable order `[N]` int64 by descending weight: an insertion sort, which compiles faster than `np.argsort`."""
    order = np.arange(len(weight_N))
    for n in range(1, len(weight_N)):
        place = n
        while place > 0 and weight_N[order[place - 1]] < weight_N[n]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = n
    return order


@kernel
def _share(load, copies):  # type: ignore[no-untyped-def]
    return np.float32(load) / np.float32(copies)
