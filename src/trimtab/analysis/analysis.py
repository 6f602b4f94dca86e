"""`Analysis`: all figures of a trace on given ranks, and their JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trimtab.analysis.balance import (
    Balance,
    DomainSkew,
    SizeBalance,
    Stability,
    balance,
    by_size,
    domain_overlap,
    domain_skew,
    home_loads,
    known_mean,
    max_over_mean_or_nan,
    rank_numbers,
    stability,
)
from trimtab.analysis.cost_estimate import CostEstimate, PermutedIds, estimate_cost, permuted_ids
from trimtab.analysis.fixed_placements import PlacementComparison, PlannedLoads, compare_placements
from trimtab.analysis.hot_experts import HOT_FACTOR, HotExperts, hot_experts
from trimtab.analysis.trace_counts import TraceCounts
from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.simulator.comparison_case import ComparisonCase


@dataclass(frozen=True, eq=False)
class Analysis:
    """Imbalance of a trace on R ranks with contiguous homes, and gains of other placements.

    Attributes:
        counts: of the trace.
        ranks, ranks_per_node: as given.
        loads_MLR: `[M, L, R]` int64 tokens.
        max_over_mean_ML: `[M, L]` float64, NaN where an instance has no load.
        total: over all instances.
        nodes: the same of nodes instead of ranks; None with one node.
        layers: `[L]` of each layer.
        lost_share_L: `[L]` each layer's part of the expert time that is lost.
        sizes: with other micro-steps and numbers of ranks.
        overlap_DD: `[D, D]`, overlap of the loads of two domains.
        estimate: cost in seconds; None without.
        permuted: loss and cost if expert ids were permuted.
        no_seconds: why there is no estimate, a sentence.
    """

    counts: TraceCounts
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
    placements: PlacementComparison
    hot_experts: HotExperts
    domains: tuple[DomainSkew, ...]
    overlap_DD: Array
    estimate: CostEstimate | None
    permuted: PermutedIds
    no_seconds: str = ""

    def __repr__(self) -> str:
        micro_steps, layers, ranks = self.loads_MLR.shape
        balance = f"max/mean {self.total.max_over_mean.mean:.2f}, {self.total.lost:.0%} of expert time lost"
        return f"Analysis({micro_steps} micro-steps of {layers} layers on {ranks} ranks, {balance})"


def analyze(
    counts: TraceCounts,
    *,
    ranks: int,
    ranks_per_node: int | None = None,
    case: ComparisonCase | None = None,
    planned: PlannedLoads | None = None,
    no_seconds: str = "",
) -> Analysis:
    """Figures of a trace.

    Args:
        ranks_per_node: ranks that share a node; by default all.
        case: the steps whose seconds are simulated; None: no seconds.
        planned: loads of a plan, to compare placements with.
        no_seconds: why there are no seconds, a sentence.

    Raises:
        InputError: if the ranks don't divide the experts, or nodes the ranks.
    """
    per_node = ranks_per_node or ranks
    if counts.num_experts % ranks:
        raise InputError(f"{ranks} ranks don't divide {counts.num_experts} experts")
    if ranks % per_node:
        raise InputError(f"{ranks} ranks with {per_node} a node don't make whole nodes")
    counts_MLE, step_starts = counts.counts_MLE, counts.step_starts
    loads_MLR = home_loads(counts_MLE, ranks)
    excess_L = (loads_MLR.max(axis=-1) - loads_MLR.mean(axis=-1)).sum(axis=0)
    return Analysis(
        counts=counts,
        ranks=ranks,
        ranks_per_node=per_node,
        loads_MLR=loads_MLR,
        max_over_mean_ML=max_over_mean_or_nan(loads_MLR),
        total=balance(loads_MLR),
        nodes=balance(loads_MLR.reshape(*loads_MLR.shape[:2], -1, per_node).sum(-1)) if ranks > per_node else None,
        layers=tuple(balance(loads_MLR[:, layer]) for layer in range(counts.num_layers)),
        lost_share_L=excess_L / excess_L.sum() if excess_L.any() else np.zeros(counts.num_layers),
        sizes=tuple(by_size(counts, rank_numbers(counts.num_experts, ranks))),
        stability=stability(counts_MLE, step_starts, ranks),
        placements=compare_placements(counts_MLE, step_starts, ranks, planned),
        hot_experts=hot_experts(counts_MLE, step_starts),
        domains=tuple(domain_skew(counts.counts_DLE, counts.domains, ranks)),
        overlap_DD=domain_overlap(counts.counts_DLE),
        estimate=estimate_cost(case) if case else None,
        permuted=permuted_ids(counts_MLE, ranks, case),
        no_seconds=no_seconds,
    )


def worst_layers(analysis: Analysis) -> list[int]:
    """MoE layers in descending order of lost expert time."""
    return np.argsort(-analysis.lost_share_L, kind="stable").tolist()


def figures(analysis: Analysis) -> dict[str, Any]:
    """The JSON of `trimtab analyze`. Values that the trace does not determine are None.

    ranks, ranks_per_node: as given.
    steps: RL steps.
    micro_steps, experts, sequences, tokens: their numbers.
    layers: decoder layers.
    nodes: the balance of nodes instead of ranks; None with one node.
    by_layer: the balance of each layer.
    layer: decoder layer.
    share_of_lost: the layer's part of the lost time.
    by_micro_step: mean and worst of the layers.
    by_size: with micro-steps of other sizes and other numbers of ranks.
    domain_overlap: of the loads of two domains, in the order of `domains`.
    estimate: cost in seconds; None without a model.
    lost_s, lost_part: seconds, and part of the step's time, that imbalance costs: 1 - even_s / step_s.
    layers_traced: MoE layers of the trace.
    threshold: an expert is hot with more than so many times the mean expert's tokens.
    """
    counts, estimate = analysis.counts, analysis.estimate
    names = counts.layer_indices.tolist()
    vio_ML = analysis.max_over_mean_ML - 1
    return {
        "ranks": analysis.ranks,
        "ranks_per_node": analysis.ranks_per_node,
        "token_budget": counts.token_budget,
        "steps": counts.steps,
        "skipped_steps": counts.skipped_steps,
        "micro_steps": counts.num_micro_steps,
        "layers": names,
        "experts": counts.num_experts,
        "top_k": counts.top_k,
        "sequences": counts.num_sequences,
        "tokens": counts.num_tokens,
        "unknown_routes": counts.unknown_routes,
        **_balance(analysis.total),
        "nodes": _balance(analysis.nodes) if analysis.nodes else None,
        "by_layer": [
            {"layer": name} | _balance(each) | {"share_of_lost": share}
            for name, each, share in zip(names, analysis.layers, analysis.lost_share_L.tolist(), strict=True)
        ],
        "by_micro_step": [
            {
                "step": step,
                "max_vio_mean": known_mean(row),
                "max_vio_worst": max(row[~np.isnan(row)].tolist(), default=None),
            }
            for step, row in zip(counts.step_M.tolist(), vio_ML, strict=True)
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
        "placements": {
            "history": analysis.placements.history,
            "instances": analysis.placements.instances,
            "strategies": {
                strategy.name: {key: value for key, value in asdict(strategy).items() if key not in ("name", "about")}
                for strategy in analysis.placements.strategies
            },
        },
        "hot_experts": {
            "threshold": HOT_FACTOR,
            **asdict(analysis.hot_experts),
            "hottest": [asdict(expert) | {"layer": names[expert.layer]} for expert in analysis.hot_experts.hottest],
        },
        "domains": [asdict(domain) for domain in analysis.domains],
        "domain_overlap": analysis.overlap_DD.tolist(),
        "estimate": (
            asdict(estimate)
            | {"lost_s": estimate.lost_s, "lost_part": estimate.lost_part, "layers_traced": estimate.layers_traced}
            if estimate
            else None
        ),
        "ids_permuted": asdict(analysis.permuted) | {"lost_part": analysis.permuted.lost_part},
    }


def _balance(found: Balance) -> dict[str, Any]:
    """The JSON of a balance.

    max_vio: max/mean - 1 of rank loads, over instances.
    expert_time_lost: part of expert time for which a rank is idle on average.
    """
    return {
        "instances": found.instances,
        "max_vio": asdict(found.max_vio),
        "balancedness": asdict(found.balancedness),
        "expert_time_lost": found.lost,
    }
