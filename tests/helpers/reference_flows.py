"""Rows and copies of one instance under a plan, and the work that they give each rank; for the reference simulator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab import StepPlan
from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts


@dataclass(frozen=True)
class Flow:
    """Rows of one source rank for one expert that one of its copies computes."""

    source: int
    expert: int
    rank: int
    rows: int


@dataclass(frozen=True)
class Copy:
    """A replica whose weights travel."""

    expert: int
    home: int
    rank: int
    from_host: bool


def flows_of(plan: StepPlan, counts_RE: Array, m: int, layer: int) -> Iterator[Flow]:
    """Where every row of an instance is computed."""
    left = {
        (source, expert): int(counts_RE[source, expert])
        for source in range(plan.num_ranks)
        for expert in range(counts_RE.shape[1])
    }
    for p in plan.replicas_of(m, layer):
        expert = int(plan.replica_experts[p])
        for q in range(plan.quota_starts[p], plan.quota_starts[p + 1]):
            source, rows = int(plan.quota_sources[q]), int(plan.quota_tokens[q])
            left[source, expert] -= rows
            yield Flow(source, expert, int(plan.replica_ranks[p]), rows)
    for (source, expert), rows in left.items():
        yield Flow(source, expert, int(plan.home[layer, expert]), rows)


def legs(source: int, to: int, per_node: int, forwards: bool) -> Iterator[tuple[str, int, int]]:
    """The links that a row takes: its kind, from where, to where."""
    if source == to:
        return
    same_place = to // per_node * per_node + source % per_node
    if source // per_node == to // per_node:
        yield "near", source, to
    elif not forwards:
        yield "far", source, to
    else:
        yield "far", source, same_place
        if same_place != to:
            yield "near", same_place, to


def copy_seconds(rows: int, costs: OperationCosts) -> float:
    """Forward of one expert's copy."""
    if not rows:
        return 0.0
    products = max(math.ceil(rows / costs.tile_rows) * costs.tile_s, costs.weights_s)
    return costs.copy_s + products + rows * costs.row_s


@dataclass
class Need:
    """Seconds of one rank in one instance."""

    experts: float = 0.0
    moved: float = 0.0
    near: float = 0.0
    far: float = 0.0
    hop: float = 0.0
    load: int = 0


def needs_of(
    plan: StepPlan, counts_RE: Array, costs: OperationCosts, m: int, layer: int, *, hops: int, even: bool
) -> list[Need]:
    """What an instance asks of every rank."""
    ranks, per_node, nodes = plan.num_ranks, plan.ranks_per_node, plan.num_ranks // plan.ranks_per_node
    needs = [Need() for _ in range(ranks)]
    home = [int(rank) for rank in plan.home[layer]]
    if even:
        total = int(counts_RE.sum())
        for r, need in enumerate(needs):
            need.load = math.ceil(total / ranks)
            sent = max(int(counts_RE[r].sum()), need.load)
            others = nodes - 1
            # Of R equal parts, so many are for other ranks of the node, and so many for other nodes. What comes from
            # other nodes comes to this rank for its whole node.
            near, far = per_node - 1, others * per_node
            if costs.forwards:
                near += others * (per_node - 1)
            need.near, need.far = sent / ranks * near * costs.near_row_s, sent / ranks * far * costs.far_row_s
            need.experts = sum(copy_seconds(int(rows), costs) for rows in counts_RE.sum(axis=0)) / ranks
        return needs
    shares: Counter[tuple[int, int]] = Counter()
    out: Counter[tuple[str, int]] = Counter()
    into: Counter[tuple[str, int]] = Counter()
    for flow in flows_of(plan, counts_RE, m, layer):
        shares[flow.expert, flow.rank] += flow.rows
        first_to = home[flow.expert] if hops == 2 else flow.rank
        ways = list(legs(flow.source, first_to, per_node, costs.forwards))
        if first_to != flow.rank:
            ways.append(("hop", first_to, flow.rank))
        for kind, start, end in ways:
            out[kind, start] += flow.rows
            into[kind, end] += flow.rows
    for (expert, rank), rows in shares.items():
        needs[rank].load += rows
        if hops == 2 and rank != home[expert]:
            needs[rank].moved += copy_seconds(rows, costs)
        else:
            needs[rank].experts += copy_seconds(rows, costs)
    for r, need in enumerate(needs):
        need.near = max(out["near", r], into["near", r]) * costs.near_row_s
        need.far = max(out["far", r], into["far", r]) * costs.far_row_s
        need.hop = max(out["hop", r], into["hop", r]) * costs.hop_row_s
    return needs
