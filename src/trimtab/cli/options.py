"""Options that several commands share, and an error when an extra is not installed."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from trimtab.api.run import Run
from trimtab.cli.parser import NameList
from trimtab.cli.signatures import arguments_of, given
from trimtab.errors import InputError, install
from trimtab.kinds import Kind, positive, whole

__all__ = ["SHARED", "add_model", "add_options", "add_output", "add_trace", "given", "need_extra", "positive", "whole"]

# Type and help of an option in all commands that have it: those of a run, and others.
SHARED: dict[str, tuple[Callable[[str], object], str]] = {
    **{each.option: (each.kind, each.about) for each in arguments_of(Run).values()},
    "--nodes": (positive, "nodes of the ranks"),
    "--link-mbit": (positive, "rate of the link of each node, in Mbit/s (Linux, root)"),
    "--layers": (positive, "MoE layers"),
    "--num-layers": (positive, "decoder layers, with and without experts"),
    "--top-k": (positive, "experts of a token"),
    "--policy": (str, "balancer"),
    "--preset": (str, "skew of the synthetic routing"),
    "--seed": (whole, "random seed"),
    "--rounds": (positive, "timed repetitions"),
    "--json": (Path, "write the figures to FILE; - is standard output, without tables"),
    "--html": (Path, "write a page of the results to FILE"),
}
SHORT = {"--output": ["-o"]}


def add_options(
    parser: argparse._ActionsContainer,
    *names: str,
    of: Callable[..., object] | None = None,
    unset: str = "",
    **settings: Any,
) -> None:
    """Add options with the shared settings of their names. Their help ends with choices and default.

    Args:
        of: the function or dataclass that takes the options; its defaults are in the help. Options that are not given
            are missing in the namespace, for `given`.
        unset: what holds without the option, for the help, if that is no fixed value.
        settings: of `add_argument`, in addition to the shared ones or instead.
    """
    for name in names:
        option: dict[str, Any] = dict(zip(("type", "help"), SHARED.get(name, ()), strict=False)) | settings
        shown = unset or option.get("default")
        if of is not None:
            parameter = option.get("dest", name.lstrip("-").replace("-", "_"))
            shown, option["default"] = unset or signature(of).parameters[parameter].default, argparse.SUPPRESS
        if "choices" in option:
            option["help"] += f": {', '.join(option['choices'])}"
        if "action" not in option:
            option.setdefault("metavar", _metavar(option.get("type")))
            # Values of a repeated option add up.
            several = NameList if "choices" in option and option.get("type") is str else "extend"
            option["action"] = "store" if option.get("nargs", "?") == "?" else several
            text = " ".join(map(str, shown)) if isinstance(shown, list | tuple) else shown
            option["help"] += "" if shown is None else f" (default: {text})"
        parser.add_argument(*SHORT.get(name, ()), name, **option)


def add_output(parser: argparse._ActionsContainer, content: str, *, required: bool = True) -> None:
    """Add `-o/--output`, the file that the command makes."""
    add_options(parser, "--output", type=Path, required=required, help=f"file to write: {content}")


def add_model(parser: argparse._ActionsContainer, *, of: Callable[..., object] | None = None, **settings: Any) -> None:
    """Add `--model`, and `--set` for its config: `options.overrides`, pairs of key and value, missing if not given."""
    add_options(parser, "--model", of=of, **settings)
    add_options(
        parser,
        "--set",
        action="append",
        dest="overrides",
        metavar="KEY=VALUE",
        default=argparse.SUPPRESS,
        help=f"{SHARED['--set'][1]} (default: none)",
    )


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the trace argument: `options.trace`, a list of paths."""
    parser.add_argument(
        "trace",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="routing trace (.parquet); several files, folders or patterns are one trace",
    )


def _metavar(kind: object) -> str:
    if isinstance(kind, Kind):
        return kind.metavar
    return {float: "X", Path: "FILE"}.get(kind, "NAME")  # type: ignore[call-overload, no-any-return]


def need_extra(*modules: str, extra: str = "train") -> None:
    """Raise InputError unless the modules of an extra are installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"this command needs {', '.join(missing)}; {install(extra)}")
