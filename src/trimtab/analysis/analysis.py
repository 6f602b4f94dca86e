"""All figures of a trace on given ranks, together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trimtab.analysis.balance import (
    Balance,
    SizeBalance,
    Stability,
    balance,
    by_size,
    home_loads,
    rank_numbers,
    ratios,
    stability,
)
from trimtab.analysis.counted import CountedTrace
from trimtab.analysis.domains import DomainSkew, alikeness, domain_skew
from trimtab.analysis.foresight import Foresight, foresight
from trimtab.analysis.hot import HOT, Hot, hot_experts
from trimtab.analysis.price import Price, price
from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.errors import InputError


@dataclass(frozen=True, eq=False)
class Analysis:
    """Imbalance of a trace on R ranks with contiguous homes, and gains of other placements.

    Attributes:
        counted: the trace.
        ranks, ranks_per_node: as given.
        loads_MLR: `[M, L, R]` int64 tokens.
        max_over_mean_ML: `[M, L]` float64, NaN where an instance has no load.
        total: over all instances.
        nodes: the same of nodes instead of ranks; None with one node.
        layers: `[L]` of each layer.
        lost_share_L: `[L]` each layer's part of the expert time that is lost.
        sizes: with other micro-steps and numbers of ranks.
        alike_DD: `[D, D]`, overlap of the loads of two domains.
        price: in seconds; None where no model fits.
    """

    counted: CountedTrace
    ranks: int
    ranks_per_node: int
    loads_MLR: Array
    max_over_mean_ML: Array
    total: Balance
    nodes: Balance | None
    layers: tuple[Balance, ...]
    lost_share_L: Array
    sizes: tuple[SizeBalance, ...]
    stability: Stability
    foresight: Foresight
    hot: Hot
    domains: tuple[DomainSkew, ...]
    alike_DD: Array
    price: Price | None


def analyze(
    counted: CountedTrace,
    *,
    ranks: int,
    ranks_per_node: int | None = None,
    cluster: ClusterSpec | None = None,
    model: ModelSpec | None = None,
) -> Analysis:
    """All figures that need no plan.

    Args:
        ranks_per_node: by default all.
        cluster, model: to estimate seconds; the cluster has `ranks` ranks. Both or none.

    Raises:
        InputError: if the ranks don't divide the experts, or nodes the ranks.
    """
    per_node = ranks_per_node or ranks
    if counted.num_experts % ranks:
        raise InputError(f"{ranks} ranks don't divide {counted.num_experts} experts")
    if ranks % per_node:
        raise InputError(f"{ranks} ranks with {per_node} a node don't make whole nodes")
    counts_MLE, step_starts = counted.counts_MLE, counted.step_starts
    loads_MLR = home_loads(counts_MLE, ranks)
    excess_L = (loads_MLR.max(axis=-1) - loads_MLR.mean(axis=-1)).sum(axis=0)
    priced = None
    if cluster and model:
        priced = price(
            counts_MLE, cluster, model,
            num_steps=len(step_starts) - 1,
            num_tokens=counted.num_tokens,
            length_squares=counted.length_squares,
        )  # fmt: skip
    return Analysis(
        counted=counted,
        ranks=ranks,
        ranks_per_node=per_node,
        loads_MLR=loads_MLR,
        max_over_mean_ML=ratios(loads_MLR),
        total=balance(loads_MLR),
        nodes=balance(loads_MLR.reshape(*loads_MLR.shape[:2], -1, per_node).sum(-1)) if ranks > per_node else None,
        layers=tuple(balance(loads_MLR[:, layer]) for layer in range(counted.num_layers)),
        lost_share_L=excess_L / excess_L.sum() if excess_L.any() else np.zeros(counted.num_layers),
        sizes=tuple(by_size(counted, rank_numbers(counted.num_experts, ranks))),
        stability=stability(counts_MLE, step_starts, ranks),
        foresight=foresight(counts_MLE, step_starts, ranks),
        hot=hot_experts(counts_MLE, step_starts),
        domains=tuple(domain_skew(counted.counts_DLE, counted.domains, ranks)),
        alike_DD=alikeness(counted.counts_DLE),
        price=priced,
    )


def worst_layers(analysis: Analysis) -> list[int]:
    """MoE layers in descending order of lost expert time."""
    return np.argsort(-analysis.lost_share_L, kind="stable").tolist()


def figures(analysis: Analysis) -> dict[str, Any]:
    """The JSON of `trimtab analyze`; `docs/analysis.md` explains every key."""
    counted, hot = analysis.counted, analysis.hot
    names = counted.layer_indices.tolist()
    vio_ML = analysis.max_over_mean_ML - 1
    priced = analysis.price
    return {
        "ranks": analysis.ranks,
        "ranks_per_node": analysis.ranks_per_node,
        "token_budget": counted.token_budget,
        "steps": counted.steps,
        "skipped_steps": counted.skipped_steps,
        "micro_steps": counted.num_micro_steps,
        "layers": names,
        "experts": counted.num_experts,
        "top_k": counted.top_k,
        "sequences": counted.num_sequences,
        "tokens": counted.num_tokens,
        "unknown_routes": counted.unknown_routes,
        **_balance(analysis.total),
        "nodes": _balance(analysis.nodes) if analysis.nodes else None,
        "by_layer": [
            {"layer": name} | _balance(each) | {"share_of_lost": share}
            for name, each, share in zip(names, analysis.layers, analysis.lost_share_L.tolist(), strict=True)
        ],
        "by_micro_step": [
            {"step": step, "max_vio_mean": _mean(row), "max_vio_worst": _worst(row)}
            for step, row in zip(counted.step_M.tolist(), vio_ML, strict=True)
        ],
        "by_size": [
            {
                "factor": size.factor,
                "tokens": size.tokens,
                "micro_steps": size.micro_steps,
                "by_ranks": {str(number): _balance(each) for number, each in size.by_ranks.items()},
            }
            for size in analysis.sizes
        ],
        "stability": asdict(analysis.stability),
        "foresight": {
            "history": analysis.foresight.history,
            "instances": analysis.foresight.instances,
            "ways": {
                way.name: {
                    "knows": way.knows,
                    "max_over_mean_mean": way.max_over_mean,
                    "max_over_mean_p99": way.p99,
                    "expert_time_lost": way.lost,
                    "expert_time_lost_in_sum": way.lost_in_sum,
                    "won_back": way.won_back,
                }
                for way in analysis.foresight.ways
            },
        },
        "hot_experts": {
            "threshold": HOT,
            "per_instance": hot.per_instance,
            "token_part": hot.token_part,
            "stay": hot.stay,
            "chance": hot.chance,
            "runs": [{"up_to": longest, "count": count} for longest, count in hot.runs],
            "mean_run": hot.mean_run,
            "alike_steps": hot.alike_steps,
            "alike_halves": hot.alike_halves,
            "hottest": [asdict(expert) | {"layer": names[expert.layer]} for expert in hot.hottest],
        },
        "domains": [asdict(domain) for domain in analysis.domains],
        "domains_alike": analysis.alike_DD.tolist(),
        "estimate": {
            "cluster": priced.cluster,
            "model": priced.model,
            "step_s": priced.step_s,
            "lost_s": priced.lost_s,
            "lost_part": priced.lost_part,
            "lost_s_by_layer": list(priced.lost_L),
        }
        if priced
        else None,
    }


def _balance(found: Balance) -> dict[str, Any]:
    return {
        "instances": found.instances,
        "max_vio": asdict(found.max_vio),
        "balancedness": asdict(found.balancedness),
        "expert_time_lost": found.lost,
    }


def _mean(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _worst(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else None
