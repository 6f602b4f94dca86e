"""Work of ranks if shared experts are computed as rows that other ranks may take."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.planner.plan.rank_work import RankWork, rank_work
from trimtab.policies.shared_rows import fill_shared_rows


def with_shared_rows(
    work: RankWork, plan: StepPlan, counts_MLRE: Array, tokens_MR: Array, costs: OperationCosts, *, hops: int = 1
) -> RankWork:
    """Work with the shared experts of every token, on the ranks that `fill_shared_rows` chooses.

    A shared row goes with the token's routed rows if the dispatcher sends tokens, and is a transfer if it sends rows.
    `loads_MLR` stays that of the routed experts.

    Args:
        work: of the routed experts.
        counts_MLRE: `[M, L, R, E]` int32 rows by source rank and expert.
        tokens_MR: `[M, R]` int64 tokens of every source.
    """
    num_ranks, num_experts = counts_MLRE.shape[2:]
    computed_MLR = np.zeros(work.loads_MLR.shape, np.int64)
    # A rank's shared experts, beside the routed ones.
    sent_MLRE = np.zeros((*counts_MLRE.shape[:3], 0 if costs.forwards else num_experts + num_ranks), np.int32)
    for m, layer in np.ndindex(counts_MLRE.shape[:2]):
        rows_RR = np.zeros((num_ranks, num_ranks), np.int64)
        instance = m * plan.num_layers + layer
        _count_rows(counts_MLRE[m, layer], plan.home[layer], plan.replicas, instance, rows_RR)
        seconds_R = work.experts_MLR[m, layer] + work.moved_MLR[m, layer]
        filled_RR = fill_shared_rows(seconds_R, tokens_MR[m], rows_RR, costs, plan.ranks_per_node)
        computed_MLR[m, layer] = filled_RR.sum(axis=0)
        if not costs.forwards:
            sent_MLRE[m, layer] = np.concatenate([counts_MLRE[m, layer], filled_RR], axis=1)
    work = work._replace(experts_MLR=work.experts_MLR + costs.shared_seconds(computed_MLR))
    if costs.forwards:
        return work
    here_LR = np.broadcast_to(np.arange(num_ranks, dtype=plan.home.dtype), (plan.num_layers, num_ranks))
    home_LE = np.concatenate([plan.home, here_LR], axis=1)
    sent = rank_work(plan.replicas, home_LE, sent_MLRE, plan.ranks_per_node, costs, hops=hops)
    return work._replace(near_MLR=sent.near_MLR, far_MLR=sent.far_MLR)


@kernel
def _count_rows(counts_RE, home_E, replicas, instance, rows_RR):  # type: ignore[no-untyped-def]
    """Adds an instance's rows by source and by the rank that computes them to `rows_RR`."""
    for source in range(counts_RE.shape[0]):
        for e in range(counts_RE.shape[1]):
            rows_RR[source, home_E[e]] += counts_RE[source, e]
    for p in range(replicas.replica_starts[instance], replicas.replica_starts[instance + 1]):
        for q in range(replicas.quota_starts[p], replicas.quota_starts[p + 1]):
            source, rows = replicas.sources[q], np.int64(replicas.tokens[q])
            rows_RR[source, home_E[replicas.experts[p]]] -= rows
            rows_RR[source, replicas.ranks[p]] += rows
