"""`python -m experiments.papers`: published figures of papers, and those of the simulator in similar set-ups.

Simulate the set-ups of several papers on synthetic routing, and print their figures and ours: the range over presets
and seeds, and the median.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from benchmarks.harness import main, show
from experiments.page_tables import read_page, replace_tables
from experiments.papers.page import blocks, print_figures, read_figures
from experiments.papers.published import ROWS
from experiments.papers.reproduce import run_papers
from trimtab.cli.options import add_options, given
from trimtab.cli.parser import Parser
from trimtab.trace import PRESETS

EXAMPLES = ("--rows relibra --json out/relibra.json",)


def add_to(parser: Parser) -> None:
    """Add the options."""
    figures = parser.add_mutually_exclusive_group()
    option = partial(add_options, parser, of=run_papers)
    add_options(figures, "--rows", nargs="+", choices=[row.name for row in ROWS], unset="all", help="papers")
    add_options(figures, "--read", type=Path, help="read figures written by --json from FILE; nothing is run")
    option("--preset", nargs="+", dest="presets", choices=tuple(PRESETS))
    option("--seed", nargs="+", dest="seeds")
    add_options(parser, "--page", type=Path, help="put the tables into FILE, a copy of experiments/papers/README.md")


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    if options.page:
        read_page(options.page)  # before minutes of work
    if options.read:
        figures = read_figures(options.read)
    else:
        options.rows = [row for row in ROWS if not options.rows or row.name in options.rows]
        figures = run_papers(**given(options, run_papers))
    show(figures, print_figures, options.json)
    if options.page:
        replace_tables(blocks(figures), options.page)


if __name__ == "__main__":
    main("experiments.papers.__main__")
