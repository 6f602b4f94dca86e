"""Which tests run which functions of src, and blocks in them: recorded by running the tests on a copy that notes them.

The map is kept for each test file, and recorded again when the file or one of the helpers that it imports changes.
Compiled kernels note nothing: their tests are those of the functions around them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.processor_time import descendants_of, seconds_of
from mutants.copies import ROOT, copy_repository

MAP = ROOT / "out" / "mutants" / "blocks.json"
# The tests of `make test`.
OF_CHANGES = "not long and not nightly"
# Set in the run that records: the folder of its records.
FOLDER = "TRIMTAB_FUNCTION_RECORDS"
# Of each process of that run: the file in which functions note their calls, a byte each.
NOTES = "TRIMTAB_FUNCTION_NOTES"
NOTES_MODULE = f'''
import mmap
import os

def open_notes():
    with open(os.environ["{NOTES}"], "r+b") as file:
        return mmap.mmap(file.fileno(), 0)

notes = open_notes()
'''


Blocks = Iterator[tuple[str, list[ast.stmt]]]


def blocks_of(tree: ast.AST, outside: str = "", function: str = "", numbers: Iterator[int] | None = None) -> Blocks:
    """The functions of a module, by qualified name, and the blocks within each, as `name#number`, in their order.

    Blocks are the statements of a condition, loop, handler and so on. Compiled kernels, of numba or triton, have none.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            if not any(re.search("kernel|jit", ast.unparse(decorator)) for decorator in node.decorator_list):
                yield outside + node.name, node.body
                yield from blocks_of(node, f"{outside}{node.name}.", outside + node.name, count(1))
        elif isinstance(node, ast.ClassDef):
            yield from blocks_of(node, f"{outside}{node.name}.")
        else:
            for part in ("body", "orelse", "finalbody"):
                statements = getattr(node, part, None)
                if numbers is not None and isinstance(statements, list) and statements:
                    yield f"{function}#{next(numbers)}", statements
            yield from blocks_of(node, outside, function, numbers)


def block_at(source: str | bytes, function: str, line: int) -> str:
    """The innermost block of a function that has a line; the function itself for a line outside of its blocks."""
    found, least = function, math.inf
    for name, body in blocks_of(ast.parse(source)):
        first, last = body[0].lineno, body[-1].end_lineno or 0
        if name.partition("#")[0] == function and first <= line <= last and last - first < least:
            found, least = name, last - first
    return found


def note_calls(source: str, file: str, names: list[str]) -> str:
    """The source of a module whose functions, and blocks in them, note that they ran; their names are appended."""
    tree = ast.parse(source)
    for name, body in list(blocks_of(tree)):
        note = ast.parse(f"_function_notes.notes[{len(names)}] = 1").body
        names.append(f"{file}:{name}")
        place = _behind_docstring(body)
        body[place:place] = note
    start = _behind_docstring(tree.body)
    start += sum(isinstance(first, ast.ImportFrom) and first.module == "__future__" for first in tree.body)
    tree.body[start:start] = ast.parse("import function_notes as _function_notes").body
    return ast.unparse(ast.fix_missing_locations(tree))


def _behind_docstring(body: Sequence[ast.stmt]) -> int:
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    return int(isinstance(first, ast.Constant) and isinstance(first.value, str))


class CallRecorder:
    """A pytest plugin of the run that records: writes which functions each passing test and its fixtures call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._main = os.getpid()
        self._fixtures: dict[str, bytes] = {}
        # Of fixtures that several tests share, processor seconds.
        self._shared_s: dict[str, float] = {}
        self._sharing_s = 0.0
        # Not before the tests have chosen a folder for kernels.
        from numba.core import event

        self._compiling = event.TimingListener()
        event.register("numba:compile", self._compiling)
        self._failed = False
        sys.path.insert(0, str(ROOT / "src"))
        self._open()
        os.register_at_fork(after_in_child=self._open_in_file_process)

    def _open_in_file_process(self) -> None:
        # Not in ranks: they note in the file of their test's process.
        if os.getppid() == self._main:
            self._open()

    def _open(self) -> None:
        path = self._folder / f"{os.getpid()}.notes"
        path.write_bytes(bytes(len(_names(self._folder))))
        os.environ[NOTES] = str(path)
        module: Any = _notes_module()
        module.notes = module.open_notes()

    @property
    def _compiled_s(self) -> float:
        """Compiling is no time of a test: later runs find the kernels."""
        return self._compiling.duration if self._compiling.done else 0.0

    def _used_s(self) -> float:
        """Processor seconds of this process and its ranks, without compiling."""
        return seconds_of(descendants_of(os.getpid())) - self._compiled_s

    @property
    def _notes(self) -> mmap.mmap:
        module: Any = _notes_module()
        return module.notes

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before, is_shared = self._notes[:], fixturedef.scope != "function"
        self._notes[:] = bytes(len(before))
        start = self._used_s() if is_shared else 0.0
        try:
            return (yield)
        finally:
            self._fixtures[fixturedef.argname] = self._notes[:]
            self._notes[:] = _either(self._notes[:], before)
            if is_shared:
                self._shared_s[fixturedef.argname] = seconds = self._used_s() - start
                self._sharing_s += seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._notes[:] = bytes(len(self._notes))
        self._failed, self._sharing_s = False, 0.0
        start = self._used_s()
        result = yield
        seconds = max(0.0, self._used_s() - start - self._sharing_s)
        seen, shared = self._notes[:], {}
        for name in getattr(item, "fixturenames", ()):
            seen = _either(seen, self._fixtures.get(name, b""))
            if name in self._shared_s:
                shared[name] = self._shared_s[name]
        if not self._failed:
            line = [item.nodeid, seconds, shared, [n for n, was_called in enumerate(seen) if was_called]]
            with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails or is skipped shows nothing."""
        self._failed |= not report.passed


