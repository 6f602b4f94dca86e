"""Two traces of models with the same layers and experts: the figures of both, and their difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from trimtab.analysis.analysis import Analysis
from trimtab.analysis.trace_counts import TraceCounts
from trimtab.errors import InputError
from trimtab.figures import measured, plural, with_documented_figures
from trimtab.trace import RoutingTrace


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

    @classmethod
    def of(cls, analysis: Analysis) -> TraceFigures:
        """The figures of an analysis."""
        counts, estimate, past = analysis.counts, analysis.estimate, analysis.placements.best("past")
        return cls(
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

    def minus(self, other: TraceFigures) -> TraceFigures:
        """Differences of the figures."""
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        values: list[Any] = [None if None in pair else pair[0] - pair[1] for pair in pairs]
        return TraceFigures(*values)


@dataclass(frozen=True, eq=False)
class TraceComparison:
    """Two traces, A and B, on the same ranks.

    Attributes:
        first, second: the analyses of A and B.
        a, b: figures of A and B.
        difference: b minus a.
    """

    first: Analysis
    second: Analysis
    a: TraceFigures
    b: TraceFigures
    difference: TraceFigures


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
    a, b = TraceFigures.of(first), TraceFigures.of(second)
    return TraceComparison(first, second, a, b, b.minus(a))


def figures(comparison: TraceComparison) -> dict[str, Any]:
    """The JSON of `trimtab analyze --compare`.

    ranks, ranks_per_node: as given, the same for both.
    experts: number of experts of a layer.
    layers: decoder layers.
    a, b: figures of the first and of the second trace.
    """
    return {
        "ranks": comparison.first.ranks,
        "ranks_per_node": comparison.first.ranks_per_node,
        "layers": comparison.first.counts.layer_indices.tolist(),
        "experts": comparison.first.counts.num_experts,
        "a": _trace(comparison.first) | asdict(comparison.a),
        "b": _trace(comparison.second) | asdict(comparison.b),
        "difference": asdict(comparison.difference),
    }


def _trace(analysis: Analysis) -> dict[str, Any]:
    """What is compared.

    model: the trace's name of the model.
    steps: RL steps.
    top_k: experts of a token.
    """
    return {"model": analysis.counts.model, "steps": analysis.counts.steps, "top_k": analysis.counts.top_k}
