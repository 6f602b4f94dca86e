"""Level one, rank assignment: sequences run on ranks near the experts that they use.

For the network only the node of a rank matters. Two sequences of a micro-step are swapped if more of their rows are
then computed on their own node. No rank may exceed the token budget, or the largest attention of a rank in the
micro-step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.kernels import kernel
from trimtab.planner.placement.placement import Placement
from trimtab.planner.schedule.schedule import Schedule
from trimtab.planner.schedule.sequence_counts import SequenceCounts

PARTNERS = 64
SWEEPS = 4


class RankAssignment(NamedTuple):
    """Sequences of one micro-step and expert-parallel group, and the ranks that they run on.

    Attributes:
        lengths_S: `[S]` int64 tokens.
        work_S: `[S]` int64 attention.
        rows_SN: `[S, N]` int64 rows for the homes on each node.
        rank_S: `[S]` int64; changed.
    """

    lengths_S: Array
    work_S: Array
    rows_SN: Array
    rank_S: Array


def assign_ranks(
    lengths: Array,
    schedule: Schedule,
    rows_SN: Array,
    token_budget: int,
    *,
    num_groups: int = 1,
    work: Array | None = None,
) -> Schedule:
    """Returns the schedule with sequences swapped between ranks of the same micro-step and expert-parallel group.

    Args:
        lengths: `[S]` tokens of each sequence.
        rows_SN: `[S, N]` int64 rows of each sequence for the homes on each of a group's N nodes.
        token_budget: most tokens of a rank in one micro-step.
        work: `[S]` integer attention of each sequence; its tokens by default.
    """
    num_nodes = rows_SN.shape[1]
    if num_nodes == 1:
        return schedule
    ranks_per_node = schedule.num_ranks // num_groups // num_nodes
    ranks_per_group = schedule.num_ranks // num_groups
    bin_S = schedule.micro_step.astype(np.int64) * num_groups + schedule.rank // ranks_per_group
    order = np.argsort(bin_S, kind="stable")
    starts = np.searchsorted(bin_S[order], np.arange(schedule.num_micro_steps * num_groups + 1))
    rank_S = (schedule.rank % ranks_per_group).astype(np.int64)
    work_S = lengths if work is None else work
    for b in range(len(starts) - 1):
        members = order[starts[b] : starts[b + 1]]
        assignment = RankAssignment(lengths[members], work_S[members], rows_SN[members], rank_S[members])
        _swap_ranks(assignment, ranks_per_group, ranks_per_node, token_budget)
        rank_S[members] = assignment.rank_S
    group_S = schedule.rank // ranks_per_group
    return replace(schedule, rank=(group_S * ranks_per_group + rank_S).astype(np.int32))


def rows_by_node(sequences: SequenceCounts, placement: Placement, cluster: ClusterSpec) -> Array:
    """Rows `[S, N]` int64 of each sequence for each node in all layers, with experts at their homes."""
    rows_SN = np.zeros((sequences.num_sequences, cluster.nodes), np.int64)
    node_LE = placement.home // np.int16(cluster.ranks_per_node)
    for layer in range(sequences.num_layers if cluster.nodes > 1 else 0):
        rows_SN += sequences.rows_by_place(node_LE, cluster.nodes, np.array([layer]))[:, 0]
    return rows_SN


@kernel
def _swap_ranks(assignment, num_ranks, ranks_per_node, token_budget):  # type: ignore[no-untyped-def]
    lengths_S, work_S, rows_SN, rank_S = assignment
    num_sequences = len(rank_S)
    filled = np.zeros(num_ranks, np.int64)
    work = np.zeros(num_ranks, np.int64)
    for s in range(num_sequences):
        filled[rank_S[s]] += lengths_S[s]
        work[rank_S[s]] += work_S[s]
    most_work = np.int64(0)
    for r in range(num_ranks):
        most_work = max(most_work, work[r])
    stride = max(1, num_sequences // PARTNERS)
    for sweep in range(SWEEPS):
        improved = False
        for i in range(num_sequences):
            for k in range((i + sweep) % stride, num_sequences, stride):
                a, b = rank_S[i], rank_S[k]
                node_a, node_b = a // ranks_per_node, b // ranks_per_node
                if node_a == node_b:
                    continue
                gain = rows_SN[i, node_b] + rows_SN[k, node_a] - rows_SN[i, node_a] - rows_SN[k, node_b]
                longer = lengths_S[k] - lengths_S[i]
                heavier = work_S[k] - work_S[i]
                if (
                    gain <= 0
                    or filled[a] + longer > token_budget
                    or filled[b] - longer > token_budget
                    or work[a] + heavier > most_work
                    or work[b] - heavier > most_work
                ):
                    continue
                rank_S[i], rank_S[k] = b, a
                filled[a] += longer
                filled[b] -= longer
                work[a] += heavier
                work[b] -= heavier
                improved = True
        if not improved:
            break
