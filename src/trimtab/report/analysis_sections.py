"""The sections of an analysis page: cost of imbalance, gains of placements, details."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from trimtab.analysis import Analysis
from trimtab.analysis.analysis import worst_layers
from trimtab.analysis.answer import cost, notes, where
from trimtab.analysis.balance import Balance, SizeBalance, Spread
from trimtab.analysis.hot import HOT
from trimtab.report.analysis_data import alike_span, hot_columns, load_map, vio_columns, vio_span
from trimtab.report.charts import Line, bar_chart, line_chart
from trimtab.report.model import AnalysisReport
from trimtab.report.widgets import NONE, Section, facts, heat_map, notes_section, number, table

SHOWN_LAYERS = 10
BINS = 24
KNOWS = {"nothing": "static", "past": "based on past loads", "step": "based on the step, in hindsight"}


def analysis_sections(report: AnalysisReport) -> list[Section]:
    """Returns the sections for which the trace has data."""
    analysis = report.analysis
    found = [
        Section("balance", "Cost", "What imbalance costs", _balance(analysis)),
        Section("foresight", "Foresight", "Would foresight help?", _foresight(analysis)),
        Section("layers", "Where", "Where the time is lost", _layers(analysis)),
        Section("load", "Load", "Load of every rank", _loads(analysis)),
        Section("sizes", "Sizes", "Other micro-steps, other ranks", _sizes(analysis)),
        Section("steps", "Steps", "The step and its micro-steps", _steps(analysis)),
        Section("hot", "Hot experts", "Hot experts, and how long they stay hot", _hot(analysis)),
    ]
    if len(analysis.domains) > 1:
        found.append(Section("domains", "Domains", "Kinds of prompts", _domains(analysis)))
    found.append(Section("setting", "Setting", "Setting", facts(setting_facts(report))))
    found.append(notes_section(notes(analysis)))
    return found


def setting_facts(report: AnalysisReport) -> list[tuple[str, str]]:
    """Trace, ranks and micro-steps."""
    analysis, counted = report.analysis, report.analysis.counted
    steps = counted.steps
    which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    return [
        ("trace", report.source),
        ("model", f"{counted.model or 'unknown'}: {shape_text(analysis)}"),
        ("contents", f"{counted.num_tokens:,} tokens in {counted.num_sequences:,} sequences, {which}"),
        ("ranks", f"{analysis.ranks}, {analysis.ranks_per_node} a node, homes contiguous"),
        ("micro-steps", f"{counted.num_micro_steps}, of up to {counted.token_budget:,} tokens a rank"),
    ]


def shape_text(analysis: Analysis) -> str:
    """Layers, experts and top_k."""
    counted = analysis.counted
    return f"{counted.num_layers} MoE layers, {counted.num_experts} experts, top-{counted.top_k}"


def stability_facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Facts on stability of steps and change between micro-steps."""
    found = analysis.stability
    entries = [
        ("max/mean of a step's sum", f"{found.step_max_over_mean:.3f}, mean over layers"),
        ("max/mean of a micro-step", f"{found.micro_step_max_over_mean:.3f}, mean over instances"),
        ("busiest rank", f"another than the step's busiest in {found.busiest_rank_changes:.0%} of instances"),
    ]
    for name, value in (
        ("next micro-step", found.overlap_micro_steps),
        ("a step's halves", found.overlap_halves),
        ("next step", found.overlap_steps),
    ):
        if value is not None:
            entries.append((name, f"{value:.1%} of expert load in common"))
    return entries


