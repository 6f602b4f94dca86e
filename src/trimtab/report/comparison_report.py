"""Two traces compared: sentences, tables and charts, the terminal output of `--compare`, and the page's sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.markup import escape

from trimtab.analysis import Analysis
from trimtab.analysis.summary import assumed, notes
from trimtab.analysis.trace_comparison import LayerComparison, TraceComparison, TraceFigures
from trimtab.figures import described_figures, plural
from trimtab.report.analysis_tables import contents_text
from trimtab.report.charts import Line, LineChart, line_chart
from trimtab.report.model import LoadMap
from trimtab.report.number_text import NONE, number, seconds
from trimtab.report.page_data import PageArrays, load_map, load_scale, map_data, page_data
from trimtab.report.tables import (
    Facts,
    Row,
    TableData,
    first_lines,
    html_table,
    terminal_facts,
    terminal_table,
    without_empty_columns,
)
from trimtab.report.widgets import Section, facts, heat_map, lead, notes_section, tiles

LABELS = ("A", "B")
COLUMNS = ("A", "B", "B - A")
SHOWN_LAYERS = 5
# Correlations of expert loads from which the same experts are hot, and below which others are.
SAME, OTHER = 0.8, 0.3


@dataclass(frozen=True, eq=False)
class ComparisonReport:
    """A page on two traces.

    Attributes:
        sources: the files of A and of B, as text.
    """

    sources: tuple[str, str]
    comparison: TraceComparison

    @property
    def title(self) -> str:
        ranks = self.comparison.first.ranks
        models = dict.fromkeys(each.counts.model or "a trace" for each in _both(self.comparison))
        return f"Two traces compared: expert load of {' and '.join(models)} on {plural(ranks, 'rank')}"

    @property
    def assumed(self) -> str:
        """Returns what nobody stated; "" if nothing was assumed."""
        return assumed([self.comparison.first, self.comparison.second])

    @property
    def answer(self) -> str:
        """The difference in imbalance, and whether the same experts are hot."""
        comparison = self.comparison
        a, b, difference = comparison.a, comparison.b, comparison.difference
        if a.lost_part is not None and b.lost_part is not None:
            lost, change = (a.lost_part, b.lost_part), difference.lost_part or 0.0
            cost = "Imbalance costs {:.1%} of a step in A and {:.1%} in B"
        else:
            lost, change = (a.expert_time_lost, b.expert_time_lost), difference.expert_time_lost
            cost = "On average a rank is idle for {:.1%} of expert time in A and {:.1%} in B"
        return f"{cost.format(*lost)} ({_difference(change, 'part', 1.0)}). {self._experts_answer()}"

    def _experts_answer(self) -> str:
        comparison = self.comparison
        correlation, load, hottest = map(comparison.mean, ("correlation", "overlap", "hottest_in_common"))
        if load is None or hottest is None:
            return "No layer has tokens in both."
        if correlation is None:
            verdict = "At least one has even loads"
        else:
            verdict = (
                "The same experts are hot" if correlation >= SAME else
                "Other experts are hot" if correlation < OTHER else "Only some of the hot experts are the same"
            )  # fmt: skip
        return (
            f"{verdict}: {load:.0%} of the expert load is in common (correlation {number(correlation, '.2f')}), and "
            f"{hottest:.0%} of the {comparison.hottest_of_layer} hottest of a layer's "
            f"{plural(comparison.first.counts.num_experts, 'expert')} ({comparison.chance:.0%} by chance)."
        )


def _both(comparison: TraceComparison) -> tuple[Analysis, Analysis]:
    return comparison.first, comparison.second


def comparison_output(report: ComparisonReport) -> list[RenderableType]:
    """What `trimtab analyze --compare` prints."""
    comparison = report.comparison
    return [
        *first_lines(report.assumed),
        f"[bold]{escape(report.answer)}[/bold]",
        "",
        terminal_facts(comparison_facts(report), "Compared"),
        terminal_table(figures_table(comparison)),
        terminal_table(differing_layers_table(comparison, SHOWN_LAYERS)),
        terminal_table(hottest_of_both_table(comparison)),
        "\n".join(map(escape, comparison_notes(comparison))),
    ]


def comparison_facts(report: ComparisonReport) -> Facts:
    """The two traces, and what is the same for both."""
    first = report.comparison.first
    layers = f"{plural(first.counts.num_layers, 'MoE layer')}, {plural(first.counts.num_experts, 'expert')}"
    return [
        *(
            (label, f"{source}: {each.counts.model or 'unknown model'}, {contents_text(each)}")
            for label, source, each in zip(LABELS, report.sources, _both(report.comparison), strict=True)
        ),
        ("layers", layers),
        ("ranks", f"{first.ranks}, {first.ranks_per_node} per node, contiguous homes"),
    ]


def figures_table(comparison: TraceComparison) -> TableData:
    """The figures of both and their difference, without those that neither has."""
    rows = []
    for name, (unit, text, _) in described_figures(TraceFigures).items():
        values = [getattr(each, name) for each in (comparison.a, comparison.b, comparison.difference)]
        known = [abs(value) for value in values[:2] if value is not None]
        if not known:
            continue
        texts = [_text(value, unit, max(known)) for value in values[:2]]
        rows.append(Row(text, (*texts, _difference(values[2], unit, max(known)))))
    return TableData("A and B", ("figure", *COLUMNS), tuple(rows))


def _text(value: float | None, unit: str, span: float) -> str:
    """A figure as text; seconds in a unit that suits `span`."""
    if value is None:
        return NONE
    shapes = {"part": ".1%", "ratio": ".3f", "count": ",d"}
    return seconds(value, span) if unit == "s" else format(value, shapes[unit])


def _difference(value: float | None, unit: str, span: float) -> str:
    """A difference with its sign; one of percentages in percentage points."""
    if value is None:
        return NONE
    sign = "+" if value > 0 else ""
    if unit == "part":
        return f"{round(100 * value, 1) + 0.0:+.1f} points"
    return sign + _text(value, unit, span)


def differing_layers_table(comparison: TraceComparison, most: int) -> TableData:
    """The layers whose max_vio differs most, at most `most` of them."""

    def change(layer: LayerComparison) -> float | None:
        a, b = layer.max_vio_a, layer.max_vio_b
        return None if a is None or b is None else b - a

    places = sorted(range(len(comparison.by_layer)), key=lambda place: -abs(change(comparison.by_layer[place]) or 0.0))
    rows = []
    for place in places[:most]:
        layer = comparison.by_layer[place]
        cells = (
            number(layer.max_vio_a, ".3f"),
            number(layer.max_vio_b, ".3f"),
            number(change(layer), "+.3f"),
            number(layer.correlation, ".2f"),
            number(layer.overlap, ".0%"),
            number(layer.hottest_in_common, ".0%"),
        )
        rows.append(Row(f"layer {layer.layer}", cells, layer=place))
    columns = ("layer", "max_vio A", "B", "B - A", "correlation", "load in common", "hottest in common")
    return without_empty_columns(TableData("Layers that differ most", columns, tuple(rows)))


def hottest_of_both_table(comparison: TraceComparison) -> TableData:
    """The hottest experts of A and of B, tokens over those of the mean expert."""
    rows = tuple(
        Row(
            f"layer {each.layer}, expert {each.expert}",
            (
                f"{each.over_mean_a:.2f}x",
                f"{each.over_mean_b:.2f}x",
                f"{each.over_mean_b - each.over_mean_a:+.2f}",
            ),
        )
        for each in comparison.hottest
    )
    return TableData("Hottest experts of A or B, tokens / mean", ("expert", *COLUMNS), rows)


def comparison_notes(comparison: TraceComparison) -> list[str]:
    """What makes the two less comparable, then assumptions and limits: of both, and of one alone."""
    a, b = (each.counts for each in _both(comparison))
    texts = []
    if a.model != b.model:
        names = f"{a.model or 'unknown'} and {b.model or 'unknown'}"
        texts.append(f"The models differ ({names}): experts of the same number have nothing to do with each other.")
    if a.top_k != b.top_k:
        texts.append(f"A token has {plural(a.top_k, 'expert')} in A and {b.top_k} in B.")
    tokens = [each.num_tokens / each.num_micro_steps for each in (a, b)]
    if max(tokens) > 1.25 * min(tokens):
        texts.append(
            f"Micro-steps have {tokens[0]:,.0f} tokens in A and {tokens[1]:,.0f} in B: larger ones are more even. "
            "A smaller --token-budget makes them alike."
        )
    estimates = [each.estimate for each in _both(comparison)]
    settings = {(each.model, each.cluster) for each in estimates if each}
    if len(settings) > 1 or estimates.count(None) == 1:
        texts.append("Seconds are of different models or clusters, or of one trace alone.")
    found = [notes(each) for each in _both(comparison)]
    texts += [text for text in found[0] if text in found[1]]
    for label, mine, others in zip(LABELS, found, reversed(found), strict=True):
        texts += [f"{label}: {text}" for text in mine if text not in others]
    return texts


def comparison_tiles(comparison: TraceComparison) -> list[tuple[str, str, str]]:
    """The main figures: cost of imbalance, what only known routing gains, sequences, and hot experts in common."""
    a, b = comparison.a, comparison.b

    def tile(name: str, figure: str, about: str) -> tuple[str, str, str]:
        unit = described_figures(TraceFigures)[figure][0]
        values = [getattr(each, figure) for each in (a, b)]
        texts = " / ".join(_text(value, unit, 1.0) for value in values)
        change = getattr(comparison.difference, figure)
        return name, texts, f"A / B, {about}" + (f"; {_difference(change, unit, 1.0)}" if change else "")

    has_seconds = a.lost_part is not None and b.lost_part is not None
    cost = ("lost_part", "of a step") if has_seconds else ("expert_time_lost", "of expert time")
    has_past = a.lost_with_past is not None and b.lost_with_past is not None
    known = "of expert time, over a placement by past loads" if has_past else "unknown: a step needs two micro-steps"
    hottest = number(comparison.mean("hottest_in_common"), ".0%")
    return [
        tile("Cost of imbalance", *cost),
        tile("Gain of known routing", "lost_with_past", known),
        tile("Sequences", "sequences", "in all"),
        ("Hot experts in common", hottest,
         f"of the {comparison.hottest_of_layer} hottest of a layer; {comparison.chance:.0%} by chance"),
    ]  # fmt: skip


def layers_of_both_chart(report: ComparisonReport) -> LineChart:
    """Mean max_vio of every layer."""
    layers = report.comparison.by_layer
    return LineChart(
        "Mean max_vio by layer", "decoder layer", [str(layer.layer) for layer in layers],
        [
            Line(f"A: {report.sources[0]}", [layer.max_vio_a for layer in layers]),
            Line(f"B: {report.sources[1]}", [layer.max_vio_b for layer in layers]),
        ],
    )  # fmt: skip


def distribution_chart(report: ComparisonReport) -> LineChart:
    """Part of the instances at or below each max/mean."""
    comparison = report.comparison
    both = [[0.0, *np.cumsum(parts)] for parts in (comparison.parts_a, comparison.parts_b)]
    return LineChart(
        "Part of the instances at or below a max/mean", "busiest rank over the mean rank",
        [f"{edge:.2f}" for edge in comparison.edges],
        [
            Line(f"A: {report.sources[0]}", both[0]),
            Line(f"B: {report.sources[1]}", both[1]),
        ],
    )  # fmt: skip


def in_common_chart(comparison: TraceComparison) -> LineChart:
    """What the expert loads of every layer have in common."""
    layers = comparison.by_layer
    return LineChart(
        "Expert load in common, by layer", "decoder layer", [str(layer.layer) for layer in layers],
        [
            Line("load in common", [layer.overlap for layer in layers]),
            Line("hottest experts in common", [layer.hottest_in_common for layer in layers]),
        ],
    )  # fmt: skip


def worst_of_both(comparison: TraceComparison) -> int:
    """Index of the layer that loses most in both together."""
    return int(np.argmax(comparison.first.lost_share_L + comparison.second.lost_share_L))


def comparison_data(comparison: TraceComparison, arrays: PageArrays) -> dict[str, Any]:
    """Values for the page's scripts."""
    maps, columns = _maps(comparison)
    return page_data(
        _layer_names(comparison),
        [map_data(each, arrays) | {"columns": shown} for each, shown in zip(maps, columns, strict=True)],
        load_scale(maps),
        start_layer=worst_of_both(comparison),
    )


