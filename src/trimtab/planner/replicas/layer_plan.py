"""Replicas and quotas of all micro-steps of one layer: one task of the planner, compiled and without the GIL."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.replicas.kernel_values import PARTS_PER_WHOLE, Homes, InstanceRows, Limits, Shares, empty_shares
from trimtab.planner.replicas.links import (
    COMPUTED,
    Load,
    load_at_home,
    load_with,
    longest_times,
    prices_of_rows,
    split_by_links,
)
from trimtab.planner.replicas.local_replicas import place_local_replicas
from trimtab.planner.replicas.replica_search import place_replicas
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.planner.replicas.row_limit import meet_limit
from trimtab.planner.replicas.split import Quotas, split_tokens

# Replicas that keep rows in their node are not compared with others if loads are this part above the threshold at most.
SLACK = 64
NO_LIMIT = np.int64(1) << 62


class Candidate(NamedTuple):
    """Memory for replicas of one instance, ordered by expert, and their split."""

    shares: Shares
    quotas: Quotas


class Found(NamedTuple):
    """A candidate's replicas, rows of its busiest rank, those above the limit, and time, int64; and its load."""

    replicas: int
    highest: int
    excess: int
    cost: int
    load: Load


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
    return ReplicaTable(*_plan_layer(counts_MLRE, np.ascontiguousarray(fixed_MR), layer, homes, limits))


@kernel
def _memory(replicas, num_ranks):  # type: ignore[no-untyped-def]
    cells = replicas * num_ranks
    quotas = Quotas(np.zeros(replicas + 1, np.int64), np.empty(cells, np.int16), np.empty(cells, np.int32))
    return Candidate(empty_shares(replicas), quotas)


@kernel
def _plan_layer(counts_MLRE, fixed_MR, layer, homes, limits):  # type: ignore[no-untyped-def]
    num_micro_steps, _, num_ranks, num_experts = counts_MLRE.shape
    starts = np.zeros(num_micro_steps + 1, np.int64)
    shares, quotas = _memory(num_micro_steps * num_ranks * limits.slots, num_ranks)
    memory = _memory(num_ranks * limits.slots, num_ranks), _memory(num_ranks * limits.slots, num_ranks)
    for m in range(num_micro_steps):
        counts_RE = counts_MLRE[m, layer]
        counts_E, rows = np.zeros(num_experts, np.int64), fixed_MR[m].sum()
        for r in range(num_ranks):
            for e in range(num_experts):
                counts_E[e] += counts_RE[r, e]
        rows += counts_E.sum()
        found, count = _plan_instance(counts_RE, InstanceRows(counts_E, fixed_MR[m], homes), rows, limits, memory)
        first, end = starts[m], starts[m] + count
        starts[m + 1] = end
        shares.experts[first:end], shares.ranks[first:end] = found.shares.experts[:count], found.shares.ranks[:count]
        begin, number = quotas.starts[first], found.quotas.starts[count]
        quotas.starts[first : end + 1] = found.quotas.starts[: count + 1] + begin
        quotas.sources[begin : begin + number] = found.quotas.sources[:number]
        quotas.tokens[begin : begin + number] = found.quotas.tokens[:number]
    # Copies, so that unused memory is freed.
    replicas = starts[num_micro_steps]
    kept = quotas.starts[replicas]
    return (
        starts,
        shares.experts[:replicas].astype(np.int16),
        shares.ranks[:replicas].astype(np.int16),
        quotas.starts[: replicas + 1].copy(),
        quotas.sources[:kept].copy(),
        quotas.tokens[:kept].copy(),
    )


