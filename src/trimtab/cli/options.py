"""Options that several commands share, their types, and an error when an extra is not installed."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.errors import InputError


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def whole(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of at least {least}")
    return value


def _preset_or_path(kind: Any, text: str) -> str:
    """The text, unless it is no file and a preset of the kind has nearly this name."""
    from trimtab.cluster.presets import preset_names

    names = preset_names(kind)
    if text not in names and not Path(text).exists():
        for name in difflib.get_close_matches(text, names, 1):
            raise argparse.ArgumentTypeError(f"no {kind} or file {text}; did you mean {name}?")
    return text


# Settings of an option in all commands that have it, for `add_option`.
SHARED: dict[str, dict[str, Any]] = {
    "--ranks": {"type": positive, "help": "ranks of the expert-parallel group"},
    "--ranks-per-node": {"type": positive, "help": "ranks of a node"},
    "--nodes": {"type": positive, "help": "nodes of the ranks"},
    "--link-mbit": {"type": positive, "help": "rate of the link of each node, in Mbit/s (Linux, root)"},
    "--slots": {"type": whole, "help": "slots of a rank: the replicas that it has memory for in every layer"},
    "--token-budget": {"type": positive, "help": "most tokens of a rank in a micro-step"},
    "--micro-steps": {"type": positive, "help": "micro-steps of a step, instead of a token budget"},
    "--mini-batches": {"type": positive, "help": "optimizer steps in an RL step"},
    "--step": {"type": whole, "help": "RL step"},
    "--steps": {"type": whole, "help": "RL steps"},
    "--layers": {"type": positive, "help": "MoE layers"},
    "--num-layers": {"type": positive, "help": "decoder layers, with and without experts"},
    "--top-k": {"type": positive, "help": "experts of a token"},
    "--policy": {"help": "balancer"},
    "--preset": {"help": "skew of the synthetic routing"},
    "--cluster": {"type": partial(_preset_or_path, "cluster"), "help": "kind of nodes: a preset or a TOML file"},
    "--model": {"type": partial(_preset_or_path, "model"), "help": "a preset, a config.json or a checkpoint folder"},
    "--seed": {"type": whole, "help": "random seed"},
    "--rounds": {"type": positive, "help": "timed repetitions"},
    "--json": {"type": Path, "help": "write the figures to FILE; - is standard output, without tables"},
    "--html": {"type": Path, "help": "write a page of the results to FILE"},
}
METAVARS = {positive: "N", whole: "N", float: "X", Path: "FILE"}


def add_option(
    parser: argparse._ActionsContainer, *names: str, of: type | None = None, unset: object = None, **settings: Any
) -> None:
    """Add an option with the shared settings of its name. The help ends with its choices and its default.

    Args:
        names: the long one last.
        of: dataclass with a field of the option's name. The field's default is in the help; an option that is not
            given has no attribute in the namespace.
        unset: what holds without the option, for the help, if that is no fixed value.
        settings: of `add_argument`, in addition to the shared ones or instead.
    """
    settings = SHARED.get(names[-1], {}) | settings
    if "action" not in settings:
        settings.setdefault("metavar", METAVARS.get(settings.get("type"), "NAME"))
    if of is not None:
        field = settings.get("dest", names[-1].lstrip("-").replace("-", "_"))
        unset, settings["default"] = unset or getattr(of, field), argparse.SUPPRESS
    shown = settings.get("default") if unset is None else unset
    if "choices" in settings:
        settings["help"] += f": {', '.join(settings['choices'])}"
    if shown is not None and shown is not False:
        text = " ".join(map(str, shown)) if isinstance(shown, list | tuple) else shown
        settings["help"] += f" (default: {text})"
    parser.add_argument(*names, **settings)


def add_output(parser: argparse.ArgumentParser, content: str, **settings: Any) -> None:
    """Add `-o/--output`, the file that the command makes; required unless the settings say otherwise."""
    settings = {"type": Path, "required": True, "help": f"file to write: {content}"} | settings
    add_option(parser, "-o", "--output", **settings)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the trace argument: `options.trace`, a list of paths."""
    parser.add_argument(
        "trace",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="routing trace (.parquet); several files, folders or patterns are one trace",
    )


def given_settings(options: argparse.Namespace, names: type) -> dict[str, Any]:
    """The given options that are fields of a dataclass; lists as tuples."""
    given = ((name, value) for name, value in vars(options).items() if name in names.__dataclass_fields__)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given}


def need_extra(*modules: str, extra: str = "train") -> None:
    """Raise InputError unless the modules of an extra are installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"this command needs {', '.join(missing)}; install it with: pip install 'trimtab[{extra}]'")
