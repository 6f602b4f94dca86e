"""The folders: none imports a higher one, there is no import circle, and a file's name stands for one idea."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "trimtab"
# Folders whose files are named after those of another: a command after its function, a writer after its reader, a
# plugin after the framework whose files are read.
MIRRORS = ("cli", "trace/exports", "integrations")


def modules() -> dict[str, Path]:
    """Every module by its name below `trimtab`, "" for the package itself."""
    # `__main__` is a part of `cli/` that has to be elsewhere.
    files = [path for path in SOURCE.rglob("*.py") if path.name != "__main__.py"]
    paths = {path.relative_to(SOURCE).with_suffix(""): path for path in files}
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


def folders_of_the_map() -> list[str]:
    """Folders in the order of the table of docs/architecture.md, lowest first."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [folder.strip("/") for row in rows for folder in re.findall(r"`([\w/]+/)`", row)]


def folder_of(name: str) -> str:
    return str(MODULES[name].parent.relative_to(SOURCE))


def test_the_map_names_every_folder() -> None:
    assert sorted(folders_of_the_map()) == sorted({folder_of(name) for name in MODULES} - {"."})


def test_no_folder_imports_a_higher_one() -> None:
    """A package's `__init__.py` may import all that is inside it. Files of the package itself are for all folders."""
    order = [".", *folders_of_the_map()]
    for name, imported in IMPORTS.items():
        for other in imported:
            mine, its = folder_of(name), folder_of(other)
            inside = MODULES[name].name == "__init__.py" and its.startswith("" if mine == "." else f"{mine}/")
            whole = MODULES[other].name == "__init__.py" and mine.startswith(f"{its}/")
            assert not whole, f"{name} imports the package that it is in, {other}"
            assert inside or order.index(its) <= order.index(mine), f"{name} imports {other}"


def importers(folder: str, others: str) -> list[str]:
    """Files below a folder that import one of these packages."""
    imports = re.compile(rf"^\s*(?:from|import) (?:{others})\b", re.MULTILINE)
    return [str(path) for path in (ROOT / folder).rglob("*.py") if imports.search(path.read_text())]


def test_the_package_imports_nothing_beside_it() -> None:
    assert importers("src", "benchmarks|experiments|recipes|tests|helpers") == []


@pytest.mark.parametrize("folder", ["benchmarks", "experiments", "examples"])
def test_recipes_are_imported_by_nothing_but_tests(folder: str) -> None:
    assert importers(folder, "recipes|tests|helpers") == []
    assert importers("recipes", "recipes") != []


def test_rivals_are_read_from_the_registry() -> None:
    importers = {name for name, imported in IMPORTS.items() if any("policies.rivals" in other for other in imported)}
    assert {folder_of(name) for name in importers} == {"policies/rivals"}


def test_there_is_no_circle_of_modules() -> None:
    tuple(TopologicalSorter(IMPORTS).static_order())  # raises CycleError, which names the circle


def test_a_file_name_stands_for_one_idea() -> None:
    names = Counter(
        path.name
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py" and str(path.parent.relative_to(SOURCE)) not in MIRRORS
    )
    assert [name for name, count in names.items() if count > 1] == []
