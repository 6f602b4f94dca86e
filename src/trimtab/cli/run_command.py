"""A command that calls one function with a trace and a run: its options, and what it shows of the result."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from trimtab.api.run import Run
from trimtab.cli.options import add_options, add_trace
from trimtab.cli.output import write_figures
from trimtab.cli.parser import Parser
from trimtab.cli.signatures import add_arguments, described, given

log = logging.getLogger("trimtab")


def add_command(
    commands: Any,
    name: str,
    function: Callable[..., Any],
    *,
    run: Callable[[argparse.Namespace], Any],
    examples: Sequence[str],
    unused: Collection[str] = (),
    several: Collection[str] = (),
    outputs: Sequence[str] = ("--json", "--html"),
) -> Parser:
    """Add a command whose options are the fields of `Run` and the arguments of the function.

    Args:
        run: called with the options.
        unused: fields of the run that the function has no use for.
        several: options that may have several values.
    """
    parser: Parser = commands.add_parser(name, description=described(function), examples=examples)
    add_trace(parser)
    about = "FILE of trimtab init with values of options that are not given (default: none)"
    parser.add_argument("--settings", type=Path, metavar="FILE", help=about)
    add_arguments(parser, Run, without=unused, several=several)
    add_arguments(parser, function, several=several)
    add_options(parser, *outputs)
    parser.set_defaults(run=run, parser=parser)
    return parser


def called(function: Callable[..., Any], options: argparse.Namespace, **more: Any) -> Any:
    """The function's result for the given options, and other arguments."""
    if "run" not in more:
        more["run"] = Run(**given(options, Run))
    return function(**given(options, function), **more)


def show(options: argparse.Namespace, result: Any, *parts: RenderableType) -> None:
    """Write figures and page of a result, and print its parts."""
    console = write_figures(options, result.figures())
    html = getattr(options, "html", None)
    if html:
        result.write_html(html)
    console.print(*parts, sep="\n")
    if html:
        log.info("page: %s", html)
