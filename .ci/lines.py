#!/usr/bin/env python3
"""Prints the lines with code of each folder beside its budget; exit status 1 if one has no budget, or over 1% more.

Docstrings and comments of Python do not count, nor do blank lines.

    .ci/lines.py            print the table
    .ci/lines.py --write    write today's lines to .ci/budget.toml
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / ".ci" / "budget.toml"
HEADER = """\
# Lines with code by folder of src/trimtab, "" for the files beside them, and of the rest. .ci/lines.py allows 1% more.
# Budgets fall with each change that subtracts. One is raised only in a commit whose message gives the reason.
"""
# Folders by the name of their budget; those of the package have their own.
FOLDERS = {
    "src/trimtab": "", "tests": "tests", "recipes": "recipes and examples", "examples": "recipes and examples",
    "benchmarks": "benchmarks and experiments", "experiments": "benchmarks and experiments",
}  # fmt: skip
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_with_code(source: str) -> int:
    """Number of lines of a Python source that have code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def count(root: Path) -> Counter[str]:
    """Lines with code below the root of a repository, by the names of budgets."""
    lines: Counter[str] = Counter()
    for folder, name in FOLDERS.items():
        for path in (root / folder).rglob("*"):
            parts = path.relative_to(root / folder).parts
            if path.suffix in (".py", ".js", ".css", ".sh") and "__pycache__" not in parts:
                text = path.read_text(encoding="utf-8")
                of_package = parts[0] if len(parts) > 1 else ""
                own = "tests" if folder == "recipes" and "tests" in parts else name or of_package
                not_blank = sum(bool(line.strip()) for line in text.splitlines())
                lines[own] += lines_with_code(text) if path.suffix == ".py" else not_blank
    return lines


def problems(lines: Mapping[str, int], budget: Mapping[str, int]) -> list[str]:
    """Of each folder that has no budget, or over 1% more lines than it."""
    new = [f"{name!r} has no budget; .ci/lines.py --write adds it" for name in lines if name not in budget]
    above = [name for name in lines if name in budget and 100 * lines[name] > 101 * budget[name]]
    return new + [f"{name!r} has {lines[name]} lines with code, and a budget of {budget[name]}" for name in above]


def main() -> int:
    lines = count(ROOT)
    if "--write" in sys.argv:
        BUDGET.write_text(HEADER + "".join(f'"{name}" = {lines[name]}\n' for name in sorted(lines)))
    budget = tomllib.loads(BUDGET.read_text())
    for name in sorted(lines):
        print(f"{name:28} {lines[name]:7,} lines, budget {budget.get(name, 0):7,}")
    for problem in (found := problems(lines, budget)):
        print(problem)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
