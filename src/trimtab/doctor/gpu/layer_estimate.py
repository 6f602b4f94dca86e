"""Estimated time of a planned MoE layer by part, from the planner's costs: the tables of docs/gpu.md.

These are estimates from published rates of the hardware (docs/clusters.md). The routing is even, so nothing waits for a
busier rank. Attention, router and norms are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.cluster import QWEN3_30B, ClusterSpec, ModelSpec, load_cluster
from trimtab.cluster.operations import GRADIENT_BYTES, OperationCosts
from trimtab.report.number_text import bytes_text, flops, rate, scaled

CLUSTERS = {"H100": "h100x8", "H200": "h200x8", "B200": "b200x8"}
RANKS = 8
TOKENS = (4096, 8192)
# What all parts of a layer's forward and backward are called together.
TOGETHER = "together"


@dataclass(frozen=True)
class Part:
    """One part of a layer on one rank.

    Attributes:
        name: as `ACTIVITIES` of a recording has it, or of a transfer beside it.
        amount: bytes that leave or reach the rank, or operations.
        per_s: the same, a second, without fixed times.
        seconds: estimated time.
        is_bytes: whether the amount is bytes; else operations.
    """

    name: str
    amount: float
    per_s: float
    seconds: float
    is_bytes: bool

    @property
    def amount_text(self) -> str:
        return bytes_text(self.amount) if self.is_bytes else scaled(self.amount, "FLOP")

    @property
    def rate_text(self) -> str:
        return rate(self.per_s) if self.is_bytes else flops(self.per_s)


def estimate_layer(cluster: ClusterSpec, model: ModelSpec, tokens: int) -> list[Part]:
    """Parts of forward and backward of one MoE layer, in their order, with even routing.

    Args:
        cluster: one node. Rows are sent once for each expert of a token, as the session's own dispatcher does.
        tokens: of each rank.
    """
    costs = _costs(cluster, model)
    rows = tokens * model.top_k
    sent = rows * (cluster.ranks - 1) / cluster.ranks
    moved = sent * model.row_width * model.weight_bytes
    exchange_s = costs.dispatch_s + sent * costs.near_row_s
    here = model.num_experts / cluster.ranks
    operations = 2.0 * rows * model.expert_parameters
    experts_s = here * float(costs.copy_seconds(np.array(rows / here)))
    backward = costs.expert_backward

    def exchange(name: str) -> Part:
        return Part(name, moved, cluster.dispatch_node_bytes_per_s, exchange_s, is_bytes=True)

    def experts(name: str, times: float) -> Part:
        return Part(name, times * operations, cluster.expert_flops, times * experts_s, is_bytes=False)

    return [
        exchange("dispatch"),
        experts("experts", 1),
        exchange("combine"),
        exchange("combine, backward"),
        experts("experts, backward", backward),
        exchange("dispatch, backward"),
    ]


def estimate_replica(cluster: ClusterSpec, model: ModelSpec) -> list[Part]:
    """Transfers of one replica, which run during compute: its weights on either path, and its gradient."""
    costs = _costs(cluster, model)
    gradient = GRADIENT_BYTES * model.expert_parameters
    near, host = cluster.node_bytes_per_s, cluster.host_bytes_per_s
    return [
        Part("weights, peer path", model.expert_bytes, near, costs.near_weights_s, is_bytes=True),
        Part("weights, host path", model.expert_bytes, host, costs.host_weights_s, is_bytes=True),
        Part("gradient", gradient, near, costs.near_gradient_s, is_bytes=True),
    ]


def _costs(cluster: ClusterSpec, model: ModelSpec) -> OperationCosts:
    return OperationCosts.of(replace(cluster, dispatch_forwards=False), model)


def estimate_tables() -> str:
    """The tables of docs/gpu.md, in Markdown: Qwen3-30B-A3B on 8 ranks of one node."""
    clusters = {name: load_cluster(preset, ranks=RANKS) for name, preset in CLUSTERS.items()}
    texts = []
    for tokens in TOKENS:
        parts = [estimate_layer(cluster, QWEN3_30B, tokens) for cluster in clusters.values()]
        texts.append(f"{tokens:,} tokens a rank:\n\n" + _table("part", parts, sums=True))
    replicas = [estimate_replica(cluster, QWEN3_30B) for cluster in clusters.values()]
    texts.append("One replica, beside it:\n\n" + _table("transfer", replicas, sums=False))
    return "\n".join(texts)


def _table(title: str, parts_of: Sequence[Sequence[Part]], *, sums: bool) -> str:
    """A row for each part, a column for each cluster of `CLUSTERS`."""
    lines = [f"| {title} | amount | {' | '.join(CLUSTERS)} |", "|---|---:|" + "---:|" * len(CLUSTERS)]
    for parts in zip(*parts_of, strict=True):
        cells = [f"{_ms(part.seconds)} at {part.rate_text}" for part in parts]
        lines.append(f"| {parts[0].name} | {parts[0].amount_text} | {' | '.join(cells)} |")
    if sums:
        totals = [_ms(sum(part.seconds for part in parts)) for parts in parts_of]
        lines.append(f"| {TOGETHER} | | {' | '.join(totals)} |")
    return "\n".join(lines) + "\n"


def _ms(value_s: float) -> str:
    return f"{value_s * 1e3:.3g} ms"