@kernel
def _plan_instance(counts_RE, instance, rows, limits, memory):  # type: ignore[no-untyped-def]
    """The replicas that cost least of none, those that keep rows in their node, and those that only balance.

    Args:
        counts_RE: `[R, E]` integer tokens by source rank and expert.
        instance: an `InstanceRows`.
        rows: known and expected ones of all ranks.
        memory: two `Candidate`s.

    Returns:
        The candidate that is filled, and its number of replicas.
    """
    num_ranks, per_node, home_E = np.int64(len(counts_RE)), np.int64(limits.ranks_per_node), instance.homes.home_E
    found, tried = memory
    most_rows = np.int64(limits.most_rows)
    if limits.is_exact:
        most_rows = min(most_rows, -(-rows // num_ranks))
    threshold = rows * limits.threshold_parts // (num_ranks * PARTS_PER_WHOLE)
    at_home = load_at_home(counts_RE, instance.fixed_R, instance.homes, limits)
    best = _split(counts_RE, instance, limits, most_rows, at_home, found.shares, np.int64(0), found)
    if limits.slots == 0:
        return found, best.replicas
    if limits.reach > per_node and limits.prices.far_row > 0:
        counts_NE = np.zeros((num_ranks // per_node, len(home_E)), np.int64)
        for r in range(num_ranks):
            for e in range(len(home_E)):
                counts_NE[r // per_node, e] += counts_RE[r, e]
        shares, count = place_local_replicas(instance, counts_NE, limits, threshold)
        other = _split(counts_RE, instance, limits, most_rows, at_home, shares, count, tried)
        if _is_better(other, best):
            found, tried, best = tried, found, other
    if best.highest > threshold + (threshold // SLACK if best.replicas > 0 else 0):
        shares, count = place_replicas(instance, limits, threshold)
        other = _split(counts_RE, instance, limits, most_rows, at_home, shares, count, tried)
        if _is_better(other, best):
            found, tried, best = tried, found, other
    if best.excess > 0:
        # The limit comes before efficient products.
        single = Limits(
            limits.ranks_per_node, limits.reach, limits.slots, limits.threshold_parts, 1, limits.most_rows,
            limits.is_exact, limits.prices, limits.sends, limits.forwards,
        )  # fmt: skip
        shares, count = place_replicas(instance, single, most_rows)
        other = _split(counts_RE, instance, limits, most_rows, at_home, shares, count, tried)
        if _is_better(other, best):
            found, tried, best = tried, found, other
    if limits.forwards or num_ranks == per_node or limits.prices.far_row == 0:
        return found, best.replicas
    shares = _first(found.shares, best.replicas)
    return found, split_by_links(counts_RE, best.load, home_E, limits, most_rows, shares, found.quotas)


@kernel
def _first(shares, count):  # type: ignore[no-untyped-def]
    return Shares(shares.experts[:count], shares.ranks[:count], shares.tokens[:count])


@kernel
def _is_better(one, other):  # type: ignore[no-untyped-def]
    return one.excess < other.excess or (one.excess == other.excess and one.cost < other.cost)


@kernel
def _split(counts_RE, instance, limits, most_rows, at_home, shares, count, candidate):  # type: ignore[no-untyped-def]
    """Split the tokens of replicas, given in any order, over source ranks, within the limit of rows if possible."""
    if most_rows < NO_LIMIT and count > 0:
        count, _ = meet_limit(instance, shares, count, most_rows)
    home_E, prices = instance.homes.home_E, limits.prices
    ordered = _first(candidate.shares, count)
    # By expert, stably.
    first_E = np.zeros(len(home_E) + 1, np.int64)
    for p in range(count):
        first_E[shares.experts[p] + 1] += 1
    for e in range(len(home_E)):
        first_E[e + 1] += first_E[e]
    for p in range(count):
        place = first_E[shares.experts[p]]
        first_E[shares.experts[p]] += 1
        ordered.experts[place], ordered.ranks[place] = shares.experts[p], shares.ranks[p]
        ordered.tokens[place] = shares.tokens[p]
    per_node = np.int64(limits.ranks_per_node)
    split_tokens(counts_RE, instance.counts_E, home_E, per_node, ordered, candidate.quotas)
    load = load_with(at_home, home_E, limits, ordered, candidate.quotas)
    cost, highest = longest_times(load, prices_of_rows(limits)), load.rows_KR[COMPUTED].max()
    for p in range(count):
        is_far = ordered.ranks[p] // per_node != home_E[ordered.experts[p]] // per_node
        cost += prices.far_replica if is_far else prices.near_replica
    return Found(count, highest, max(np.int64(0), highest - most_rows), cost, load)
