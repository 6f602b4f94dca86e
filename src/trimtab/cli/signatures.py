"""Options of a command from the functions that it calls: names, kinds and defaults of their arguments, and docstrings.

An argument is an option if its annotation has a `Kind`, as in `ranks: Annotated[int | None, positive] = None`.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Collection, Iterator
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from trimtab.api.run import EXCLUSIVE, kind_of
from trimtab.cli.parser import NameList
from trimtab.kinds import Kind

_DEFAULT = "; by default "


class Argument(NamedTuple):
    """An argument of a function or field of a class that is an option.

    Attributes:
        name: in Python.
        option: on the command line.
        about: what it is, without its default.
        unset: what holds without it, for the help; "" without a default.
    """

    name: str
    option: str
    kind: Kind
    default: Any
    about: str
    unset: str


@cache
def arguments_of(owner: Any) -> MappingProxyType[str, Argument]:
    """The arguments that are options, of a function or a class with a docstring that explains each."""
    hints = get_type_hints(owner, include_extras=True)
    texts = dict(_explained(inspect.getdoc(owner) or ""))
    found = {}
    for name, parameter in inspect.signature(owner).parameters.items():
        if not (kind := kind_of(hints[name])):
            continue
        about, _, unset = texts[name].removeprefix("False: ").partition(_DEFAULT)
        default = parameter.default
        if not unset and default not in (None, inspect.Parameter.empty):
            unset = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        option = kind.option or f"--{'no-' if default is True else ''}{name.replace('_', '-')}"
        found[name] = Argument(name, option, kind, default, about, unset)
    return MappingProxyType(found)


def _explained(doc: str) -> Iterator[tuple[str, str]]:
    """Names and explanations of a docstring's arguments or attributes, on one line each."""
    part = re.split(r"^(?:Args|Attributes):\n", f"{doc}\n", flags=re.MULTILINE)[1].split("\n\n")[0]
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", part, re.MULTILINE):
        plain = re.sub(r"`([^`]*)`", r"\1", " ".join(text.split())).removesuffix(".")
        for name in names.split(", "):
            yield name, plain


def described(function: Any) -> str:
    """The first paragraph of a docstring, for the help of a command."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split()).replace("`", "")


def add_arguments(
    parser: argparse.ArgumentParser, owner: Any, *, without: Collection[str] = (), several: Collection[str] = ()
) -> None:
    """Add an option for each argument of a function or class. Those that are not given are missing in the namespace.

    Args:
        without: arguments that are no options of this command.
        several: those that may have more than one value, beside those whose default is a tuple.
    """
    wanted = {name: each for name, each in arguments_of(owner).items() if name not in without}
    groups: dict[tuple[str, str], argparse._ActionsContainer] = {}
    for name, each in wanted.items():
        pair = next((pair for pair in EXCLUSIVE if name in pair and wanted.keys() >= {*pair}), None)
        if pair and pair not in groups:
            groups[pair] = parser.add_mutually_exclusive_group()
        place = groups[pair] if pair else parser
        place.add_argument(each.option, **settings_of(each, takes_several=name in several))


def settings_of(each: Argument, *, takes_several: bool = False) -> dict[str, Any]:
    """Of `add_argument`, for an argument."""
    kind, help_text = each.kind, each.about
    if isinstance(each.default, bool):
        action = "store_false" if each.default else "store_true"
        return {"dest": each.name, "action": action, "default": argparse.SUPPRESS, "help": escaped(help_text)}
    settings: dict[str, Any] = {
        "dest": each.name, "type": kind, "metavar": kind.metavar, "default": argparse.SUPPRESS,
    }  # fmt: skip
    if kind.names:
        settings["choices"] = tuple(kind.names)
        help_text += f": {', '.join(kind.names)}"
    if each.default == ():
        settings["action"] = "append"
    elif takes_several or isinstance(each.default, tuple):
        settings |= {"nargs": "+", "action": NameList if kind.names else "extend"}
    if each.unset:
        help_text += f" (default: {each.unset})"
    return settings | {"help": escaped(help_text)}


def escaped(text: str) -> str:
    """A text for argparse, which takes % for its own."""
    return text.replace("%", "%%")


def given(options: argparse.Namespace, owner: Any) -> dict[str, Any]:
    """The given options that a function or a class takes; lists as tuples."""
    # `options.run` is the command itself.
    names = (inspect.signature(owner).parameters.keys() & vars(options).keys()) - {"run"}
    found = {name: getattr(options, name) for name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
