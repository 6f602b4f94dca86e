"""Replicas and quotas of all micro-steps of one layer: one task of the planner, compiled and without the GIL."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.replicas.kernel_values import PARTS_PER_WHOLE, Homes, InstanceRows, Limits, Shares
from trimtab.planner.replicas.local_replicas import cost_of_replicas, fill_free_slots, place_local_replicas
from trimtab.planner.replicas.replica_search import place_replicas
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.planner.replicas.row_limit import meet_limit
from trimtab.planner.replicas.split import Quotas, split_tokens

# Replicas that keep rows in their node are not compared with others if loads are this part above the threshold at most.
SLACK = 64
NO_LIMIT = np.int64(1) << 62


def plan_layer(counts_MLRE: Array, fixed_MR: Array, layer: int, home_E: Array, limits: Limits) -> ReplicaTable:
    """Replicas and split for every micro-step of a layer. Instances don't depend on each other.

    Args:
        counts_MLRE: `[M, L, R, E]` int32, known rows; only `layer` is read.
        fixed_MR: `[M, R]` int64, expected rows of unknown routes in the layer, which stay at their home rank.
        home_E: `[E]` int16 homes of the layer's experts.
        limits: `threshold_parts` refers to known and expected rows.

    Returns:
        A table of M instances.
    """
    homes = Homes.of(home_E, counts_MLRE.shape[2])
    starts, shares, quotas = _plan_layer(counts_MLRE, np.ascontiguousarray(fixed_MR), layer, homes, limits)
    experts, ranks = shares.experts.astype(np.int16), shares.ranks.astype(np.int16)
    return ReplicaTable(starts, experts, ranks, *quotas)


@kernel
def _plan_layer(counts_MLRE, fixed_MR, layer, homes, limits):  # type: ignore[no-untyped-def]
    num_micro_steps, _, num_ranks, num_experts = counts_MLRE.shape
    counts_E = np.empty(num_experts, np.int64)
    num_nodes = num_ranks // limits.ranks_per_node if limits.prices.far_row > 0 else 1
    counts_NE, rows_N = np.empty((num_nodes, num_experts), np.int64), np.empty(num_nodes, np.int64)
    first_E = np.empty(num_experts + 1, np.int64)
    starts = np.zeros(num_micro_steps + 1, np.int64)
    most = num_micro_steps * num_ranks * limits.slots
    shares = Shares(np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64))
    quotas = Quotas(
        np.zeros(most + 1, np.int64), np.empty(most * num_ranks, np.int16), np.empty(most * num_ranks, np.int32)
    )
    for m in range(num_micro_steps):
        # By node only where nodes matter; all in the first row otherwise.
        counts_NE[:] = 0
        rows = np.int64(0)
        for r in range(num_ranks):
            rows += fixed_MR[m, r]
            counts_RE = counts_MLRE[m, layer, r]
            node_E = counts_NE[r // limits.ranks_per_node if num_nodes > 1 else 0]
            for e in range(num_experts):
                node_E[e] += counts_RE[e]
        counts_E[:] = 0
        for n in range(num_nodes):
            node_rows = np.int64(0)
            for e in range(num_experts):
                counts_E[e] += counts_NE[n, e]
                node_rows += counts_NE[n, e]
            rows_N[n] = node_rows
            rows += node_rows
        threshold_load = rows * limits.threshold_parts // (num_ranks * PARTS_PER_WHOLE)
        instance = InstanceRows(counts_E, fixed_MR[m], homes)
        found, count = _choose_replicas(instance, (counts_NE, rows_N), limits, threshold_load)
        most_rows = limits.most_rows
        if limits.is_exact:
            most_rows = min(most_rows, -(-rows // num_ranks))
        if most_rows < NO_LIMIT and limits.slots > 0:
            found, count = _within_limit(instance, limits, found, count, most_rows)
        # By expert, for the split.
        first_E[:] = 0
        for p in range(count):
            first_E[found.experts[p] + 1] += 1
        for e in range(num_experts):
            first_E[e + 1] += first_E[e]
        first, end = starts[m], starts[m] + count
        for p in range(count):
            place = first + first_E[found.experts[p]]
            first_E[found.experts[p]] += 1
            shares.experts[place] = found.experts[p]
            shares.ranks[place] = found.ranks[p]
            shares.tokens[place] = found.tokens[p]
        starts[m + 1] = end
        mine = Shares(shares.experts[first:end], shares.ranks[first:end], shares.tokens[first:end])
        split_tokens(
            counts_MLRE[m, layer], counts_E, homes.home_E, np.int64(limits.ranks_per_node), mine, quotas, first
        )
    # Copies, so that unused memory is freed.
    replicas = starts[num_micro_steps]
    kept = quotas.starts[replicas]
    return (
        starts,
        Shares(shares.experts[:replicas].copy(), shares.ranks[:replicas].copy(), shares.tokens[:replicas].copy()),
        Quotas(quotas.starts[: replicas + 1].copy(), quotas.sources[:kept].copy(), quotas.tokens[:kept].copy()),
    )


@kernel
def _choose_replicas(instance, sources, limits, threshold_load):  # type: ignore[no-untyped-def]
    """Replicas that also keep rows in their node, replicas that only balance, or none: whichever cost least."""
    found, count = Shares(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)), np.int64(0)
    best, highest = cost_of_replicas(instance, sources, limits, found, count)
    if limits.slots > 0 and limits.reach > limits.ranks_per_node and limits.prices.far_row > 0:
        local, num_local = place_local_replicas(instance, sources, limits, threshold_load)
        cost, reached = cost_of_replicas(instance, sources, limits, local, num_local)
        if cost < best:
            found, count, best, highest = local, num_local, cost, reached
    slack = threshold_load // SLACK if count > 0 else 0
    if limits.slots > 0 and highest > threshold_load + slack:
        balancing, num_balancing = place_replicas(instance, limits, threshold_load)
        cost, _ = cost_of_replicas(instance, sources, limits, balancing, num_balancing)
        if cost < best:
            found, count, best = balancing, num_balancing, cost
        if limits.reach > limits.ranks_per_node and limits.prices.far_row > 0:
            both, num_both = fill_free_slots(instance, sources, limits, threshold_load, balancing, num_balancing)
            cost, _ = cost_of_replicas(instance, sources, limits, both, num_both)
            if cost < best:
                found, count = both, num_both
    return found, count


@kernel
def _within_limit(instance, limits, found, count, most_rows):  # type: ignore[no-untyped-def]
    """The given replicas with shares that meet the row limit, else others; the nearest to it if none do."""
    count, highest = meet_limit(instance, found, count, most_rows)
    if highest <= most_rows:
        return found, count
    # The limit comes before efficient products.
    single = Limits(
        limits.ranks_per_node,
        limits.reach,
        limits.slots,
        limits.threshold_parts,
        1,
        limits.most_rows,
        limits.is_exact,
        limits.prices,
    )
    other, num_other = place_replicas(instance, single, most_rows)
    num_other, reached = meet_limit(instance, other, num_other, most_rows)
    return (other, num_other) if reached < highest else (found, count)
