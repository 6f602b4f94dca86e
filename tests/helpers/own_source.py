"""Modules and functions of a framework's own source, without what that source imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def path_in(folder: str | Path, module: str) -> Path:
    """The file of a module in the source of a folder."""
    return Path(folder) / f"{module.replace('.', '/')}.py"


def load_module(folder: str | Path, name: str) -> Any:
    """A module of a file, in `sys.modules`."""
    spec = spec_from_file_location(name, path_in(folder, name))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_functions(path: Path, names: Collection[str], given: dict[str, Any], class_name: str = "") -> dict[str, Any]:
    """Functions of a file, or of a class in it, compiled alone, in a dictionary of what they use.

    Args:
        given: what they use of the file and its imports, to which they are added.
    """
    body = ast.parse(path.read_text()).body
    if class_name:
        (body,) = (each.body for each in body if isinstance(each, ast.ClassDef) and each.name == class_name)
    functions = [each for each in body if isinstance(each, ast.FunctionDef) and each.name in names]
    assert {each.name for each in functions} == set(names), path
    for each in functions:
        # ms-swift takes their time.
        each.decorator_list = [kept for kept in each.decorator_list if ast.unparse(kept) != "profiling_decorator"]
    run_statements(functions, str(path), given)
    return given


def run_statements(body: Sequence[ast.stmt], name: str, given: dict[str, Any]) -> None:
    """Run statements in a dictionary of names. Annotations are not evaluated."""
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    exec(compile(ast.fix_missing_locations(ast.Module([future, *body], [])), name, "exec"), given)
