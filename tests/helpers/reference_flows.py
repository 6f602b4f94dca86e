"""Rows and copies of one instance under a plan, the work that they give each rank, and the memory that a step needs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab import StepPlan, Workload
from trimtab.array_type import Array
from trimtab.cluster import ModelSpec
from trimtab.cluster.operations import OperationCosts


@dataclass(frozen=True)
class Flow:
    """Rows of one source rank for one expert that one of its copies computes."""

    source: int
    expert: int
    rank: int
    rows: int


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


def loads_of(plan: StepPlan, workload: Workload) -> Array:
    """Rows `[M, L, R]` that ranks compute."""
    loads_MLR = np.zeros((plan.num_micro_steps, plan.num_layers, plan.num_ranks), int)
    for m, layer in np.ndindex(loads_MLR.shape[:2]):
        for flow in flows_of(plan, workload.token_counts_MLRE[m, layer], m, layer):
            loads_MLR[m, layer, flow.rank] += flow.rows
    return loads_MLR


def peak_bytes(
    plan: StepPlan, loads_MLR: Array, lengths: Iterable[int], model: ModelSpec, *, groups: int, pool_R: Array
) -> int:
    """Bytes of the rank that needs most, for bfloat16 weights and attention of four token widths."""
    hidden, part = model.hidden_size, model.moe_layers // plan.num_layers
    tokens: Counter[tuple[int, int]] = Counter()
    for s, length in enumerate(lengths):
        tokens[int(plan.micro_step[s]), int(plan.rank[s])] += int(length)
    token = 2 * (4 * hidden + 4 * hidden) + 8 * model.num_experts
    row = 2 * (2 * hidden + 3 * model.expert_width)
    peaks = []
    for r in range(plan.num_ranks):
        expert = part * sum(int(home == r) for layer in plan.home for home in layer) * model.expert_parameters
        dense = model.dense_parameters
        state = expert * 6 + math.ceil(expert * 12 / groups)
        state += dense * 6 + math.ceil(dense * 12 / (plan.num_ranks * groups))
        steps = []
        for m, loads_LR in enumerate(loads_MLR):
            rows = [int(loads_R[r]) for loads_R in loads_LR]
            layers = model.moe_layers * token * tokens[m, r] + part * sum(rows) * row
            head = tokens[m, r] * (2 * 2 * hidden + 4 * model.vocab_size)
            steps.append(layers + head + 2 * hidden * (model.top_k * tokens[m, r] + max(rows)))
        peaks.append(state + max(steps) + int(pool_R[r]))
    return max(peaks)


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


def transfers_of(
    sent: Mapping[tuple[int, int], Mapping[int, int]], per_node: int, costs: OperationCosts
) -> dict[tuple[str, int, int], float]:
    """Transfers over every link, by kind, from where and to where.

    With forwarding a token is sent once to a node, and once to a rank.

    Args:
        sent: rows by source and destination, of every expert there.
    """
    transfers: dict[tuple[str, int, int], float] = defaultdict(float)
    for source in {source for source, _ in sent}:
        by_link: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for (start, to), rows in sent.items():
            for leg in legs(source, to, per_node, costs.forwards) if start == source else ():
                by_link[leg] += rows.values()
        total = sum(sum(rows.values()) for (start, _), rows in sent.items() if start == source)
        for leg, counts in by_link.items():
            transfers[leg] += tokens_with_any(counts, total, costs.top_k)
    return transfers


def tokens_with_any(rows: Sequence[int], total: int, top_k: int) -> float:
    """Tokens that use any of the experts with these rows, of tokens with `total` rows; the larger of two estimates."""
    if not total or top_k == 1:
        return sum(rows)
    tokens = max(1, total / top_k)
    independent = tokens * (1 - math.prod(max(0, 1 - count / tokens) for count in rows))
    return max(independent, tokens * (1 - (1 - sum(rows) / (tokens * top_k)) ** top_k))


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
            need.near = sent / ranks * near * costs.near_row_s * costs.near_share
            need.far = sent / ranks * far * costs.far_row_s * costs.far_share
            need.experts = sum(copy_seconds(int(rows), costs) for rows in counts_RE.sum(axis=0)) / ranks
        return needs
    shares: Counter[tuple[int, int]] = Counter()
    out: dict[tuple[str, int], float] = defaultdict(float)
    into: dict[tuple[str, int], float] = defaultdict(float)
    rows_sent: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for flow in flows_of(plan, counts_RE, m, layer):
        shares[flow.expert, flow.rank] += flow.rows
        first_to = home[flow.expert] if hops == 2 else flow.rank
        rows_sent[flow.source, first_to][flow.expert] += flow.rows
        if first_to != flow.rank:
            out["hop", first_to] += flow.rows
            into["hop", flow.rank] += flow.rows
    for (kind, start, end), transfers in transfers_of(rows_sent, per_node, costs).items():
        out[kind, start] += transfers
        into[kind, end] += transfers
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
