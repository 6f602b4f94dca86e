"""`check_names`: whether a framework has the names that a plugin replaces and reads, before the first step."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from trimtab.errors import InputError

_NAME = re.compile(r"([\w.]+):([\w.]+)(?:\((.*)\))?")


def check_names(names: Sequence[str], *, fits: str) -> None:
    """Raise InputError unless a framework has all names, each with the parameters that are given.

    Args:
        names: `module:name` or `module:name(parameter, ...)`, the parameters that the plugin counts on, of any place;
            `module:Class.name` also where a method of the class sets the name.
        fits: the versions for which the plugin was written, for the message.
    """
    problems = [problem for name in names if (problem := _problem_of(name))]
    if problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"{problems[0]}{more}; this version of Trimtab fits {fits}")


def _problem_of(name: str) -> str:
    """Why a name does not fit; empty if it does."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    module_name, path, parameters = match.groups()
    try:
        found: Any = import_module(module_name)
    except ImportError as error:
        return f"{module_name} can't be imported: {error}"
    for part in path.split("."):
        if not hasattr(found, part) and not _is_set_by_class(found, part):
            return f"{module_name} has no {path}"
        found = getattr(found, part, None)
    missing = [] if parameters is None else _missing(found, [each.strip() for each in parameters.split(",") if each])
    return f"{module_name}:{path} has no parameter {missing[0]}" if missing else ""


def _is_set_by_class(found: Any, name: str) -> bool:
    methods = vars(found).values() if isinstance(found, type) else ()
    codes = (getattr(inspect.unwrap(method), "__code__", None) for method in methods if callable(method))
    found_codes = (code for code in codes if code is not None and name in code.co_names)
    return any(
        ("STORE_ATTR", name) == (each.opname, each.argval)
        for code in found_codes
        for each in dis.get_instructions(code)
    )


def _missing(function: Any, parameters: Sequence[str]) -> list[str]:
    """Parameters that a function does not have."""
    own = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in own.values()):
        return []
    return [name for name in parameters if name not in own]
