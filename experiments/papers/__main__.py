"""`python -m experiments.papers`: published figures of papers, and those of the simulator in similar set-ups."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from experiments.papers.page import print_figures, read_figures, read_page, write_page
from experiments.papers.published import ROWS
from experiments.papers.reproduce import run_papers
from trimtab.cli.main import Parser, run
from trimtab.cli.options import whole
from trimtab.files import write_json
from trimtab.trace import PRESETS

NAME = "python -m experiments.papers"
PAPERS = [row.name for row in ROWS]


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = Parser(
        prog=NAME,
        description="Simulate the set-ups of several papers on synthetic routing, and print their figures and ours: "
        "the range over presets and seeds, and the median.",
        epilog=f"example: {NAME} --rows relibra --json out/relibra.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    figures = parser.add_mutually_exclusive_group()
    figures.add_argument("--rows", nargs="+", choices=PAPERS, default=PAPERS, metavar="NAME", help="papers")
    figures.add_argument("--read", type=Path, metavar="FILE", help="read figures written by --json; nothing is run")
    parser.add_argument(
        "--presets",
        nargs="+",
        choices=PRESETS,
        default=["rl-math", "rl-mixed"],
        metavar="NAME",
        help="skew of the routing",
    )
    parser.add_argument("--seeds", type=whole, nargs="+", default=[0, 1, 2], metavar="N", help="of the routing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also put the tables into docs/reproduction.md")
    parser.set_defaults(run=_run)
    return run(NAME, lambda: parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> None:
    if options.page:
        read_page(options.page)  # fails before minutes of work
    if options.read:
        figures = read_figures(options.read)
    else:
        figures = run_papers([row for row in ROWS if row.name in options.rows], options.presets, options.seeds)
    print_figures(figures, Console(highlight=False))
    if options.json:
        write_json(options.json, figures)
    if options.page:
        write_page(figures, options.page)


if __name__ == "__main__":
    sys.exit(main())
