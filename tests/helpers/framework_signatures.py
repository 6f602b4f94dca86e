"""Signatures of names in the source of a framework, which is not imported."""

from __future__ import annotations

import ast
from pathlib import Path


def parameters_in(folder: str, name: str) -> list[str] | None:
    """Parameters of a name in the sources of a folder; None if it is not a function there.

    Raises:
        LookupError: if it is not there.
    """
    module, _, path = name.partition(":")
    body = ast.parse((Path(folder) / f"{module.replace('.', '/')}.py").read_text()).body
    node: ast.AST | None = None
    for part in path.split("."):
        node = next((each for each in body if part in _names_of(each)), None)
        if node is None and not any(part in _set_in_init(each) for each in body):
            raise LookupError(name)
        body = getattr(node, "body", [])
    if not isinstance(node, ast.FunctionDef):
        return None
    return [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _names_of(node: ast.AST) -> list[str]:
    """Names that a statement of a module or class defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _set_in_init(node: ast.AST) -> list[str]:
    """Attributes that an `__init__` sets."""
    if not isinstance(node, ast.FunctionDef) or node.name != "__init__":
        return []
    attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return [each.attr for each in attributes if isinstance(each.ctx, ast.Store)]
