"""The sections of an analysis page: cost of imbalance, gains of placements, details."""

from __future__ import annotations

import numpy as np

from trimtab.analysis import Analysis
from trimtab.analysis.analysis import worst_layers
from trimtab.analysis.hot_experts import HOT_FACTOR
from trimtab.analysis.summary import cost_summary, layers_summary, notes
from trimtab.array_type import Array
from trimtab.figures import plural
from trimtab.report.analysis_tables import (
    balance_table,
    domains_table,
    hot_facts,
    hottest_table,
    layers_table,
    placements_table,
    ranks_chart,
    run_bars,
    setting_facts,
    sizes_by_ranks_table,
    sizes_chart,
    stability_facts,
)
from trimtab.report.charts import bar_chart, line_chart
from trimtab.report.model import AnalysisReport
from trimtab.report.page_data import (
    hot_columns,
    hot_scale,
    hot_values,
    load_map,
    overlap_scale,
    vio_columns,
    vio_scale,
    vio_values,
)
from trimtab.report.tables import html_table
from trimtab.report.widgets import (
    Section,
    colour_legend,
    facts,
    grid,
    heat_map,
    lead,
    notes_section,
    summary,
    times,
)

SHOWN_LAYERS = 10
BINS = 24


def analysis_sections(report: AnalysisReport) -> list[Section]:
    """The sections for which the trace has data, in order."""
    analysis = report.analysis
    found = [
        Section("balance", "Cost", "What imbalance costs", _balance(analysis)),
        Section("placements", "Known routing", "Does known routing help?", _placements(analysis)),
        Section("layers", "Layers", "Where the time is lost", _layers(analysis)),
        Section("load", "Load", "Load of every rank", _loads(analysis)),
        Section("sizes", "Sizes", "Other micro-step sizes and numbers of ranks", _sizes(analysis)),
        Section("steps", "Steps", "Whole steps and micro-steps", _steps(analysis)),
        Section("hot", "Hot experts", "Hot experts, and how long they stay hot", _hot(analysis)),
    ]
    if len(analysis.domains) > 1:
        found.append(Section("domains", "Domains", "Skew by domain of the prompts", _domains(analysis)))
    found.append(Section("setting", "Setting", "Setting", facts(setting_facts(report))))
    found.append(notes_section(notes(analysis)))
    return found


def _balance(analysis: Analysis) -> str:
    total = analysis.total
    return (
        lead(
            f"Over {plural(total.instances, 'instance')}, each one layer of one micro-step. An instance lasts as long "
            f"as its busiest rank, so on average a rank is idle for {total.lost:.1%} of expert time."
        )
        + summary(cost_summary(analysis))
        + f'<div class="pair"><div>{html_table(balance_table(analysis))}</div>{_histogram(analysis)}</div>'
    )


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


def _placements(analysis: Analysis) -> str:
    return lead(
        "Expert time lost if experts are placed once for a whole step, over "
        f"{plural(analysis.placements.instances, 'instance')}. The loss that remains with a placement based on the "
        "step itself varies between micro-steps, or is due to experts that can't be divided evenly. Only a plan for "
        "each micro-step removes the part that varies."
    ) + html_table(placements_table(analysis))


def _layers(analysis: Analysis) -> str:
    columns = vio_columns(analysis)
    step = int(columns[1] - columns[0]) if len(columns) > 1 else 1
    joined = f", the mean of {step} micro-steps in each column" if step > 1 else ""
    caption = f"max_vio: max/mean - 1 over ranks{joined}"
    legend = colour_legend(vio_scale(vio_values(analysis)), lambda value: f"{round(value, 2):g}", caption)
    layers = layers_table(analysis, SHOWN_LAYERS)
    return (
        summary(layers_summary(analysis))
        + grid("vio", "max_vio of every layer and micro-step", legend)
        + f"<h3>{layers.title}</h3>"
        + html_table(layers)
    )


def _loads(analysis: Analysis) -> str:
    loads, chosen = load_map(analysis)
    names = [str(index) for index in analysis.counts.layer_indices]
    return _selection_note(chosen, analysis) + heat_map((loads,), names, worst_layers(analysis)[0])


def _selection_note(chosen: Array, analysis: Analysis) -> str:
    if len(chosen) == analysis.counts.num_micro_steps:
        return ""
    return f'<p class="note">One micro-step in {chosen[1] - chosen[0]} is shown, to keep the page small.</p>'


def _sizes(analysis: Analysis) -> str:
    return (
        lead(
            "Larger micro-steps average over more sequences, so they are more even. With more ranks, each has fewer "
            "experts to average over, so loads are less even."
        )
        + f'<div class="pair">{line_chart(sizes_chart(analysis))}{line_chart(ranks_chart(analysis))}</div>'
        + "<h3>Mean max_vio</h3>"
        + html_table(sizes_by_ranks_table(analysis))
    )


def _steps(analysis: Analysis) -> str:
    return lead(
        "The sum over a step can be even although its micro-steps are not. Load in common is the sum over experts of "
        "the smaller of two shares: 100% for equal proportions."
    ) + facts(stability_facts(analysis))


def _hot(analysis: Analysis) -> str:
    names = [f"layer {index}" for index in analysis.counts.layer_indices]
    caption = "tokens divided by those of the mean expert"
    legend = colour_legend(hot_scale(hot_values(analysis)), times, caption)
    bars = bar_chart("Runs of hot experts, by length", run_bars(analysis), "consecutive micro-steps")
    return (
        lead(f"An expert is hot in an instance if it has more than {HOT_FACTOR} times the mean expert's tokens.")
        + facts(hot_facts(analysis))
        + f'<div class="pair below">{bars}<div>{html_table(hottest_table(analysis))}</div></div>'
        + f'<div class="below">{_selection_note(hot_columns(analysis), analysis)}'
        + grid("hot", "Tokens of every expert in every micro-step", legend, names, worst_layers(analysis)[0])
        + "</div>"
    )


def _domains(analysis: Analysis) -> str:
    caption = "mean over layers; columns are in the order of the rows"
    legend = colour_legend(overlap_scale(analysis.overlap_DD), lambda value: f"{value:.0%}", caption)
    return (
        lead(
            "Each domain is analyzed as if the trace had no other sequences; figures are means over layers. The skew "
            "of one domain does not decrease with more sequences; a mixture of domains is more even."
        )
        + html_table(domains_table(analysis))
        + f'<div class="below">{grid("overlap", "Expert load that two domains have in common", legend)}</div>'
    )