def _maps(comparison: TraceComparison) -> tuple[list[LoadMap], list[list[int]]]:
    """Rank loads of A and of B in evenly chosen micro-steps, and the indices of these."""
    found = [load_map(each) for each in _both(comparison)]
    maps = [LoadMap(label, loads.loads_MLR) for label, (loads, _) in zip(LABELS, found, strict=True)]
    return maps, [chosen.tolist() for _, chosen in found]


def _layer_names(comparison: TraceComparison) -> list[str]:
    return [str(layer.layer) for layer in comparison.by_layer]


def comparison_sections(report: ComparisonReport) -> list[Section]:
    """The sections of the page, in order."""
    comparison = report.comparison
    load = heat_map(_maps(comparison)[0], _layer_names(comparison), worst_of_both(comparison))
    explained = (
        "Correlation is that of the experts' tokens, load in common the sum over experts of the smaller of two shares. "
        f"Hottest in common: of the {comparison.hottest_of_layer} hottest experts of A in this layer, the part that is "
        f"also among those of B; {comparison.chance:.0%} by chance."
    )
    by_layer, often = line_chart(layers_of_both_chart(report)), line_chart(distribution_chart(report))
    hottest = html_table(hottest_of_both_table(comparison))
    return [
        Section("figures", "Figures", "At a glance", tiles(comparison_tiles(comparison))),
        Section("compared", "A and B", "A and B, and their difference", (
            facts(comparison_facts(report)) + f'<div class="below">{html_table(figures_table(comparison))}</div>'
        )),
        Section("layers", "Layers", "Imbalance by layer, and how often", (
            lead("Homes are contiguous; both traces have the same scale. max_vio is max/mean - 1 of rank loads.")
            + f'<div class="pair">{by_layer}{often}</div><h3>Layers that differ most</h3>'
            + lead(explained)
            + html_table(differing_layers_table(comparison, 2 * SHOWN_LAYERS))
        )),
        Section("hot", "Hot experts", "Are the same experts hot?", (
            lead(
                "If they are, a placement made for one trace suits the other; if not, placements have to follow the "
                "routing."
            )
            + f'<div class="pair">{line_chart(in_common_chart(comparison))}<div>{hottest}</div></div>'
        )),
        Section("load", "Load", "Load of every rank", load),
        notes_section(comparison_notes(comparison)),
    ]  # fmt: skip
