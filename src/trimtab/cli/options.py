"""Options that several commands share, their types, and an error when an extra is not installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from trimtab.api.arguments import LARGEST, TOKEN_COUNT, token_count
from trimtab.cli.parser import NameList
from trimtab.cluster.specs import AUTO, AUTO_SLOTS
from trimtab.errors import InputError, closest, install


def _number(read: Callable[[str], Any], is_right: Callable[[Any], bool], form: str, text: str) -> Any:
    """The number in a text, or an error that says what it should be."""
    try:
        value = read(text)
    except (ValueError, OverflowError):
        value = float("nan")
    if not is_right(value):
        raise argparse.ArgumentTypeError(f"{text!r} should be {form}")
    return value


def _integer(least: int, text: str) -> int:
    value: int = _number(int, lambda number: number >= least, f"a whole number of at least {least}", text)
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is too large; it should be at most {LARGEST}")
    return value


# Types of options: integers of at least 1, and of at least 0; numbers of tokens; a part of a whole; a price.
positive, whole = partial(_integer, 1), partial(_integer, 0)
_amount = partial(_number, token_count, lambda value: value > 0, TOKEN_COUNT)
_part = partial(_number, float, lambda value: 0 < value <= 1, "above 0, and at most 1")
_price = partial(_number, float, lambda value: 0 <= value < float("inf"), "a price, 0 or more")


def _cluster(text: str) -> str:
    """The text, unless it is no file and a preset has nearly this name."""
    from trimtab.cluster.presets import preset_names

    return _known("cluster", text, preset_names("cluster"))


def _model(text: str) -> str:
    """The text, unless it is no file and a preset or a hub id of one has nearly this name."""
    from trimtab.cluster.model_names import known_names, preset_of

    return text if preset_of(text) else _known("model", text, known_names())


def _known(kind: str, text: str, names: list[str]) -> str:
    by_lower_case = {name.lower(): name for name in names}
    hint = closest(text.lower(), by_lower_case)
    if hint and text not in names and not Path(text).exists():
        for lower, name in by_lower_case.items():
            hint = hint.replace(f" {lower}?", f" {name}?")
        raise argparse.ArgumentTypeError(f"unknown {kind} {text}{hint}")
    return text


def _override(text: str) -> tuple[str, Any]:
    """Key and value of KEY=VALUE. The value is JSON, or else the text itself."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} should be KEY=VALUE, such as num_hidden_layers=24")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


_AUTO = f"the fewest of {', '.join(map(str, AUTO_SLOTS))} that are about as fast as any"


def _slots(text: str) -> int | str:
    """A number of slots, or "auto"."""
    return text if text == AUTO else whole(text)


# Type and help of an option in all commands that have it.
SHARED: dict[str, tuple[Callable[[str], object], str]] = {
    "--ranks": (positive, "ranks of the expert-parallel group"),
    "--ranks-per-node": (positive, "ranks of a node"),
    "--nodes": (positive, "nodes of the ranks"),
    "--link-mbit": (positive, "rate of the link of each node, in Mbit/s (Linux, root)"),
    "--slots": (_slots, f"slots of a rank, the replicas that it has memory for in every layer; auto: {_AUTO}"),
    "--token-budget": (positive, "most tokens of a rank in a micro-step"),
    "--micro-steps": (positive, "micro-steps of a step, instead of a token budget"),
    "--mini-batches": (positive, "optimizer steps in an RL step"),
    "--step": (whole, "RL step"),
    "--steps": (whole, "RL steps"),
    "--layers": (positive, "MoE layers"),
    "--num-layers": (positive, "decoder layers, with and without experts"),
    "--top-k": (positive, "experts of a token"),
    "--step-tokens": (_amount, "tokens of a whole step, such as 20M, if the trace has a part of it"),
    "--sampled": (_part, "the part of each step's sequences that was recorded"),
    "--gpu-hour": (_price, "price of an hour of one GPU"),
    "--expert-gpu-hour": (_price, "price of an hour of one GPU of the expert cluster"),
    "--expert-cluster": (_cluster, "kind of nodes of expert ranks, if it is another one"),
    "--policy": (str, "balancer"),
    "--preset": (str, "skew of the synthetic routing"),
    "--cluster": (_cluster, "kind of nodes: a preset or a TOML file"),
    "--model": (_model, "a preset, its hub id, a config.json or a checkpoint folder"),
    "--set": (_override, "other value of a key of the model's config; may be repeated (default: none)"),
    "--tp": (positive, "tensor parallelism of the dense parts"),
    "--pp": (positive, "pipeline stages (1F1B), each of all groups"),
    "--cp": (positive, "context parallelism"),
    "--settings": (Path, "FILE of `trimtab init` with values of options that are not given"),
    "--seed": (whole, "random seed"),
    "--rounds": (positive, "timed repetitions"),
    "--json": (Path, "write the figures to FILE; - is standard output, without tables"),
    "--html": (Path, "write a page of the results to FILE"),
}
SHORT = {"--output": ["-o"]}
METAVARS = {positive: "N", whole: "N", _amount: "N", _part: "X", _price: "X", _slots: "N", float: "X", Path: "FILE"}
# Values of an option in a settings file, and their name, by the option's type; else text.
KINDS: dict[object, tuple[tuple[type, ...], str]] = {
    positive: ((int,), "a whole number"),
    whole: ((int,), "a whole number"),
    _amount: ((int, str), 'a number of tokens, such as 20_000_000 or "20M"'),
    _part: ((int, float), "a number"),
    _price: ((int, float), "a number"),
    _slots: ((int, str), 'a whole number or "auto"'),
}
TEXT: tuple[tuple[type, ...], str] = ((str,), "a text in quotes")


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
            option.setdefault("metavar", METAVARS.get(option.get("type"), "NAME"))
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
    add_options(parser, "--set", action="append", dest="overrides", metavar="KEY=VALUE", default=argparse.SUPPRESS)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the trace argument: `options.trace`, a list of paths."""
    parser.add_argument(
        "trace",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="routing trace (.parquet); several files, folders or patterns are one trace",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add `--settings`: a file with values of the other options, see `trimtab.cli.settings`."""
    add_options(parser, "--settings", unset="none")
    parser.set_defaults(parser=parser)


def given(options: argparse.Namespace, function: Callable[..., object]) -> dict[str, Any]:
    """The given options that a function or a dataclass takes; lists as tuples."""
    names = signature(function).parameters.keys() & vars(options).keys()
    found = {name: getattr(options, name) for name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def need_extra(*modules: str, extra: str = "train") -> None:
    """Raise InputError unless the modules of an extra are installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"this command needs {', '.join(missing)}; {install(extra)}")
