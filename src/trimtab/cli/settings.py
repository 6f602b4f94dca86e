"""`--settings FILE`: options of a run in a TOML file, for `advise`, `analyze`, `plan`, `rollout` and `simulate`.

Keys are the options of these commands, with `_` for `-`; options without a value are true or false under the name of
the argument in Python, such as `recompute`. A command takes the keys that it has as options.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from trimtab.cli.parser import Parser
from trimtab.errors import InputError, closest
from trimtab.files import read_small_text
from trimtab.kinds import Kind

COMMANDS = ("advise", "simulate", "analyze", "plan", "rollout")
# Of the parser itself, with other meanings than arguments in Python.
_OTHERS = ("help", "log_level")


def known_settings() -> dict[str, argparse.Action]:
    """Options by key, of all commands that read settings."""
    commands = Parser(prog="trimtab").add_subparsers()
    for command in COMMANDS:
        import_module(f"trimtab.cli.{command}").add(commands)
    found: dict[str, argparse.Action] = {}
    for parser in commands.choices.values():
        found = settings_of(parser) | found
    return found


def settings_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of a command by key: all that are arguments in Python."""
    return {
        action.dest if action.nargs == 0 else action.option_strings[-1].lstrip("-").replace("-", "_"): action
        for action in parser._actions
        if action.option_strings and action.default is argparse.SUPPRESS and action.dest not in _OTHERS
    }


def apply_settings(options: argparse.Namespace) -> None:
    """Set options that are in the file `options.settings` and not given on the command line.

    Raises:
        InputError: one line that names the file and the key, if one is unknown, its value is not one of the option's,
            or two of them exclude each other.
    """
    parser, path = options.parser, options.settings
    values, mine, known = _read(path), settings_of(parser), known_settings()
    for key in values:
        if key not in known:
            hint = closest(key, known) or f"; use one of {', '.join(known)}"
            raise InputError(f"{path}: unknown key {_shown(key)}{hint}")
    checked = {key: _value(f"{path}: {key}", mine.get(key, known[key]), value) for key, value in values.items()}
    given = vars(options).keys() & {action.dest for action in mine.values()}
    for key in checked.keys() & mine.keys():
        others = _excluded(parser, mine, key)
        if both := sorted(others & checked.keys()):
            raise InputError(f"{path}: {' and '.join(sorted([key, *both]))}: one excludes the other; remove one")
        if not given & {mine[name].dest for name in (key, *others)}:
            setattr(options, mine[key].dest, checked[key])


def _excluded(parser: argparse.ArgumentParser, settings: Mapping[str, argparse.Action], key: str) -> set[str]:
    """Keys of the options that can't be given together with this one."""
    groups = [group._group_actions for group in parser._mutually_exclusive_groups]
    beside = [action for group in groups if settings[key] in group for action in group]
    return {name for name, action in settings.items() if action in beside} - {key}


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise InputError(f"{path}: no such file; trimtab init writes one")
    try:
        return tomllib.loads(read_small_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a TOML file ({' '.join(str(error).split())[:200]})") from None


def _value(where: str, option: argparse.Action, value: Any) -> Any:
    """The value as the command line would give it."""
    if option.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{where}: {_shown(value)} should be true or false")
        return value
    takes_several = option.nargs is not None or isinstance(option, argparse._AppendAction)
    if not isinstance(value, list):
        found = _single(where, option, value)
        return [found] if takes_several else found
    if not takes_several or not value:
        raise InputError(f"{where}: {_shown(value)} should be {'values' if takes_several else 'one value'}")
    return [_single(where, option, each) for each in value]


def _single(where: str, option: argparse.Action, value: Any) -> Any:
    kind = option.type
    assert isinstance(kind, Kind)
    if isinstance(value, bool) or not isinstance(value, kind.types):
        raise InputError(f"{where}: {_shown(value)} should be {kind.form}")
    try:
        found: Any = kind(str(value))
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{where}: {error}") from None
    if option.choices is not None and found not in option.choices:
        hint = closest(found, option.choices) or f"; use one of {', '.join(option.choices)}"
        raise InputError(f"{where}: unknown {_shown(found)}{hint}")
    return found


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:80]
