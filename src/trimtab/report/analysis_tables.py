"""Terminal output of `trimtab analyze`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from trimtab.analysis.analysis import worst_layers
from trimtab.analysis.answer import answer, cost, notes, where
from trimtab.analysis.balance import Spread
from trimtab.analysis.hot import HOT
from trimtab.report.analysis_sections import hot_facts, same_tokens_a_rank, setting_facts, size_name, stability_facts
from trimtab.report.model import AnalysisReport
from trimtab.report.tables import facts

SHOWN_LAYERS = 5
SHOWN_DOMAINS = 8


def analysis_tables(report: AnalysisReport) -> list[RenderableType]:
    """The answer, and the figures behind it."""
    analysis = report.analysis
    said = " ".join(filter(None, (cost(analysis), where(analysis))))
    shown: list[RenderableType] = [
        f"[bold]{escape(answer(analysis))}[/bold]" + (f"\n{escape(said)}" if said else ""),
        "",
    ]
    shown.append(facts([(name, escape(value)) for name, value in setting_facts(report)], "Setting"))

    total = _table(f"Balance over {analysis.total.instances:,} instances", ("", "mean", "p50", "p99", "worst"))
    total.add_row("max_vio of ranks", *_spread(analysis.total.max_vio))
    total.add_row("balancedness of ranks", *_spread(analysis.total.balancedness))
    if analysis.nodes:
        total.add_row("max_vio of nodes", *_spread(analysis.nodes.max_vio))
    shown.append(total)

    ways = _table("Would foresight help?", ("placement", "lost time", "won back", "max/mean", "p99"))
    for way in analysis.foresight.ways:
        won = "–" if way.won_back is None else f"{way.won_back:.0%}"
        ways.add_row(way.about, f"{way.lost:.1%}", won, f"{way.max_over_mean:.3f}", f"{way.p99:.3f}")
    won = "–" if analysis.foresight.ways[0].won_back is None else "100%"
    ways.add_row("a plan for each micro-step", "about 0", won, "1.00", "1.00")
    shown.append(ways)

    layers = _table("Layers that lose most", ("layer", "of lost time", "max_vio", "p50", "p99", "worst"))
    for layer in worst_layers(analysis)[:SHOWN_LAYERS]:
        spread = _spread(analysis.layers[layer].max_vio)
        layers.add_row(str(analysis.counted.layer_indices[layer]), f"{analysis.lost_share_L[layer]:.1%}", *spread)
    shown.append(layers)

    sizes = _table("max_vio by size of micro-step", ("", *map(size_name, analysis.sizes)))
    sizes.add_row("tokens", *(f"{size.tokens:,.0f}" for size in analysis.sizes))
    here = [size.by_ranks[analysis.ranks].max_vio for size in analysis.sizes]
    sizes.add_row("mean", *(f"{each.mean:.3f}" for each in here))
    sizes.add_row("p99", *(f"{each.p99:.3f}" for each in here))
    shown.append(sizes)

    usual = next(size for size in analysis.sizes if size.factor == 1)
    alike = dict(same_tokens_a_rank(analysis))
    ranks = _table("Mean max_vio by number of ranks", ("ranks", *map(str, usual.by_ranks)))
    ranks.add_row("same micro-steps", *(f"{each.max_vio.mean:.3f}" for each in usual.by_ranks.values()))
    ranks.add_row(
        "same tokens a rank", *(f"{alike[n].max_vio.mean:.3f}" if n in alike else "–" for n in usual.by_ranks)
    )
    shown.append(ranks)

    shown.append(facts(stability_facts(analysis), "The step and its micro-steps"))
    shown.append(facts(hot_facts(analysis), f"Hot experts: more than {HOT} times the mean expert's tokens"))
    if len(analysis.domains) > 1:
        domains = _table("Domains, each alone", ("domain", "tokens", "max/mean", "busier half", "hottest"))
        for domain in analysis.domains[:SHOWN_DOMAINS]:
            domains.add_row(
                escape(domain.name or "(no label)"),
                f"{domain.token_part:.0%}",
                f"{domain.max_over_mean:.3f}",
                f"{domain.busier_half_share:.1%}",
                f"{domain.hottest_over_mean:.2f}×",
            )
        shown.append(domains)
    shown.append("\n".join(notes(analysis)))
    return shown


def _spread(spread: Spread) -> list[str]:
    return [f"{value:.3f}" for value in (spread.mean, spread.p50, spread.p99, spread.worst)]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        min_width=len(title),
    )
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table
