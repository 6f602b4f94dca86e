"""`python -m experiments.gpu_tables FILE`: write the measured tables of docs/gpu.md.

FILE has the figures of `python -m pytest tests/gpu --json FILE`. `estimate_tables` are the tables of estimated times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.page_tables import markdown_table, replace_tables
from trimtab.cluster import QWEN3_30B, ClusterSpec, ModelSpec, load_cluster
from trimtab.cluster.operations import GRADIENT_BYTES, OperationCosts
from trimtab.report.number_text import bytes_text, flops, rate, scaled, seconds

PAGE = Path("docs/gpu.md")
CLUSTERS = {"H100": "h100x8", "H200": "h200x8", "B200": "b200x8"}


def blocks(figures: dict[str, Any]) -> dict[str, str]:
    """The tables, by name."""
    (stage,) = [stage for stage in figures["stages"] if stage["name"] == "megatron"]
    found = [finding["figures"] for finding in stage["findings"] if finding["figures"]]
    return {
        "layers": markdown_table(*_layers([each for each in found if "case" in each])),
        "products": markdown_table(*_products([each for each in found if "case" not in each])),
    }


def _layers(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "tokens", "max/mean", "Megatron", "planned", "ratio", "host, Megatron", "host, planned"]
    return header, [
        [
            each["case"]["model"]["name"],
            f"{each['case']['tokens']:,}",
            f"{each['max_over_mean_before']:.2f}",
            seconds(each["plain_s"]),
            seconds(each["planned_s"]),
            f"{each['ratio']:.2f}x",
            seconds(each["plain_host_s"]),
            seconds(each["planned_host_s"]),
        ]
        for each in found
    ]


def _products(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "tokens", "experts", "one product", "one after the other", "difference"]
    return header, [
        [
            each["model"],
            f"{each['tokens']:,}",
            f"{each['homes']} + {each['replicas']}",
            seconds(each["one_s"]),
            seconds(each["two_s"]),
            seconds(each["two_s"] - each["one_s"]),
        ]
        for each in found
    ]


def estimate_layer(cluster: ClusterSpec, model: ModelSpec, tokens: int) -> dict[str, float]:
    """Seconds of forward and backward of one MoE layer by part, in their order, from published rates of the hardware.

    The routing is even, so nothing waits for a busier rank. Attention, router and norms are not in it.

    Args:
        cluster: one node. Rows are sent once for each expert of a token, as the session's own dispatcher does.
        tokens: of each rank.
    """
    costs = OperationCosts.of(replace(cluster, dispatch_forwards=False), model)
    rows, here = tokens * model.top_k, model.num_experts / cluster.ranks
    exchange_s = costs.dispatch_s + rows * (cluster.ranks - 1) / cluster.ranks * costs.near_row_s
    experts_s = here * float(costs.copy_seconds(np.array(rows / here)))
    return {
        "dispatch": exchange_s, "experts": experts_s, "combine": exchange_s, "combine, backward": exchange_s,
        "experts, backward": costs.expert_backward * experts_s, "dispatch, backward": exchange_s,
    }  # fmt: skip


def estimate_tables() -> str:
    """Estimated times of Qwen3-30B-A3B on 8 ranks of one node, in Markdown; docs/clusters.md has the rates' sources."""
    clusters = [load_cluster(preset, ranks=8) for preset in CLUSTERS.values()]
    model, texts = QWEN3_30B, []
    for tokens in (4096, 8192):
        sent, rows = tokens * model.top_k * 7 / 8 * model.row_width * model.weight_bytes, tokens * model.top_k

        def part(cluster: ClusterSpec, name: str, rows: int = rows, sent: float = sent) -> tuple[str, str]:
            if not name.startswith("experts"):
                return bytes_text(sent), rate(cluster.dispatch_node_bytes_per_s)
            times = cluster.expert_backward if "backward" in name else 1
            return scaled(times * 2.0 * rows * model.expert_parameters, "FLOP"), flops(cluster.expert_flops)

        times = [estimate_layer(cluster, model, tokens) for cluster in clusters]
        together = f"| together | | {' | '.join(_ms(sum(each.values())) for each in times)} |\n"
        texts.append(f"{tokens:,} tokens a rank:\n\n" + _estimates("part", clusters, times, part) + together)

    def transfer(cluster: ClusterSpec, name: str) -> tuple[str, str]:
        per_s = cluster.host_bytes_per_s if "host" in name else cluster.node_bytes_per_s
        gradient = GRADIENT_BYTES * model.expert_parameters
        return bytes_text(gradient if name == "gradient" else model.expert_bytes), rate(per_s)

    costs = [OperationCosts.of(cluster, model) for cluster in clusters]
    times = [
        {"weights, peer path": each.near_weights_s, "weights, host path": each.host_weights_s,
         "gradient": each.near_gradient_s}
        for each in costs
    ]  # fmt: skip
    return "\n".join([*texts, "One replica, beside it:\n\n" + _estimates("transfer", clusters, times, transfer)])


def _estimates(
    title: str,
    clusters: list[ClusterSpec],
    times: list[dict[str, float]],
    amounts: Callable[[ClusterSpec, str], tuple[str, str]],
) -> str:
    """A row for each part, a column for each cluster.

    Args:
        amounts: amount and rate of a part on a cluster.
    """
    lines = [f"| {title} | amount | {' | '.join(CLUSTERS)} |", "|---|---:|" + "---:|" * len(CLUSTERS)]
    for name in times[0]:
        cells = [f"{_ms(of[name])} at {amounts(each, name)[1]}" for each, of in zip(clusters, times, strict=True)]
        lines.append(f"| {name} | {amounts(clusters[0], name)[0]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ms(value_s: float) -> str:
    return f"{value_s * 1e3:.3g} ms"


if __name__ == "__main__":
    replace_tables(blocks(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), PAGE)
