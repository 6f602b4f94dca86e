"""`assign_unread`: experts of tokens whose output nothing uses, so that the ranks have equally many rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts


def assign_unread(trace: RoutingTrace, unread_T: Array, layers: Sequence[HomeExperts], topology: Topology) -> None:
    """Give this rank's unread tokens distinct experts in every layer, in place.

    Collective over the expert-parallel group. The rows of all ranks' unread tokens go to the ranks with the fewest
    other rows, at the present homes, and evenly to the experts of a rank.

    Args:
        trace: each micro-step as one sequence; unread tokens have unknown routes.
        unread_T: `[T]` bool, the unread tokens.
        layers: this rank's experts of each layer.
    """
    num_micro_steps, top_k, rank = trace.num_sequences, trace.top_k, topology.rank
    micro_step_T = np.repeat(np.arange(num_micro_steps), trace.sequence_lengths)
    counts_MLE = count_experts(trace, np.arange(num_micro_steps), num_micro_steps)
    loads_LMR = np.stack([counts_MLE[:, i, homes.places.experts_RH].sum(axis=2) for i, homes in enumerate(layers)])
    unread_RM = np.zeros((topology.num_ranks, num_micro_steps), np.int64)
    unread_RM[rank] = np.bincount(micro_step_T[unread_T], minlength=num_micro_steps)
    sums = [torch.from_numpy(array.astype(np.int64)) for array in (loads_LMR, unread_RM)]
    for array in sums:
        dist.all_reduce(array, group=topology.expert_control)
    loads_LMR, unread_RM = (array.numpy() for array in sums)
    for micro_step in np.flatnonzero(unread_RM[rank]).tolist():
        mine, total = np.flatnonzero(unread_T & (micro_step_T == micro_step)), int(unread_RM[:, micro_step].sum())
        places_K = np.arange(top_k) * total
        places_UK = _numbers(unread_RM[:, micro_step], rank)[:, None] + places_K
        for layer, homes in enumerate(layers):
            experts_RH = homes.places.experts_RH
            num_homes = experts_RH.shape[1]
            rows_R = _levelling(loads_LMR[layer, micro_step], top_k * total, num_homes * total)
            rows_RH = rows_R[:, None] // num_homes + (np.arange(num_homes) < rows_R[:, None] % num_homes)
            # Token u has the experts at places u, u + total, u + 2 total ... of a list of all rows by expert. They are
            # distinct, since no expert has more than `total` rows.
            ends = np.cumsum(rows_RH.reshape(-1))
            trace.expert_ids[mine, layer] = experts_RH.reshape(-1)[np.searchsorted(ends, places_UK, side="right")]


def _numbers(unread_R: Array, rank: int) -> Array:
    """Numbers of a rank's unread tokens among those of all ranks, which are mixed evenly."""
    parts = [(np.arange(count) + 0.5) / max(count, 1) for count in unread_R.tolist()]
    numbers = np.empty(int(unread_R.sum()), np.int64)
    numbers[np.argsort(np.concatenate(parts), kind="stable")] = np.arange(len(numbers))
    start = int(unread_R[:rank].sum())
    return numbers[start : start + int(unread_R[rank])]


def _levelling(loads_R: Array, rows: int, most: int) -> Array:
    """How many of `rows` to add to each rank, at most `most`, so that the largest of these loads is smallest."""

    def added(level: int) -> Array:
        return np.clip(level - loads_R, 0, most)

    low, high = int(loads_R.min()), int(loads_R.max()) + most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if added(middle).sum() <= rows else (low, middle - 1)
    rows_R = added(low)
    grows_R = added(low + 1) > rows_R
    return rows_R + (grows_R & (np.cumsum(grows_R) <= rows - rows_R.sum()))
