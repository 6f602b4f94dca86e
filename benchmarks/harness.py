"""What all benchmarks share: the command line, and figures as JSON and as tables.

`tables` makes tables and pictures, `routing` the routing of long responses, and `pairs` ratios of runs with and without
balancing. The runs alternate by `trimtab.calibration.alternating_rounds`, which needs torch; this file does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from trimtab.cli.main import run
from trimtab.cli.options import add_options, given
from trimtab.cli.parser import Parser
from trimtab.files import STDOUT, write_json

Figures = dict[str, Any]
Printer = Callable[[Figures, Console], None]


def main(name: str) -> NoReturn:
    """Run `python -m NAME`, and end with its exit status. For modules that are run: `main("benchmarks.live")`."""
    sys.exit(run_command(name, sys.argv[1:]))


def run_command(name: str, words: Sequence[str]) -> int:
    """Run the command of a module with options. Returns the exit status; bad input is one line and status 2.

    Functions are those of the imported module, not of `__main__`, so that other processes can import them.
    """

    def parse() -> argparse.Namespace:
        options = make_parser(name).parse_args(words)
        options.arguments = words
        return options

    return run(command_of(name), parse)


def command_of(name: str) -> str:
    """The command that runs a module."""
    return f"python -m {name.removesuffix('.__main__')}"


def make_parser(name: str) -> Parser:
    """The parser of a module's command, described by the first two paragraphs of the module's docstring.

    The module has `add_to(parser)`, which adds its options; `--json` is added here. It has `run(options)`; or
    `run_benchmark`, whose arguments are the options and which returns the figures, and `print_figures`. `EXAMPLES` are
    the options in the examples of the help.
    """
    module: Any = import_module(name)
    command = command_of(name)
    about = " ".join(module.__doc__.split("\n\n")[:2]).removeprefix(f"`{command}`: ")
    examples = getattr(module, "EXAMPLES", (f"--json out/bench-{name.rpartition('.')[2]}.json",))
    parser = Parser(
        prog=command,
        description=about[0].upper() + about[1:],
        examples=[f"{command} {words}" for words in examples],
    )
    module.add_to(parser)
    add_options(parser, "--json")

    def measure(options: argparse.Namespace) -> None:
        figures = module.run_benchmark(**given(options, module.run_benchmark))
        show(figures, module.print_figures, options.json)

    parser.set_defaults(run=getattr(module, "run", measure))
    return parser


def show(figures: Figures, print_figures: Printer, json: Path | None) -> None:
    """Write figures to a file, if one is named, and print their tables, unless the file is standard output."""
    if json is not None:
        write_json(json, figures)
    print_figures(figures, Console(highlight=False, quiet=json == STDOUT))


def settings_of(settings: Any, *but: str) -> dict[str, Any]:
    """The fields of a dataclass of settings for figures, without `json` and those in `but`."""
    return {name: value for name, value in asdict(settings).items() if name not in ("json", *but)}
