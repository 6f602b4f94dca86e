"""Names of verl that its plugin uses, with their parameters, and modules with just these."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from helpers.own_source import run_statements

PLUGIN = Path(__file__).parents[2] / "src" / "trimtab" / "integrations" / "verl.py"


def _names() -> list[str]:
    """`NAMES` of the plugin, which can't be imported without verl."""
    found: dict[str, Any] = {}
    needed = {"_ENGINE", "_REPLAY", "NAMES"}
    body = [each for each in ast.parse(PLUGIN.read_text()).body if isinstance(each, ast.Assign)]
    run_statements([each for each in body if ast.unparse(each.targets[0]) in needed], "names of verl", found)
    return list(found["NAMES"])


NAMES = _names()


def parts_of(line: str) -> tuple[str, str, list[str] | None]:
    """Module, name in it, and parameters of a line; None for what is not called."""
    name, parenthesis, parameters = line.removesuffix(")").partition("(")
    module, _, path = name.partition(":")
    return module, path, list(filter(None, parameters.split(", "))) if parenthesis else None


def stand_ins(lines: list[str]) -> dict[str, ModuleType]:
    """Modules that have the names of these lines, for `sys.modules`. Functions do nothing; `register` decorates."""
    modules: dict[str, ModuleType] = {}
    for module_name, path, parameters in map(parts_of, lines):
        *packages, _ = module_name.split(".")
        for count in range(1, len(packages) + 2):
            name = ".".join(module_name.split(".")[:count])
            modules.setdefault(name, ModuleType(name))
        owner: Any = modules[module_name]
        *classes, last = path.split(".")
        for each in classes:
            if not hasattr(owner, each):
                setattr(owner, each, type(each, (), {}))
            owner = getattr(owner, each)
        setattr(owner, last, None if parameters is None else _function(parameters))
    return modules


def _function(parameters: list[str]) -> Callable[..., Any]:
    def call(*_args: Any, **_kwargs: Any) -> Any:
        return lambda decorated: decorated

    kind = inspect.Parameter.KEYWORD_ONLY
    vars(call)["__signature__"] = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
    return call
