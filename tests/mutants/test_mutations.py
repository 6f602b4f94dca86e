"""The generator of mistakes, and their trials on a small package."""

from __future__ import annotations

import ast
import json
import random
import time
from pathlib import Path

import pytest

from experiments.page_tables import markdown_table, read_page, tables_of_page
from mutants.copies import ROOT
from mutants.mutations import Mutation, find_mutations, read_signatures
from mutants.run import FIGURES, PAGE, draw_from, table_of
from mutants.trial import Trial

SOURCE = '''
"""A module."""
import log

LIMIT: int = 3

def shift(rank: int, step: int) -> int:
    """Adds 1."""
    log.info("shifting by %d", 1)
    if rank < 0 and step:
        raise ValueError(f"rank {rank + 1}")
    values = [rank, min(step, 2)]
    values.append(4)
    return shift(values[0], values[1]) + step
'''


def mistakes(source: str = SOURCE) -> dict[str, list[str]]:
    data = source.encode()
    found: dict[str, list[str]] = {}
    for mutation in find_mutations("module.py", data, read_signatures([data])):
        found.setdefault(mutation.kind, []).append(f"{mutation.old} -> {mutation.new}")
    return found


def test_every_kind_of_mistake() -> None:
    found = mistakes()
    assert found["comparison"] == ["rank < 0 -> (rank <= 0)"]
    assert found["and/or"] == ["rank < 0 and step -> (rank < 0 or step)"]
    assert found["operator"] == ["shift(values[0], values[1]) + step -> (shift(values[0], values[1]) - step)"]
    assert found["min/max"] == ["min(step, 2) -> max(step, 2)"]
    assert found["first/last"] == ["values[0] -> values[-1]"]
    assert found["swapped arguments"] == ["shift(values[0], values[1]) -> shift(values[1], values[0])"]
    assert [text.split("(")[0] for text in found["dropped statement"]] == ["raise ValueError", "values.append"]
    assert found["constant"] == ["3 -> 4", "0 -> 1", "2 -> 3", "4 -> 5", "1 -> 2"]
    assert mistakes("x = 100, 101, 2.5, 1e-9\n")["constant"] == [
        "100 -> 101",
        "101 -> 202",
        "2.5 -> 5.0",
        "1e-9 -> 0.001",
    ]
    assert mistakes("x = not a\ny = -b\nz = 1.0 if c else True\n") == {
        "condition": ["not a -> (a)", "c -> (not c)"],
        "sign": ["-b -> (b)"],
        "constant": ["1.0 -> 2.0", "True -> False"],
    }


def test_what_changes_no_result_is_left_alone() -> None:
    assert mistakes("for a, b in zip(x, y, strict=True): time.sleep(0.1)\nif cost < best: best = cost\n") == {
        "dropped statement": ["time.sleep(0.1) -> pass"]
    }
    assert set(mistakes("if cost < best: best, at = cost, n\n")) == {"comparison"}
    assert set(mistakes("if cost < best: best = cost\nelse: cost = 0\n")) == {"comparison", "constant"}


def test_mistakes_of_the_source_parse_and_change_one_place() -> None:
    paths = random.Random(1).sample(sorted((ROOT / "src").rglob("*.py")), 20)
    files = {path: path.read_bytes() for path in paths}
    signatures = read_signatures(files.values())
    for path, source in files.items():
        for mutation in random.Random(1).sample(
            every := find_mutations(str(path), source, signatures), min(5, len(every))
        ):
            changed = mutation.apply(source)
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutation
            assert changed.replace(mutation.new.encode(), b"") != source


def test_other_code_does_not_change_a_draw() -> None:
    files = {f"src/{name}.py": SOURCE.replace("shift", name).encode() for name in ("first", "second", "third")}
    changed = files | {"src/second.py": files["src/second.py"].replace(b"values.append(4)", b"values.extend([9, 8])")}
    moved = {path.replace("src/", "src/folder/"): source for path, source in files.items()}
    count = len(draw_from(files, 1000, 1))
    assert count > 30

    def drawn(of: dict[str, bytes], seed: int = 1) -> list[tuple[str, str, str]]:
        return [(m.function, m.kind, m.new) for m in draw_from(of, 15, seed)]

    # All of the drawn mistakes that are still possible, in the same order.
    after = drawn(changed)
    kept = [each for each in drawn(files) if each[0] != "second"]
    assert [each for each in after if each in kept] == kept[: len([each for each in after if each in kept])]
    assert len(set(after) & set(drawn(files))) >= 12
    assert drawn(moved) == drawn(files)
    assert drawn(files, 2) != drawn(files)
    assert [m for m in draw_from(files, 1000, 1, "first") if m.file != "src/first.py"] == []


def test_the_page_shows_the_figures() -> None:
    figures = json.loads(FIGURES.read_text())
    assert tables_of_page(read_page(PAGE))["mistakes"] == markdown_table(*table_of(figures))


TESTED = "import time\nfrom threading import Event\n\ndef half(n):\n    return n // 2\n"
TESTS = {
    "test_half": "def test_half():\n    assert half(5) == 2\n",
    "test_type": "def test_type():\n    assert half(4) in (2, 8)\n",
    "test_set_up": "import pytest\n@pytest.fixture\ndef two():\n    assert half(5) == 2\ndef test_set_up(two): pass\n",
    "test_forever": "def test_forever():\n    while half(5) != 2:\n        pass\n",
    "test_waiting": "def test_waiting():\n    if half(5) != 2:\n        Event().wait()\n",
}


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("test_half", "killed"),
        ("test_type", "survived"),
        ("test_set_up", "failed at set-up"),
        ("test_forever", "more than 3 s of processor time"),
        ("test_waiting", "no progress in 2 s"),
        ("test_none", "tests not found"),
    ],
)
def test_outcomes_of_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, outcome: str) -> None:
    monkeypatch.setattr("mutants.trial.IMPORTS_S", 3.0)
    monkeypatch.setattr("helpers.processor_time.IDLE_S", 2.0)
    copy = tmp_path / "copy"
    (copy / "src").mkdir(parents=True)
    (copy / "src" / "halves.py").write_text(TESTED)
    (copy / "pytest.ini").write_text("[pytest]\npythonpath = src\n")
    for name, text in TESTS.items():
        (copy / f"{name}.py").write_text(f"from halves import *\n{text}")
    (mutation,) = (
        m
        for m in find_mutations("src/halves.py", TESTED.encode(), {})
        if m.kind == "operator" and isinstance(m, Mutation)
    )
    for mistaken in (True, False):
        trial = Trial(copy, mutation, [f"{test}.py::{test}"], 0.0, mistaken=mistaken)
        while (result := trial.result()) is None:
            time.sleep(0.05)
        trial.close()
        assert result == (outcome if mistaken or outcome == "tests not found" else "survived")
        assert (copy / "src" / "halves.py").read_text() == TESTED
        assert 0.01 < trial.used_s < 8
        failed = {"killed": f"FAILED {test}.py::{test} - ", "failed at set-up": f"ERROR {test}.py::{test} - "}
        assert trial.failed_test().startswith(failed.get(result, ""))
        assert result != "survived" or not trial.failed_test()
