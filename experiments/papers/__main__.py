"""`python -m experiments.papers`: published figures of papers, and those of the simulator in similar set-ups."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.papers import run_benchmark
from experiments.papers.page import print_figures, read_figures, read_page, write_page
from experiments.papers.published import ROWS
from trimtab.cli.main import run
from trimtab.cli.options import add_option
from trimtab.cli.output import write_figures
from trimtab.cli.parser import Parser
from trimtab.trace import PRESETS

NAME = "python -m experiments.papers"
PAPERS = [row.name for row in ROWS]


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = Parser(
        prog=NAME,
        description="Simulate the set-ups of several papers on synthetic routing, and print their figures and ours: "
        "the range over presets and seeds, and the median.",
        examples=[f"{NAME} --rows relibra --json out/relibra.json"],
    )
    figures = parser.add_mutually_exclusive_group()
    add_option(figures, "--rows", nargs="+", choices=PAPERS, default=PAPERS, help="papers")
    add_option(figures, "--read", type=Path, help="read figures written by --json from FILE; nothing is run")
    add_option(parser, "--preset", nargs="+", dest="presets", choices=tuple(PRESETS), default=["rl-math", "rl-mixed"])
    add_option(parser, "--seed", nargs="+", dest="seeds", default=[0, 1, 2])
    add_option(parser, "--json")
    add_option(parser, "--page", type=Path, help="put the tables into FILE, a copy of docs/reproduction.md")
    parser.set_defaults(run=_run)
    return run(NAME, lambda: parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> None:
    if options.page:
        read_page(options.page)  # before minutes of work
    if options.read:
        figures = read_figures(options.read)
    else:
        figures = run_benchmark([row for row in ROWS if row.name in options.rows], options.presets, options.seeds)
    print_figures(figures, write_figures(options, figures))
    if options.page:
        write_page(figures, options.page)


if __name__ == "__main__":
    sys.exit(main())
