"""Two traces of models with the same layers and experts, compared: imbalance, its layers, and which experts are hot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from trimtab.analysis.analysis import Analysis
from trimtab.analysis.balance import known_mean, overlap
from trimtab.analysis.trace_counts import TraceCounts
from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.figures import measured, plural, with_documented_figures
from trimtab.trace import RoutingTrace

# The hottest experts of a layer are one in this many, and no fewer than these.
ONE_IN, LEAST_HOTTEST = 8, 2
BINS = 24
SHOWN = 10


@with_documented_figures
@dataclass(frozen=True)
class TraceFigures:
    """Figures of one trace, or differences of two. None where the trace does not determine one, or there is no model.

    A `part` is of 1, a `ratio` a plain number.
    """

    lost_part: float | None = measured("cost of imbalance, of a step", "part")
    lost_s: float | None = measured("cost of imbalance, seconds", "s")
    step_s: float | None = measured("step with contiguous homes", "s")
    expert_time_lost: float = measured("expert time lost", "part")
    lost_with_past: float | None = measured("lost with a placement by past loads", "part")
    max_vio_mean: float = measured("max_vio, mean", "ratio")
    max_vio_p99: float = measured("max_vio, p99", "ratio")
    overlap_steps: float | None = measured("load in common with the next step", "part")
    sequences: int = measured("sequences", "count")
    tokens: int = measured("tokens", "count")
    micro_steps: int = measured("micro-steps", "count")
    token_budget: int = measured("tokens of a rank, at most", "count")


@dataclass(frozen=True)
class LayerComparison:
    """One MoE layer in both traces; None without load.

    Attributes:
        layer: decoder layer.
        max_vio_a, max_vio_b: means over micro-steps.
        correlation: of the experts' loads (Pearson); None if one trace has even loads.
        overlap: sum over experts of the smaller of their two shares of the load; 1 for equal proportions.
        hottest_in_common: part of the hottest experts that is the same in both.
    """

    layer: int
    max_vio_a: float | None
    max_vio_b: float | None
    correlation: float | None
    overlap: float | None
    hottest_in_common: float | None


@dataclass(frozen=True)
class ComparedExpert:
    """An expert that is one of the hottest in one of the traces or in both.

    Attributes:
        layer: decoder layer.
        expert: its number in the layer.
        over_mean_a, over_mean_b: tokens over the mean expert's.
    """

    layer: int
    expert: int
    over_mean_a: float
    over_mean_b: float


@dataclass(frozen=True, eq=False)
class TraceComparison:
    """Two traces, A and B, on the same ranks.

    Attributes:
        first, second: the analyses of A and B.
        a, b: figures of A and B.
        difference: b minus a.
        by_layer: the MoE layers.
        hottest: the hottest experts of A and of B, the hottest first.
        hottest_of_layer: number of experts of a layer that are compared as its hottest.
        edges: ascending max/mean, the edges of bins.
        parts_a, parts_b: part of the instances whose max/mean is in each bin.
    """

    first: Analysis
    second: Analysis
    a: TraceFigures
    b: TraceFigures
    difference: TraceFigures
    by_layer: tuple[LayerComparison, ...]
    hottest: tuple[ComparedExpert, ...]
    hottest_of_layer: int
    edges: tuple[float, ...]
    parts_a: tuple[float, ...]
    parts_b: tuple[float, ...]

    def mean(self, figure: str) -> float | None:
        """Mean over the layers of `correlation`, `overlap` or `hottest_in_common`; None if no layer has it."""
        values = [getattr(layer, figure) for layer in self.by_layer]
        return known_mean(np.array([np.nan if value is None else value for value in values]))

    @property
    def chance(self) -> float:
        """`hottest_in_common` of traces whose hottest experts have nothing to do with each other."""
        return self.hottest_of_layer / self.first.counts.num_experts


def check_comparable(names: Sequence[str], shapes: Sequence[RoutingTrace | TraceCounts]) -> None:
    """Raise InputError if two traces have other layers or numbers of experts. Models may have other names."""
    texts = [_shape_text(shape) for shape in shapes]
    if texts[0] != texts[1]:
        raise InputError(
            f"can't compare: {names[0]} has {texts[0]}, {names[1]} has {texts[1]}; layers and experts should be the "
            "same in both"
        )


def _shape_text(shape: RoutingTrace | TraceCounts) -> str:
    indices = shape.layer_indices.tolist()
    gaps = np.flatnonzero(np.diff(indices) != 1) + 1
    runs = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in np.split(indices, gaps) if len(run)]
    return f"{plural(len(indices), 'MoE layer')} ({', '.join(runs)}) of {plural(shape.num_experts, 'expert')}"


def compare_traces(names: Sequence[str], first: Analysis, second: Analysis) -> TraceComparison:
    """The comparison of two analyses.

    Args:
        names: of the two traces, for messages.

    Raises:
        InputError: if layers, experts, ranks or ranks per node differ.
    """
    check_comparable(names, (first.counts, second.counts))
    nodes = [(each.ranks, each.ranks_per_node) for each in (first, second)]
    if nodes[0] != nodes[1]:
        texts = [f"{ranks} ranks, {per_node} per node" for ranks, per_node in nodes]
        raise InputError(f"can't compare: {names[0]} is on {texts[0]}, {names[1]} on {texts[1]}; use the same ranks")
    loads = [each.counts.counts_MLE.sum(axis=0) for each in (first, second)]
    a, b = _figures_of(first), _figures_of(second)
    edges = np.linspace(1.0, max(1.05, first.total.max_over_mean.worst, second.total.max_over_mean.worst), BINS + 1)
    hottest_of_layer = min(first.counts.num_experts, max(LEAST_HOTTEST, first.counts.num_experts // ONE_IN))
    return TraceComparison(
        first=first,
        second=second,
        a=a,
        b=b,
        difference=TraceFigures(*(_minus(getattr(b, part.name), getattr(a, part.name)) for part in fields(a))),
        by_layer=tuple(
            LayerComparison(
                layer=index,
                max_vio_a=known_mean(first.max_over_mean_ML[:, place] - 1),
                max_vio_b=known_mean(second.max_over_mean_ML[:, place] - 1),
                **_alike(loads[0][place], loads[1][place], hottest_of_layer),
            )
            for place, index in enumerate(first.counts.layer_indices.tolist())
        ),
        hottest=_hottest(loads, first.counts.layer_indices.tolist()),
        hottest_of_layer=hottest_of_layer,
        edges=tuple(edges.tolist()),
        parts_a=_parts(first, edges),
        parts_b=_parts(second, edges),
    )


def _figures_of(analysis: Analysis) -> TraceFigures:
    counts, estimate, past = analysis.counts, analysis.estimate, analysis.placements.best("past")
    return TraceFigures(
        lost_part=estimate.lost_part if estimate else None,
        lost_s=estimate.lost_s if estimate else None,
        step_s=estimate.step_s if estimate else None,
        expert_time_lost=analysis.total.lost,
        lost_with_past=past.expert_time_lost if past else None,
        max_vio_mean=analysis.total.max_vio.mean,
        max_vio_p99=analysis.total.max_vio.p99,
        overlap_steps=analysis.stability.overlap_steps,
        sequences=counts.num_sequences,
        tokens=counts.num_tokens,
        micro_steps=counts.num_micro_steps,
        token_budget=counts.token_budget,
    )


def _minus(one: float | None, other: float | None) -> Any:
    return None if one is None or other is None else one - other


def _alike(one_E: Array, other_E: Array, hottest: int) -> dict[str, float | None]:
    """Correlation, overlap and the part of the hottest experts in common, of tokens `[E]` of two traces."""
    if not one_E.any() or not other_E.any():
        return {"correlation": None, "overlap": None, "hottest_in_common": None}
    varies = one_E.std() > 0 and other_E.std() > 0
    tops = [set(np.argsort(-loads_E, kind="stable")[:hottest].tolist()) for loads_E in (one_E, other_E)]
    return {
        "correlation": float(np.corrcoef(one_E, other_E)[0, 1]) if varies else None,
        "overlap": float(overlap(one_E, other_E)),
        "hottest_in_common": len(tops[0] & tops[1]) / hottest,
    }


def _hottest(loads: Sequence[Array], layers: Sequence[int]) -> tuple[ComparedExpert, ...]:
    """The hottest `SHOWN` experts of each trace, tokens `[L, E]`, by the larger of their two loads over the mean."""
    over = [counts_LE * counts_LE.shape[1] / np.maximum(1, counts_LE.sum(axis=1, keepdims=True)) for counts_LE in loads]
    chosen = {place for each in over for place in np.argsort(-each, axis=None, kind="stable")[:SHOWN].tolist()}
    experts = over[0].shape[1]
    found = [
        ComparedExpert(layers[place // experts], place % experts, *(float(each.flat[place]) for each in over))
        for place in sorted(chosen)
    ]
    return tuple(sorted(found, key=lambda expert: -max(expert.over_mean_a, expert.over_mean_b)))


def _parts(analysis: Analysis, edges: Array) -> tuple[float, ...]:
    known = analysis.max_over_mean_ML[~np.isnan(analysis.max_over_mean_ML)]
    return tuple((np.histogram(known, edges)[0] / max(1, len(known))).tolist())


def figures(comparison: TraceComparison) -> dict[str, Any]:
    """The JSON of `trimtab analyze --compare`.

    ranks, ranks_per_node: as given, the same for both.
    experts: number of experts of a layer.
    layers: decoder layers.
    a, b: figures of the first and of the second trace.
    correlation, overlap, hottest_in_common: means over the layers, see `by_layer`.
    chance: `hottest_in_common` of hottest experts that have nothing to do with each other.
    distribution: of max/mean over the instances of each trace.
    """
    return {
        "ranks": comparison.first.ranks,
        "ranks_per_node": comparison.first.ranks_per_node,
        "layers": comparison.first.counts.layer_indices.tolist(),
        "experts": comparison.first.counts.num_experts,
        "a": _trace(comparison.first) | asdict(comparison.a),
        "b": _trace(comparison.second) | asdict(comparison.b),
        "difference": asdict(comparison.difference),
        "correlation": comparison.mean("correlation"),
        "overlap": comparison.mean("overlap"),
        "hottest_in_common": comparison.mean("hottest_in_common"),
        "hottest_of_layer": comparison.hottest_of_layer,
        "chance": comparison.chance,
        "by_layer": [asdict(layer) for layer in comparison.by_layer],
        "hottest": [asdict(expert) for expert in comparison.hottest],
        "distribution": {
            "edges": list(comparison.edges),
            "parts_a": list(comparison.parts_a),
            "parts_b": list(comparison.parts_b),
        },
    }


def _trace(analysis: Analysis) -> dict[str, Any]:
    """What is compared.

    model: the trace's name of the model.
    steps: RL steps.
    top_k: experts of a token.
    """
    return {"model": analysis.counts.model, "steps": analysis.counts.steps, "top_k": analysis.counts.top_k}
