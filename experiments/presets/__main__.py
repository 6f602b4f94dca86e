"""`python -m experiments.presets`: skew of the synthetic presets next to published skew.

Measure the skew of every synthetic preset next to the published figures that it should match, and simulate one example
with other values of the assumptions that no publication supports.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness import main
from experiments.page_tables import markdown_table, read_page, replace_tables
from experiments.presets.measure import COMPARED, measure_presets
from experiments.presets.skew_measures import MEASURES
from trimtab.cli.options import add_options, given
from trimtab.cli.output import write_figures
from trimtab.cli.parser import Parser

RESULTS = Path(__file__).parents[2] / "docs" / "results.md"
EXAMPLES = ("--json docs/benchmarks/presets.json --page experiments/presets/README.md",)


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--seed", of=measure_presets, nargs="+", dest="seeds")
    add_options(
        parser, "--page", type=Path, help="put the tables into FILE, a page with places for them, and docs/results.md"
    )


def tables(figures: dict[str, Any]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Header and lines of each table, by name."""
    return {
        "skew": _skew(figures["rows"]),
        "assumptions": _assumptions(figures["headlines"], figures["permuted"]),
        "fluctuation": _fluctuations(figures["fluctuations"]),
    }


def least_gains(figures: dict[str, Any]) -> str:
    """The part of the results about routing that is less favourable than that of the example."""
    seconds = [each["step_time_s"] for each in (*figures["fluctuations"], *_as_steps(figures["permuted"]))]
    gains = [
        f"{min(each[than] / each['trimtab'] for each in seconds):.2f}x over `{than}`" for than in ("static", "eplb")
    ]
    common = [each["common"] for each in figures["fluctuations"]]
    return (
        f"If {min(common):.0%} to {max(common):.0%} of the variance of rank loads is common to all micro-steps, or "
        f"expert ids are in one of {len(figures['permuted'])} orders, it is at least {' and '.join(gains)} (tokens; "
        "`experiments/presets`)."
    )


def _as_steps(permuted: list[dict[str, float]]) -> list[dict[str, dict[str, float]]]:
    return [{"step_time_s": seconds} for seconds in permuted]


def _skew(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["preset", "figure", "published", "synthetic, median", "range over seeds", "matches", "source"]
    return header, [
        [
            f"`{row['preset']}`",
            _measure_text(row),
            row["published"],
            f"{row['value']:.3f}",
            f"{min(row['values']):.3f} to {max(row['values']):.3f}",
            "yes" if row["low"] <= row["value"] <= row["high"] else "no",
            row["source"],
        ]
        for row in rows
    ]


def _measure_text(row: dict[str, Any]) -> str:
    text = MEASURES[row["measure"]][0]
    if not row["measure"].startswith(("rank", "step", "persistence")):
        return text
    of = f", busiest of {row['groups'] * row['ranks']} ranks" if row["groups"] > 1 else ""
    return f"{text}, EP {row['ranks']}{of}, {row['tokens_per_rank']:,} tokens a rank"


def _assumptions(
    headlines: list[dict[str, Any]], permuted: list[dict[str, float]]
) -> tuple[list[str], list[list[str]]]:
    header = ["routing", "static max/mean", "imbalance costs", "`trimtab` over `static`", "`trimtab` over `eplb`"]
    body = []
    for each in headlines:
        static, eplb, ours, ideal = (each["step_time_s"][name] for name in COMPARED)
        gains = [f"{static / ours:.2f}x", f"{eplb / ours:.2f}x"]
        body.append([each["assumption"], f"{each['max_over_mean']:.2f}", f"{1 - ideal / static:.0%}", *gains])
    ranges = [sorted(draw[than] / draw["trimtab"] for draw in permuted) for than in ("static", "eplb")]
    in_text = [f"{least:.2f} to {most:.2f}x" for least, *_, most in ranges]
    return header, [*body, [f"ids in random order, {len(permuted)} draws", "", "", *in_text]]


def _fluctuations(figures: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["same in all micro-steps", "`deviation`", "`zipf`", "static max/mean"]
    header += [f"`trimtab` over `{name}`" for name in ("static", "eplb")] + ["best other", "`trimtab` over it"]
    body = []
    for each in figures:
        seconds = each["step_time_s"]
        best = min(seconds.keys() - {"trimtab", "balanced"}, key=lambda name: seconds[name])
        gains = [f"{seconds[than] / seconds['trimtab']:.2f}x" for than in ("static", "eplb", best)]
        low, high = each["zipf"]
        body.append([
            f"{each['common']:.0%}", f"{each['deviation']:g}", f"{low:.2f} to {high:.2f}",
            f"{each['max_over_mean']:.2f}", *gains[:2], f"`{best}`", gains[2],
        ])  # fmt: skip
    return header, body


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    if options.page:
        read_page(options.page)  # before minutes of work
    figures = measure_presets(**given(options, measure_presets))
    console = write_figures(options, figures)
    for header, body in tables(figures).values():
        table = Table(*header)
        for cells in body:
            table.add_row(*(cell.replace("`", "") for cell in cells))
        console.print(table)
    if options.page:
        replace_tables({name: markdown_table(*table) for name, table in tables(figures).items()}, options.page)
        replace_tables({"least": least_gains(figures)}, RESULTS)


if __name__ == "__main__":
    main("experiments.presets.__main__")
