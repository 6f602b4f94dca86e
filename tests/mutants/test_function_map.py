"""What a recorded run notes: functions and blocks that ran, and processor seconds with those of shared fixtures."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mutants import function_map
from mutants.copies import ROOT
from mutants.function_map import FOLDER, NOTES_MODULE, FunctionMap, block_at, digest_of, note_calls


def test_functions_note_their_calls() -> None:
    names: list[str] = []
    source = '"""A module."""\nfrom __future__ import annotations\nclass A:\n    def f(self):\n        return 2\n'
    noted = note_calls(source + "@kernel\ndef g():\n    pass\n@triton.jit\ndef h():\n    pass\n", "src/a.py", names)
    assert names == ["src/a.py:A.f"]
    assert "_function_notes.notes[0] = 1" in noted
    assert "notes[1]" not in noted
    assert ast.get_docstring(ast.parse(noted)) == "A module."
    assert note_calls('"""Nothing."""', "src/b.py", names).startswith('"""Nothing."""')


BLOCKS = """
def f(x):
    for n in range(x):
        if n > 5:
            return n
        elif n:
            x += 1
    else:
        x = 7

    def inner():
        return 1

    return x
"""


def test_blocks_note_that_they_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    noted, notes = note_calls(BLOCKS, "a.py", names), bytearray(10)
    monkeypatch.setitem(sys.modules, "function_notes", SimpleNamespace(notes=notes))
    scope: dict[str, Any] = {}
    exec(noted, scope)
    assert scope["f"](1) == 7
    ran = {name.removeprefix("a.py:") for name, has_run in zip(names, notes, strict=False) if has_run}
    at = {line: block_at(BLOCKS, "f", line) for line in (3, 4, 5, 6, 7, 9, 14)}
    assert len(set(at.values())) == 6
    assert at[3] == at[14] == "f"
    assert ran == {at[line] for line in (3, 4, 6, 9)}
    assert block_at(BLOCKS, "f.inner", 12) == "f.inner"
    assert len(names) == 7


RECORDED = """
import time
import pytest
import noted

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def run():
    burn(0.5)
    noted.prepare()

def test_first(run): burn(0.2)
def test_second(run): noted.use()
def test_failing(): assert not noted.use()
def test_alone(): pass
"""


def test_seconds_of_a_fixture_are_those_of_all_tests_that_share_it(tmp_path: Path) -> None:
    names: list[str] = []
    source = "def prepare():\n    return 1\ndef use():\n    return 2\n"
    files = {
        "noted.py": note_calls(source, "src/noted.py", names), "function_notes.py": NOTES_MODULE,
        "test_recorded.py": RECORDED,
        "conftest.py": "from pathlib import Path\nfrom mutants.function_map import CallRecorder\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(CallRecorder(Path('records').resolve()))\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "names.json").write_text(json.dumps(names))
    path = os.pathsep.join((str(tmp_path), str(ROOT / "tests")))
    environment = {key: value for key, value in os.environ.items() if key != FOLDER} | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True)
    (records,) = (tmp_path / "records").glob("*.jsonl")
    found = {test.partition("::")[2]: rest for test, *rest in map(json.loads, records.read_text().splitlines())}
    assert set(found) == {"test_first", "test_second", "test_alone"}
    for test, least, most in (("test_first", 0.15, 0.45), ("test_second", 0, 0.15), ("test_alone", 0, 0.15)):
        assert least <= found[test][0] < most, found
    assert found["test_first"][1] == found["test_second"][1]
    assert found["test_first"][1]["run"] > 0.4
    assert not found["test_alone"][1]
    ran = {test: [names[number].partition(":")[2] for number in rest[2]] for test, rest in found.items()}
    assert ran == {"test_first": ["prepare"], "test_second": ["prepare", "use"], "test_alone": []}


def test_files_that_have_changed_are_recorded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same, changed = "tests/runtime/test_live.py", "tests/test_files.py"
    tests: dict[str, Any] = {f"{same}::test_one": (1.0, {}, [0])}
    stored = {same: {"digest": digest_of(same), "tests": tests}, changed: {"digest": "", "tests": tests}}
    monkeypatch.setattr(function_map, "MAP", tmp_path / "map.json")
    function_map.MAP.write_text(json.dumps({"names": ["a.py:f"], "files": stored}))
    known = FunctionMap()
    assert known.functions == {f"{same}::test_one": {"a.py:f"}}
    assert same not in known.missing()
    assert changed in known.missing()
