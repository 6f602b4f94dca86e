"""Transfers of an all-to-all that forwards, counted from the route of every token under a plan.

A token goes to a node once, and to a rank once, whatever number of its experts is there. Counts of rows tell this only
on average (`rank_work`): a replica that takes one of a token's two rows from a node saves no transfer.
"""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.simulator.resampling import ResampledTrace
from trimtab.trace import RoutingTrace

# Part of a source's rows whose route must be known, so that they stand for all.
LEAST_KNOWN = 0.5


def count_transfers(
    plan: StepPlan,
    trace: RoutingTrace | ResampledTrace,
    *,
    hops: int = 1,
    most_rows: int = 1 << 62,
    order_LE: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Transfers through every rank's links in the dispatch of every instance.

    Tokens of unknown route are taken to share transfers as the others of their rank do.

    Args:
        trace: S sequences with all tokens; the plan's, in its order.
        hops: 2 if moved tokens are first sent to the home rank, which is counted alone.
        most_rows: of the step; if it has more, evenly chosen micro-steps are counted, at least one.
        order_LE: `[L, E]` the trace's ids by those of the plan; the same by default.

    Returns:
        `[M, L, R]` float64 inside nodes and between nodes, the larger of those sent and received by a rank; and
        `[M, L]` bool, the instances that were counted: of a chosen micro-step, with enough known routes on every rank.
    """
    shape = plan.num_micro_steps, plan.num_layers, plan.num_ranks
    cell_S = plan.micro_step.astype(np.int64) * plan.num_ranks + plan.rank
    order_S = np.argsort(cell_S, kind="stable")
    cell_starts = np.searchsorted(cell_S[order_S], np.arange(shape[0] * shape[2] + 1))
    starts = trace.sequence_starts.astype(np.int64)
    firsts_S, ends_S = starts[:-1], starts[1:]
    if isinstance(trace, ResampledTrace):
        firsts_S, ends_S = firsts_S[trace.index_S], ends_S[trace.index_S]
    rows = int((ends_S - firsts_S).sum()) * shape[1] * trace.expert_ids.shape[2]
    chosen = min(shape[0], max(1, most_rows * shape[0] // max(1, rows)))
    micro_steps = np.arange(chosen) * shape[0] // chosen
    sent_22MLR, known_ML = np.zeros((2, 2, *shape)), np.zeros(shape[:2], bool)
    known_ML[micro_steps] = True
    if order_LE is None:
        order_LE = np.broadcast_to(np.arange(plan.home.shape[1]), plan.home.shape)
    home_LE = np.empty(plan.home.shape, np.int64)
    np.put_along_axis(home_LE, order_LE, plan.home, axis=1)
    _count(
        trace.expert_ids,
        (firsts_S, ends_S),
        (order_S, cell_starts),
        micro_steps,
        home_LE,
        _quotas_by_source(plan.replicas, plan.num_ranks, order_LE, used=hops == 1),
        plan.ranks_per_node,
        sent_22MLR,
        known_ML,
    )
    near_MLR, far_MLR = sent_22MLR.max(axis=1)
    return near_MLR, far_MLR, known_ML


def _quotas_by_source(
    table: ReplicaTable, num_ranks: int, order_LE: Array, *, used: bool
) -> tuple[Array, Array, Array, Array]:
    """Quotas by instance, source and expert of the trace, in plan order.

    Returns:
        starts `[I * R + 1]` of the quotas of each instance and source; experts, ranks and tokens `[Q]`, all int64.
    """
    instances = len(table.replica_starts) - 1
    replica_Q = np.repeat(np.arange(len(table.experts)), np.diff(table.quota_starts))
    instance_Q = np.searchsorted(table.replica_starts, replica_Q, side="right") - 1
    experts_Q = order_LE[instance_Q % len(order_LE), table.experts[replica_Q]].astype(np.int64)
    ranks_Q = table.ranks[replica_Q].astype(np.int64)
    place_Q, tokens_Q = instance_Q * num_ranks + table.sources, table.tokens.astype(np.int64)
    order = np.lexsort((experts_Q, place_Q))[: len(place_Q) if used else 0]
    starts = np.searchsorted(place_Q[order], np.arange(instances * num_ranks + 1))
    return starts, experts_Q[order], ranks_Q[order], tokens_Q[order]


@kernel
def _count(ids_TLK, spans, cells, micro_steps, home_LE, quotas, per_node, sent_22MLR, known_ML):  # type: ignore[no-untyped-def]
    """Adds transfers inside nodes and between nodes, out and in, to `sent_22MLR`, which is 0."""
    num_layers, num_ranks = sent_22MLR.shape[3:]
    num_experts, top_k = home_LE.shape[1], ids_TLK.shape[2]
    order_S, cell_starts = cells
    firsts_S, ends_S = spans
    quota_starts, experts_Q, ranks_Q, tokens_Q = quotas
    # The quota that an expert's next row belongs to, and the rows that are left of it.
    quota_E, left_E = np.empty(num_experts, np.int64), np.empty(num_experts, np.int64)
    # The last token that was sent to a node or rank.
    node_seen, rank_seen = np.zeros(num_ranks // per_node, np.int64), np.zeros(num_ranks, np.int64)
    token, sent_22R = 0, np.empty((2, 2, num_ranks))
    near_out, near_in, far_out, far_in = sent_22R[0, 0], sent_22R[0, 1], sent_22R[1, 0], sent_22R[1, 1]
    for m in micro_steps:
        for layer in range(num_layers):
            for source in range(num_ranks):
                sent_22R[:] = 0
                rows = known = 0
                place = (m * num_layers + layer) * num_ranks + source
                end = quota_starts[place + 1]
                quota_E[:] = end
                for q in range(end - 1, quota_starts[place] - 1, -1):
                    quota_E[experts_Q[q]] = q
                    left_E[experts_Q[q]] = tokens_Q[q]
                for place in range(cell_starts[m * num_ranks + source], cell_starts[m * num_ranks + source + 1]):
                    sequence = order_S[place]
                    for t in range(firsts_S[sequence], ends_S[sequence]):
                        token += 1
                        rows += top_k
                        for k in range(top_k):
                            expert = np.int64(ids_TLK[t, layer, k])
                            if expert >= num_experts:
                                continue
                            known += 1
                            to, q = home_LE[layer, expert], quota_E[expert]
                            if q < end:
                                to = ranks_Q[q]
                                left_E[expert] -= 1
                                if left_E[expert] == 0:
                                    # The expert's next quota, if it has one.
                                    is_last = q + 1 == end or experts_Q[q + 1] != expert
                                    quota_E[expert] = end if is_last else q + 1
                                    if not is_last:
                                        left_E[expert] = tokens_Q[q + 1]
                            node = to // per_node
                            relay = node * per_node + source % per_node
                            if node_seen[node] != token:
                                node_seen[node] = token
                                if relay != source:
                                    far_out[source] += 1
                                    far_in[relay] += 1
                            if rank_seen[to] != token:
                                rank_seen[to] = token
                                if to != relay:
                                    near_out[relay] += 1
                                    near_in[to] += 1
                if known < LEAST_KNOWN * rows:
                    known_ML[m, layer] = False
                if known:
                    for kind in range(2):
                        for way in range(2):
                            for r in range(num_ranks):
                                sent_22MLR[kind, way, m, layer, r] += sent_22R[kind, way, r] * (rows / known)
