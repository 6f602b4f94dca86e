"""Tables, facts and charts of an analysis as data, and the terminal output of `trimtab analyze`."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape

from trimtab.analysis import Analysis
from trimtab.analysis.analysis import worst_layers
from trimtab.analysis.balance import Balance, SizeBalance, Spread
from trimtab.analysis.hot_experts import HOT_FACTOR
from trimtab.analysis.summary import answer, cost_summary, layers_summary, notes
from trimtab.figures import plural
from trimtab.report.charts import Line, LineChart
from trimtab.report.model import AnalysisReport
from trimtab.report.number_text import number, seconds
from trimtab.report.tables import Facts, Row, TableData, first_lines, terminal_facts, terminal_table

SPREAD = ("mean", "p50", "p99", "worst")
SHOWN_LAYERS = 5
SHOWN_DOMAINS = 8
BASED_ON = {
    "nothing": "static",
    "past": "based on past loads",
    "step": "based on the step itself, in hindsight",
    "micro-step": "based on known routing, by trimtab plan",
}


def analysis_tables(report: AnalysisReport) -> list[RenderableType]:
    """What `trimtab analyze` prints: the answer, and the figures behind it."""
    analysis = report.analysis
    summary = " ".join(filter(None, (cost_summary(analysis), layers_summary(analysis))))
    shown: list[RenderableType] = [
        *first_lines(report.assumed),
        f"[bold]{escape(answer(analysis))}[/bold]" + (f"\n{escape(summary)}" if summary else ""),
        "",
        terminal_facts(setting_facts(report), "Setting"),
    ]
    tables = [
        balance_table(analysis),
        placements_table(analysis),
        layers_table(analysis, SHOWN_LAYERS),
        sizes_table(analysis),
        chart_table(ranks_chart(analysis), "ranks"),
    ]
    shown += map(terminal_table, tables)
    shown.append(terminal_facts(stability_facts(analysis), "Whole steps and micro-steps"))
    shown.append(
        terminal_facts(hot_facts(analysis), f"Hot experts: more than {HOT_FACTOR} times the mean expert's tokens")
    )
    if len(analysis.domains) > 1:
        shown.append(terminal_table(domains_table(analysis, SHOWN_DOMAINS)))
    shown.append("\n".join(notes(analysis)))
    return shown


def setting_facts(report: AnalysisReport) -> Facts:
    """Trace, ranks and micro-steps."""
    analysis, counts = report.analysis, report.analysis.counts
    layers, experts = plural(counts.num_layers, "MoE layer"), plural(counts.num_experts, "expert")
    shape = f"{layers}, {experts}, top-{counts.top_k}"
    return [
        ("trace", report.source),
        ("model", f"{counts.model or 'unknown'}: {shape}"),
        ("contents", contents_text(analysis)),
        ("ranks", f"{analysis.ranks}, {analysis.ranks_per_node} per node, contiguous homes"),
        ("micro-steps", f"{counts.num_micro_steps}, each of up to {counts.token_budget:,} tokens per rank"),
    ]


def contents_text(analysis: Analysis) -> str:
    """Tokens, sequences and steps."""
    counts, steps = analysis.counts, analysis.counts.steps
    which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    return f"{plural(counts.num_tokens, 'token')} in {plural(counts.num_sequences, 'sequence')}, {which}"


def balance_table(analysis: Analysis) -> TableData:
    """max_vio and balancedness over all instances."""
    total = analysis.total
    spreads = [("max_vio of ranks", total.max_vio), ("balancedness of ranks", total.balancedness)]
    if analysis.nodes:
        spreads.append(("max_vio of nodes", analysis.nodes.max_vio))
    rows = tuple(Row(name, _spread(each)) for name, each in spreads)
    return TableData(f"Balance over {plural(total.instances, 'instance')}", ("figure", *SPREAD), rows)


def placements_table(analysis: Analysis) -> TableData:
    """Loss of fixed placements, and of a plan for each micro-step if one was made."""
    strategies = analysis.placements.strategies
    largest = max([strategy.expert_time_lost for strategy in strategies] + [1e-9])
    rows = [
        Row(
            strategy.about,
            (
                f"{strategy.expert_time_lost:.1%}",
                number(strategy.recovered_fraction, ".0%"),
                f"{strategy.max_over_mean_mean:.3f}",
                f"{strategy.max_over_mean_p99:.3f}",
            ),
            about=BASED_ON[strategy.based_on],
            bar=strategy.expert_time_lost / largest,
            is_ours=strategy.based_on == "micro-step",
        )
        for strategy in strategies
    ]
    columns = ("placement", "time lost", "recovered", "max/mean", "p99")
    return TableData("Does known routing help?", columns, tuple(rows))


def layers_table(analysis: Analysis, most: int) -> TableData:
    """The layers that lose most time, at most `most` of them."""
    estimate, names = analysis.estimate, analysis.counts.layer_indices
    rows = []
    for layer in worst_layers(analysis)[:most]:
        time = (seconds(estimate.lost_s_by_layer[layer]),) if estimate else ()
        cells = (f"{analysis.lost_share_L[layer]:.1%}", *time, *_spread(analysis.layers[layer].max_vio))
        rows.append(Row(f"layer {names[layer]}", cells, layer=layer))
    columns = ("layer", "of lost time", *(("lost per step",) if estimate else ()), "max_vio", *SPREAD[1:])
    return TableData("Layers that lose most", columns, tuple(rows))


def sizes_chart(analysis: Analysis) -> LineChart:
    """max_vio by size of micro-step."""
    vio = [size.by_ranks[analysis.ranks].max_vio for size in analysis.sizes]
    return LineChart(
        f"max_vio by size of micro-step, {plural(analysis.ranks, 'rank')}",
        f"size; 1× is {plural(round(_given_size(analysis).tokens), 'token')}",
        [size_name(size) for size in analysis.sizes],
        [Line("mean", [each.mean for each in vio]), Line("p99", [each.p99 for each in vio])],
    )


def sizes_table(analysis: Analysis) -> TableData:
    """The same figures, and the tokens of each size."""
    table = chart_table(sizes_chart(analysis), "size")
    tokens = Row("tokens", tuple(f"{size.tokens:,.0f}" for size in analysis.sizes))
    return TableData(table.title, table.columns, (tokens, *table.rows))


def ranks_chart(analysis: Analysis) -> LineChart:
    """Mean max_vio by number of ranks."""
    same_size = _given_size(analysis).by_ranks
    by_factor = {size.factor: size.by_ranks for size in analysis.sizes}
    in_proportion = [by_factor.get(number / analysis.ranks, {}).get(number) for number in same_size]
    return LineChart(
        "Mean max_vio by number of ranks",
        "ranks",
        [str(number) for number in same_size],
        [
            Line("same tokens per micro-step", [balance.max_vio.mean for balance in same_size.values()]),
            Line("same tokens per rank", [_mean_vio(balance) for balance in in_proportion]),
        ],
    )


def chart_table(chart: LineChart, first_column: str) -> TableData:
    """The values of a chart, a row for each line."""
    rows = tuple(Row(line.name, tuple(number(value, ".3f") for value in line.values)) for line in chart.lines)
    return TableData(chart.title, (first_column, *chart.places), rows)


def sizes_by_ranks_table(analysis: Analysis) -> TableData:
    """Mean max_vio for each size of micro-step and number of ranks."""
    rows = tuple(
        Row(
            size_name(size),
            tuple(f"{balance.max_vio.mean:.3f}" for balance in size.by_ranks.values()),
            about=f"{plural(round(size.tokens), 'token')}, {plural(size.micro_steps, 'micro-step')}",
        )
        for size in analysis.sizes
    )
    columns = ("micro-step", *(plural(number, "rank") for number in analysis.sizes[0].by_ranks))
    return TableData("Mean max_vio by size of micro-step and number of ranks", columns, rows)


def size_name(size: SizeBalance) -> str:
    """Size of a micro-step relative to the given one."""
    if size.factor is None:
        return "step"
    return {0.25: "¼×", 0.5: "½×"}.get(size.factor, f"{size.factor:.0f}×")


def stability_facts(analysis: Analysis) -> Facts:
    """Balance of whole steps, and change between micro-steps and between steps."""
    found = analysis.stability
    entries = [
        ("max/mean of a whole step", f"{found.step_max_over_mean:.3f}, mean over layers"),
        ("max/mean of a micro-step", f"{found.micro_step_max_over_mean:.3f}, mean over instances"),
        ("busiest rank", f"differs from the step's busiest rank in {found.busiest_rank_changes:.0%} of instances"),
    ]
    overlaps = (
        ("neighbouring micro-steps", found.overlap_micro_steps),
        ("halves of a step", found.overlap_halves),
        ("neighbouring steps", found.overlap_steps),
    )
    return entries + [(name, f"{value:.1%} of expert load in common") for name, value in overlaps if value is not None]


def hot_facts(analysis: Analysis) -> Facts:
    """Number, tokens and duration of hot experts."""
    hot = analysis.hot_experts
    entries = [
        (
            "per instance",
            f"{hot.per_instance:.1f} of {plural(analysis.counts.num_experts, 'expert')} are hot; they compute "
            f"{hot.token_part:.0%} of all tokens",
        ),
    ]
    if hot.persistence is not None:
        persistence = f"{hot.persistence:.0%} are hot again in the next micro-step; by chance it would be"
        entries.append(("persistence", f"{persistence} {hot.chance:.1%}"))
    if hot.mean_run:
        entries.append(("duration", f"{hot.mean_run:.1f} consecutive micro-steps on average"))
    overlaps = (("halves of a step", hot.overlap_halves), ("neighbouring steps", hot.overlap_steps))
    return entries + [(name, f"{value:.0%} of hot experts in common") for name, value in overlaps if value is not None]


def run_bars(analysis: Analysis) -> list[tuple[str, int]]:
    """Numbers of runs of hot experts by length, without empty entries at the end."""
    bars, before = [], 0
    for run in analysis.hot_experts.runs:
        longest = run.up_to
        name = f"{before + 1}+" if longest is None else f"{before + 1}–{longest}"
        bars.append((str(longest) if longest == before + 1 else name, run.count))
        before = longest or before
    while len(bars) > 1 and not bars[-1][1]:
        bars.pop()
    return bars


def hottest_table(analysis: Analysis) -> TableData:
    """The hottest experts of the whole trace."""
    names = analysis.counts.layer_indices
    rows = tuple(
        Row(
            f"layer {names[expert.layer]}, expert {expert.expert}",
            (f"{expert.over_mean:.2f}×", f"{expert.hot_part:.0%}", f"{expert.longest_run}"),
        )
        for expert in analysis.hot_experts.hottest
    )
    columns = ("expert", "tokens / mean", "hot in", "longest run")
    return TableData("Hottest experts", columns, rows)


def domains_table(analysis: Analysis, most: int | None = None) -> TableData:
    """Skew of each domain alone, at most `most` of them."""
    rows = tuple(
        Row(
            domain.name or "(no label)",
            (
                f"{domain.token_part:.1%}",
                f"{domain.max_over_mean:.3f}",
                f"{domain.busier_half_share:.1%}",
                f"{domain.hottest_over_mean:.2f}×",
            ),
        )
        for domain in analysis.domains[:most]
    )
    columns = ("domain", "of all tokens", "max/mean", "busier half's tokens", "hottest / mean")
    return TableData("Domains, each analyzed alone", columns, rows)


def _given_size(analysis: Analysis) -> SizeBalance:
    return next(size for size in analysis.sizes if size.factor == 1)


def _mean_vio(balance: Balance | None) -> float | None:
    return balance.max_vio.mean if balance else None


def _spread(spread: Spread) -> tuple[str, ...]:
    return tuple(f"{value:.3f}" for value in (spread.mean, spread.p50, spread.p99, spread.worst))
