"""The folders: none imports a higher one, there is no import circle, and a file's name stands for one idea."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "trimtab"
# From low to high. A folder imports those before it.
ORDER = (
    "array_type", "errors", "files", "kernels", "trace", "cluster", "planner", "policies", "simulator", "analysis",
    "report", "api", "launch", "runtime", "integrations", "rl", "calibration", "benchmarks", "doctor", "cli",
)  # fmt: skip
# Folders whose files are named after those of another: a command after its function, a writer after its reader.
MIRRORS = ("cli", "trace/exports")


def modules() -> dict[str, Path]:
    """Every module by its name below `trimtab`, "" for the package itself."""
    paths = {path.relative_to(SOURCE).with_suffix(""): path for path in SOURCE.rglob("*.py")}
    return {".".join(name.parts).removesuffix("__init__").strip("."): path for name, path in paths.items()}


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of Trimtab that a file imports anywhere, also inside functions and for annotations."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("trimtab.") in known else node.module or "" for name in names]
        else:
            continue
        imported |= {name[7:].lstrip(".") for name in names if name.split(".")[0] == "trimtab"}
    return imported


MODULES = modules()
IMPORTS = {name: imports_of(path, MODULES) for name, path in MODULES.items()}


def test_every_import_is_a_module() -> None:
    assert set().union(*IMPORTS.values()) <= set(MODULES)
    assert len(MODULES) > 200


def test_no_folder_imports_a_higher_one() -> None:
    tops = {name.split(".")[0] for name in MODULES} - {""}
    assert tops == set(ORDER)
    for name, imported in IMPORTS.items():
        for other in imported - {""} if name else set():
            mine, its = name.split(".")[0], other.split(".")[0]
            assert ORDER.index(its) <= ORDER.index(mine), f"{name} imports {other}"


def test_there_is_no_circle_of_modules() -> None:
    tuple(TopologicalSorter(IMPORTS).static_order())  # raises CycleError, which names the circle


def test_there_is_no_circle_of_folders() -> None:
    """A package's `__init__.py` is its face, which may import all that is inside."""
    graph: dict[Path, set[Path]] = {}
    for name, imported in IMPORTS.items():
        if MODULES[name].name != "__init__.py":
            others = {MODULES[other].parent for other in imported if MODULES[other].name != "__init__.py"}
            graph.setdefault(MODULES[name].parent, set()).update(others - {MODULES[name].parent})
    tuple(TopologicalSorter(graph).static_order())


def test_a_file_name_stands_for_one_idea() -> None:
    names = Counter(
        path.name
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py" and str(path.parent.relative_to(SOURCE)) not in MIRRORS
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_map_names_every_folder() -> None:
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    folders = {str(path.parent.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")} - {"."}
    assert [folder for folder in sorted(folders) if f"`{folder}/`" not in text] == []
