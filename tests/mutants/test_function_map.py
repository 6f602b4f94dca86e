"""What a recorded run notes: functions and blocks that ran, and processor seconds with those of shared fixtures."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mutants import function_map
from mutants.function_map import FunctionMap, block_at, digest_of, note_calls


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
