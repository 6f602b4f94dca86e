"""Serving placement: experts and copies in fixed slots, made once from a trace.

For rollout engines, which load a placement at startup and keep it. EPLB chooses the number of copies of each expert and
places them by the load of the whole trace (`rebalance`). Then copies are swapped as in `place_experts`, while that
makes ranks and nodes more even in every part of the trace, not only on average.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner.placement.home_swaps import place_experts
from trimtab.planner.placement.packing import rebalance
from trimtab.trace.counting import count_experts
from trimtab.trace.store import TraceReader

PARTS = 32


def count_parts(trace: TraceReader, num_parts: int = PARTS, group_S: Array | None = None) -> Array:
    """Token counts `[M, L, E]` int64 of M parts of a trace with about equal numbers of tokens; reads a chunk at a time.

    Args:
        group_S: `[S]` a number for each sequence: every group from 0 on is divided into M parts, which come after one
            another. Sequences with negative numbers don't count. By default there is one group.
    """
    lengths = trace.facts.lengths
    group_S = np.zeros(len(lengths), np.int64) if group_S is None else group_S
    num_groups = int(group_S.max(initial=0)) + 1
    part_S = np.full(len(lengths), num_groups * num_parts)
    for group in range(num_groups):
        members = group_S == group
        tokens_S = lengths[members]
        middle_S = np.cumsum(tokens_S) - (tokens_S + 1) // 2
        part_S[members] = group * num_parts + np.minimum(
            middle_S * num_parts // max(1, int(tokens_S.sum())), num_parts - 1
        )
    counts_MLE = np.zeros((num_groups * num_parts + 1, trace.empty.num_layers, trace.empty.num_experts), np.int64)
    done = 0
    for chunk in trace.chunks():
        counts_MLE += count_experts(chunk, part_S[done : done + chunk.num_sequences], len(counts_MLE), np.int64)
        done += chunk.num_sequences
    return counts_MLE[:-1]


def fill_slots(counts_MLE: Array, num_slots: int, num_ranks: int, ranks_per_node: int) -> Array:
    """The expert in each slot, `[L, num_slots]` int64, slots of rank 0 first.

    Args:
        counts_MLE: `[M, L, E]` tokens by part of the trace, layer and expert.
        num_slots: experts and their copies; the same number on every rank.

    Raises:
        InputError: if the ranks don't divide the slots, or the nodes the ranks; or if a rank has more slots than there
            are experts, since none has two of one expert.
    """
    num_experts = counts_MLE.shape[2]
    if num_slots % num_ranks or num_slots < num_experts:
        spare = next(n for n in range(num_ranks) if (num_experts + n) % num_ranks == 0)
        raise InputError(
            f"{num_ranks} ranks don't divide {num_experts} experts and {num_slots - num_experts} redundant ones; "
            f"use {spare} redundant experts, or {spare + num_ranks}"
        )
    if num_ranks % ranks_per_node:
        raise InputError(f"{ranks_per_node} ranks a node don't divide {num_ranks} ranks")
    if num_slots > num_ranks * num_experts:
        raise InputError(
            f"{num_ranks} ranks have {num_slots // num_ranks} slots each, and there are {num_experts} experts; use "
            f"{(num_ranks - 1) * num_experts} redundant experts at most"
        )
    rank_P = np.arange(num_slots) // (num_slots // num_ranks)
    slots_LP = np.empty((counts_MLE.shape[1], num_slots), np.int64)
    for layer in range(len(slots_LP)):
        counts_E = counts_MLE[:, layer].sum(axis=0)
        expert_P, copies_E = _at_most(num_ranks, counts_E, *rebalance(counts_E, num_slots, 1, 1, num_ranks))
        counts_MP = counts_MLE[:, layer, expert_P] // copies_E[expert_P]
        moved_P = place_experts(counts_MP, rank_P, num_ranks, ranks_per_node)
        _separate(expert_P, moved_P, counts_MP.sum(axis=0), num_ranks)
        slots_LP[layer] = expert_P[np.argsort(moved_P, kind="stable")]
    return slots_LP


def _at_most(most: int, counts_E: Array, expert_P: Array, copies_E: Array) -> tuple[Array, Array]:
    """The experts of slots, and copies of experts, if no expert has more than `most`; others get what it has above."""
    expert_P, copies_E = expert_P.copy(), copies_E.copy()
    for expert in np.flatnonzero(copies_E > most):
        for slot in np.flatnonzero(expert_P == expert)[most:]:
            other = int(np.where(copies_E < most, counts_E / copies_E, -1.0).argmax())
            expert_P[slot] = other
            copies_E[expert] -= 1
            copies_E[other] += 1
    return expert_P, copies_E


def _separate(expert_P: Array, rank_P: Array, load_P: Array, num_ranks: int) -> None:
    """Swap the ranks of slots until no rank has two copies of an expert, each time with the slot that keeps the two
    ranks most even.

    No expert has more copies than there are ranks, so a rank lacks one that another has twice. If no swap were
    possible, all its experts would be others of that rank's: fewer, so it has one twice, too, and so on without end.
    """
    has_RE = np.zeros((num_ranks, int(expert_P.max()) + 1), np.int64)
    np.add.at(has_RE, (rank_P, expert_P), 1)
    while len(twice := np.flatnonzero(has_RE[rank_P, expert_P] > 1)):
        for slot in twice:
            expert, rank = expert_P[slot], rank_P[slot]
            fitting = np.flatnonzero((has_RE[rank_P, expert] == 0) & (has_RE[rank, expert_P] == 0))
            if len(fitting):
                break
        loads_R, more = np.bincount(rank_P, load_P, num_ranks), load_P[slot] - load_P[fitting]
        other = fitting[np.maximum(loads_R[rank] - more, loads_R[rank_P[fitting]] + more).argmin()]
        rank_P[[slot, other]] = rank_P[[other, slot]]
        np.add.at(has_RE, ([rank, rank, rank_P[slot], rank_P[slot]], [expert, expert_P[other]] * 2), [-1, 1, 1, -1])


def slot_loads(counts_MLE: Array, slots_LP: Array, num_ranks: int) -> Array:
    """Tokens `[M, L, R]` float64 of every rank, if copies share their expert's tokens equally."""
    num_parts, num_layers, num_experts = counts_MLE.shape
    loads_MLR = np.empty((num_parts, num_layers, num_ranks))
    for layer, expert_P in enumerate(slots_LP):
        copies_E = np.bincount(expert_P, minlength=num_experts)
        shares_MP = counts_MLE[:, layer, expert_P] / copies_E[expert_P]
        loads_MLR[:, layer] = shares_MP.reshape(num_parts, num_ranks, -1).sum(axis=2)
    return loads_MLR


def sglang_map(slots_LP: Array, layers: Array, num_experts: int, num_layers: int | None = None) -> dict[str, Any]:
    """What SGLang's `--init-expert-location` reads, as JSON.

    Args:
        layers: `[L]` the decoder layer of each row of `slots_LP`.
        num_layers: decoder layers, by default up to the last with experts; those without have SGLang's default order.

    Raises:
        InputError: if there are fewer.
    """
    last = int(layers.max())
    if num_layers is not None and num_layers <= last:
        raise InputError(f"--num-layers is {num_layers}; the trace has decoder layer {last}")
    all_LP = np.tile(np.arange(slots_LP.shape[1]) % num_experts, (num_layers or last + 1, 1))
    all_LP[layers] = slots_LP
    return {"physical_to_logical_map": all_LP.tolist()}