def hot_facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Facts on hot experts: number, tokens, duration."""
    hot = analysis.hot
    entries = [
        (
            "hot",
            f"{hot.per_instance:.1f} of {analysis.counted.num_experts} experts an instance; they compute "
            f"{hot.token_part:.0%} of all tokens",
        ),
    ]
    if hot.stay is not None:
        entries.append(("in the next micro-step", f"{hot.stay:.0%} are still hot; any expert is with {hot.chance:.1%}"))
    if hot.mean_run:
        entries.append(("a run", f"{hot.mean_run:.1f} micro-steps on average"))
    if hot.alike_halves is not None:
        entries.append(("a step's halves", f"{hot.alike_halves:.0%} of hot experts in common"))
    if hot.alike_steps is not None:
        entries.append(("step to step", f"{hot.alike_steps:.0%} of hot experts in common"))
    return entries


def run_bars(analysis: Analysis) -> list[tuple[str, int]]:
    """Runs of hot experts by length, without empty lines at the end."""
    bars, before = [], 0
    for longest, count in analysis.hot.runs:
        name = (
            f"{before + 1}+"
            if longest is None
            else str(longest)
            if longest == before + 1
            else f"{before + 1}–{longest}"
        )
        bars.append((name, count))
        before = longest or before
    while len(bars) > 1 and not bars[-1][1]:
        bars.pop()
    return bars


def size_name(size: SizeBalance) -> str:
    """Name of a micro-step size relative to the given one."""
    if size.factor is None:
        return "step"
    return {0.25: "¼×", 0.5: "½×"}.get(size.factor, f"{size.factor:.0f}×")


def same_tokens_a_rank(analysis: Analysis) -> list[tuple[int, Balance]]:
    """Numbers of ranks with proportional micro-steps, if available."""
    by_factor = {size.factor: size.by_ranks for size in analysis.sizes}
    numbers = analysis.sizes[0].by_ranks
    return [
        (number, by_factor[number / analysis.ranks][number])
        for number in numbers
        if number / analysis.ranks in by_factor
    ]


def _balance(analysis: Analysis) -> str:
    total = analysis.total
    rows = [
        _spread_row("max_vio of ranks", total.max_vio),
        _spread_row("balancedness of ranks", total.balancedness),
    ]
    if analysis.nodes:
        rows.append(_spread_row("max_vio of nodes", analysis.nodes.max_vio))
    said = cost(analysis)
    lead = (
        f'<p class="lead">Over {total.instances:,} instances, each one layer of one micro-step. An instance lasts as '
        f"long as its busiest rank, so on average a rank is idle for {total.lost:.1%} of expert time.</p>"
    )
    return (
        lead
        + (f'<p class="said">{escape(said)}</p>' if said else "")
        + '<div class="pair">'
        + f"<div>{table(['figure', 'mean', 'p50', 'p99', 'worst'], rows, 'Balance over instances')}</div>"
        + f"{_histogram(analysis)}</div>"
    )


def _spread_row(name: str, spread: Spread) -> str:
    cells = "".join(f"<td>{value:.3f}</td>" for value in (spread.mean, spread.p50, spread.p99, spread.worst))
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'


def _histogram(analysis: Analysis) -> str:
    found = analysis.max_over_mean_ML[~np.isnan(analysis.max_over_mean_ML)]
    spread = analysis.total.max_over_mean
    high = max(spread.worst, 1.05)
    counts, edges = np.histogram(found, BINS, (1.0, high))
    bars = [
        (f"{low:.2f} to {up:.2f}", int(count)) for low, up, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    marks = [
        ((value - 1) / (high - 1), f"{name} {value:.2f}")
        for name, value in (("mean", spread.mean), ("p99", spread.p99))
    ]
    ticks = [f"{edges[0] + (high - 1) * part:.2f}" for part in (0, 0.25, 0.5, 0.75, 1)]
    return bar_chart("Instances by max/mean", bars, "busiest rank over the mean rank", edges=ticks, marks=marks)


def _foresight(analysis: Analysis) -> str:
    found = analysis.foresight
    longest = max([way.lost for way in found.ways] + [1e-9])
    rows = []
    for way in found.ways:
        bar = f'<i style="width:{100 * way.lost / longest:.2f}%"></i><span>{way.lost:.1%}</span>'
        rows.append(
            f'<tr><th scope="row">{escape(way.about)}<span class="about">{KNOWS[way.knows]}</span></th>'
            f'<td class="with-bar"><span class="amount">{bar}</span></td>'
            f"<td>{number(way.won_back, '.0%')}</td><td>{way.max_over_mean:.3f}</td><td>{way.p99:.3f}</td></tr>"
        )
    everything = "100%" if any(way.won_back is not None for way in found.ways) else NONE
    rows.append(
        '<tr class="ours"><th scope="row">a plan for each micro-step<span class="about">based on each micro-step; '
        "trimtab plan computes it</span></th>"
        '<td class="with-bar"><span class="amount"><i style="width:0%"></i><span>about 0</span></span></td>'
        f"<td>{everything}</td><td>1.00</td><td>1.00</td></tr>"
    )
    columns = ["placement", "expert time lost", "won back", "max/mean", "p99"]
    return (
        '<p class="lead">Loss with placements that are fixed for a step, on '
        f"{found.instances:,} instances. The loss that remains in hindsight changes from one micro-step to the next, "
        "and only a plan for each micro-step removes it.</p>" + table(columns, rows, "Placements of experts")
    )


def _layers(analysis: Analysis) -> str:
    rows = []
    priced = analysis.price
    for layer in worst_layers(analysis)[:SHOWN_LAYERS]:
        spread = analysis.layers[layer].max_vio
        money = f"<td>{priced.lost_L[layer] * 1e3:,.1f} ms</td>" if priced else ""
        rows.append(
            f'<tr><th scope="row"><button type="button" class="link" data-layer="{layer}">layer '
            f"{analysis.counted.layer_indices[layer]}</button></th><td>{analysis.lost_share_L[layer]:.1%}</td>{money}"
            f"<td>{spread.mean:.3f}</td><td>{spread.p50:.3f}</td><td>{spread.p99:.3f}</td><td>{spread.worst:.3f}</td></tr>"
        )
    columns = ["layer", "of the lost time", "of a step" if priced else "", "max_vio", "p50", "p99", "worst"]
    step = int(np.diff(vio_columns(analysis))[0]) if len(vio_columns(analysis)) > 1 else 1
    joined = f" Columns are means of {step} micro-steps." if step > 1 else ""
    said = where(analysis)
    lead = f'<p class="said">{escape(said)}</p>' if said else ""
    return (
        f"{lead}"
        + _grid("vio", "max_vio of every layer and micro-step", [], 0)
        + _scale("0", f"{vio_span(analysis)[1]:.2f}", f"max_vio: max/mean - 1 over ranks.{joined}")
        + "</figure><h3>Layers that lose most</h3>"
        + table(columns, rows, "Layers that lose most")
    )


def _grid(name: str, title: str, planes: Sequence[str], start: int) -> str:
    """Opening HTML of a figure; its caption and end follow."""
    picker = ""
    if len(planes) > 1:
        options = "".join(
            f'<option value="{index}"{" selected" if index == start else ""}>{escape(plane)}</option>'
            for index, plane in enumerate(planes)
        )
        picker = (
            f'<div class="controls"><span class="field"><label for="grid-{name}">Layer</label>'
            f'<select id="grid-{name}">{options}</select></span></div>'
        )
    keys = " Page Up and Page Down change the layer." if picker else ""
    return (
        f'<figure data-grid="{name}"><figcaption><b>{escape(title)}</b></figcaption>{picker}'
        f'<div><canvas tabindex="0" role="application" aria-roledescription="heat map" '
        f'aria-describedby="grid-{name}-readout" aria-label="{escape(title)}. Arrow keys move.{keys}"></canvas></div>'
        f'<output class="readout" id="grid-{name}-readout" aria-live="polite">Point at a cell, or use Tab and the '
        "arrow keys.</output>"
    )


def _scale(low: str, high: str, says: str) -> str:
    return (
        f'<div class="scale from-mean"><i></i><div><span style="left:0">{low}</span>'
        f'<span style="left:100%">{high}</span></div><span>'
        f"{escape(says)}</span></div>"
    )


def _loads(analysis: Analysis) -> str:
    loads, chosen = load_map(analysis)
    names = [str(index) for index in analysis.counted.layer_indices]
    return _every(chosen, analysis) + heat_map((loads,), names, worst_layers(analysis)[0])


def _every(chosen: np.ndarray, analysis: Analysis) -> str:
    if len(chosen) == analysis.counted.num_micro_steps:
        return ""
    return f'<p class="note">One micro-step in {chosen[1] - chosen[0]} is shown, to keep the page small.</p>'


def _sizes(analysis: Analysis) -> str:
    here = [size.by_ranks[analysis.ranks].max_vio for size in analysis.sizes]
    numbers = list(analysis.sizes[0].by_ranks)
    usual = next(size for size in analysis.sizes if size.factor == 1)
    alike = dict(same_tokens_a_rank(analysis))
    charts = [
        line_chart(
            f"max_vio by size of micro-step, {analysis.ranks} ranks",
            [size_name(size) for size in analysis.sizes],
            [Line("mean", [each.mean for each in here]), Line("p99", [each.p99 for each in here])],
            f"size, where 1× is {usual.tokens:,.0f} tokens",
        ),
        line_chart(
            "mean max_vio by number of ranks",
            [str(number) for number in numbers],
            [
                Line("same micro-steps", [usual.by_ranks[number].max_vio.mean for number in numbers]),
                Line(
                    "same tokens a rank",
                    [alike[number].max_vio.mean if number in alike else None for number in numbers],
                ),
            ],
            "ranks",
        ),
    ]
    rows = [
        f'<tr><th scope="row">{size_name(size)}<span class="about">{size.tokens:,.0f} tokens, '
        f"{size.micro_steps} of them</span></th>"
        + "".join(f"<td>{size.by_ranks[number].max_vio.mean:.3f}</td>" for number in numbers)
        + "</tr>"
        for size in analysis.sizes
    ]
    columns = ["micro-step", *(f"{number} ranks" for number in numbers)]
    return (
        '<p class="lead">Larger micro-steps average over more sequences; more ranks leave fewer experts on '
        f'each to even out.</p><div class="pair">{"".join(charts)}</div><h3>Mean max_vio</h3>'
        + table(columns, rows, "Mean max_vio by size of micro-step and number of ranks")
    )


def _steps(analysis: Analysis) -> str:
    return (
        '<p class="lead">A step sums many sequences and may be stable where its micro-steps are not. The load in '
        "common is the sum over experts of the smaller of two shares: 100% for equal proportions.</p>"
        + facts(stability_facts(analysis))
    )


def _hot(analysis: Analysis) -> str:
    hot, counted = analysis.hot, analysis.counted
    rows = [
        f'<tr><th scope="row">layer {counted.layer_indices[expert.layer]}, expert {expert.expert}</th>'
        f"<td>{expert.over_mean:.2f}×</td><td>{expert.hot_part:.0%}</td><td>{expert.longest_run}</td></tr>"
        for expert in hot.hottest
    ]
    worst = worst_layers(analysis)[0]
    names = [f"layer {index}" for index in counted.layer_indices]
    columns = ["expert", "over the mean", "hot in", "longest run"]
    return (
        f'<p class="lead">An expert is hot in an instance if it has more than {HOT} times the mean tokens.</p>'
        + facts(hot_facts(analysis))
        + '<div class="pair below">'
        + bar_chart("How long experts stay hot", run_bars(analysis), "consecutive micro-steps of a step")
        + f"<div>{table(columns, rows, 'Hottest experts')}</div></div><h3></h3>"
        + _every(hot_columns(analysis), analysis)
        + _grid("hot", "Tokens of every expert in every micro-step", names, worst)
        + _scale("1×", "4×", "over the mean expert; less than the mean is left blank")
        + "</figure>"
    )


def _domains(analysis: Analysis) -> str:
    rows = [
        f'<tr><th scope="row">{escape(domain.name or "(no label)")}</th><td>{domain.token_part:.1%}</td>'
        f"<td>{domain.max_over_mean:.3f}</td><td>{domain.busier_half_share:.1%}</td>"
        f"<td>{domain.hottest_over_mean:.2f}×</td></tr>"
        for domain in analysis.domains
    ]
    columns = ["domain", "of all tokens", "max/mean alone", "busier half's tokens", "hottest expert"]
    low, high = alike_span(analysis)
    return (
        '<p class="lead">Each domain is analyzed as if the trace had no other sequences; means over layers. The '
        "skew of one kind of prompt does not decrease with more sequences; a mixture of kinds is more even.</p>"
        + table(columns, rows, "Domains")
        + '<div class="below">'
        + _grid("alike", "Expert load that two domains have in common", [], 0)
        + _scale(f"{low:.0%}", f"{high:.0%}", "mean over layers")
        + "</figure></div>"
    )