@cache
def _notes_module() -> ModuleType:
    import function_notes  # type: ignore[import-not-found]

    return function_notes


def _either(one: bytes, other: bytes) -> bytes:
    return bytes(a | b for a, b in zip(one, other, strict=True)) if other else one


@cache
def _names(folder: Path) -> list[str]:
    return json.loads((folder / "names.json").read_text())


class FunctionMap:
    """Tests by the functions that they call.

    Attributes:
        seconds: of each test, processor seconds without those of the fixtures that it shares with others.
        fixtures: of each test, the shared fixtures that it uses, and their processor seconds.
        functions: called by each test, as `path:qualified name`, and their blocks that ran, with `#number`.
    """

    def __init__(self) -> None:
        stored = json.loads(MAP.read_text()) if MAP.exists() else {"names": [], "files": {}}
        self._names: list[str] = stored["names"]
        self._files: dict[str, Any] = {
            file: value for file, value in stored["files"].items() if digest_of(file) == value["digest"]
        }
        self.seconds: dict[str, float] = {}
        self.fixtures: dict[str, dict[str, float]] = {}
        self.functions: dict[str, set[str]] = {}
        for value in self._files.values():
            for test, (seconds, fixtures, numbers) in value["tests"].items():
                self.seconds[test], self.functions[test] = seconds, {self._names[number] for number in numbers}
                self.fixtures[test] = {f"{test.partition('::')[0]}::{name}": s for name, s in fixtures.items()}

    def missing(self) -> list[str]:
        """Test files that have changed or were never recorded."""
        files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
        return [f for f in files if f not in self._files and not f.startswith(("tests/reliability", "tests/gpu"))]

    def record(self, files: Sequence[str], workers: int) -> None:
        """Run test files and store what they call."""
        folder = MAP.parent / "records"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        copy = MAP.parent / "copy-noting"
        copy_repository(copy)
        names: list[str] = []
        for path in sorted((copy / "src").rglob("*.py")):
            times = path.stat()
            path.write_text(note_calls(path.read_text(), str(path.relative_to(copy)), names))
            # Kernels that were compiled in an earlier run are found.
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        (copy / "src" / "function_notes.py").write_text(NOTES_MODULE)
        (folder / "names.json").write_text(json.dumps(names))
        digests = {file: digest_of(file) for file in files}
        environment = os.environ | {
            FOLDER: str(folder),
            "PYTHONPATH": str(copy / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", f"--forks={workers}", "-m", OF_CHANGES]
        log = MAP.parent / "record.log"
        with log.open("w") as output:
            ended = subprocess.run(
                [*command, *files], cwd=copy, env=environment, stdout=output, stderr=output, check=False
            )
        # Some tests may fail, for example those that count lines of the source.
        if ended.returncode not in (0, 1):
            raise SystemExit(f"the tests did not run: pytest ended with status {ended.returncode}, see {log}")
        for file in files:
            self._files[file] = {"digest": digests[file], "tests": {}}
        place = {name: number for number, name in enumerate(self._names)}
        new = [place.setdefault(name, len(place)) for name in names]
        for path in folder.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                test, *costs, numbers = json.loads(line)
                self._files[test.partition("::")[0]]["tests"][test] = *costs, [new[number] for number in numbers]
        partial = MAP.with_suffix(".partial")
        partial.write_text(json.dumps({"names": list(place), "files": self._files}))
        partial.replace(MAP)
        shutil.rmtree(folder)


@cache
def digest_of(file: str) -> str:
    """Of a test file, the helpers that it imports, and what says what is recorded."""
    digest = hashlib.sha256(NOTES_MODULE.encode())
    for recorder in (blocks_of, note_calls, CallRecorder):
        digest.update(inspect.getsource(recorder).encode())
    for path in sorted(_with_helpers(ROOT / file, set())):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _with_helpers(path: Path, known: set[Path]) -> set[Path]:
    if path in known or not path.exists():
        return known
    known.add(path)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("helpers"):
            for name in (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)):
                _with_helpers(ROOT / "tests" / f"{name.replace('.', '/')}.py", known)
    return known
