"""Which tests a mistake is tried on, and which kernels are compiled for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba.core.caching import UserProvidedCacheLocator

from mutants import read_mistakes
from mutants.copies import ROOT, copy_kernels
from mutants.mutations import Mutation, find_mutations
from mutants.read_mistakes import change_of, outdated_remarks
from mutants.selection import SECONDS, Selection

PIPELINE = "src/trimtab/simulator/pipeline.py"


def selection_of(functions: dict[str, set[str]], seconds: float = 1.0, fixtures: dict[str, float] | None = None) -> Any:
    known: Any = SimpleNamespace(
        functions=functions, seconds=dict.fromkeys(functions, seconds),
        fixtures={test: dict(fixtures or {}) for test in functions},
    )  # fmt: skip
    return Selection(known)


def mistake_in(function: str) -> Mutation:
    mistakes = find_mutations(PIPELINE, (ROOT / PIPELINE).read_bytes(), {})
    return next(mistake for mistake in mistakes if mistake.function == function)


def test_mistakes_in_kernels_are_tried_on_tests_around_them_and_on_those_that_call_them() -> None:
    around, calling, other = (
        f"tests/{name}.py::test_one"
        for name in ("simulator/test_causes", "simulator/test_layouts", "test_architecture")
    )
    known = {around: {f"{PIPELINE}:Pipeline.of"}, calling: {"src/trimtab/figures.py:plural"}, other: set[str]()}
    kernel = mistake_in("one_forward_one_backward")
    assert kernel.is_kernel
    tests, seconds = selection_of(known).tests_of(kernel)
    assert set(tests) == {around, calling}
    assert seconds == 2


FUNCTION = "Pipeline.of"


def test_one_case_of_each_test_comes_before_a_second_one_of_any() -> None:
    mistake = mistake_in(FUNCTION)
    cases = [f"tests/test_files.py::test_a[{n}]" for n in range(9)] + [f"tests/test_files.py::test_{c}" for c in "bc"]
    known = {test: {f"{PIPELINE}:{mistake.function}"} for test in cases}
    tests, _ = selection_of(known).tests_of(mistake)
    assert set(tests[:3]) == {"tests/test_files.py::test_a[0]", *cases[-2:]}
    assert set(tests) == set(cases)


@pytest.mark.parametrize("shared", [False, True])
def test_a_shared_fixture_is_paid_once(shared: bool) -> None:
    mistake = mistake_in(FUNCTION)
    known = {f"tests/test_files.py::test_{n}": {f"{PIPELINE}:{mistake.function}"} for n in range(9)}
    chosen, seconds = selection_of(known, 1.0 if shared else 6.0, {"run": SECONDS - 5} if shared else {}).tests_of(
        mistake
    )
    assert len(chosen) == 5
    assert seconds == SECONDS


def test_kernels_that_may_have_the_mistake_are_left_out(tmp_path: Path) -> None:
    def folder(root: Path) -> Path:
        place = root / "src" / "trimtab" / "simulator" / "any.py"
        return tmp_path / "cache" / UserProvidedCacheLocator.get_suitable_cache_subpath(str(place))

    for name in ("pipeline", "pipelines", "links"):
        folder(ROOT).mkdir(parents=True, exist_ok=True)
        (folder(ROOT) / f"{name}.f-1.py311.nbi").touch()
    copy = tmp_path / "copy"
    copy_kernels(copy, tmp_path / "cache", stale=[PIPELINE, "src/trimtab/policies/links.py"])
    assert {path.name.partition(".")[0] for path in folder(copy).iterdir()} == {"pipelines", "links"}


def test_a_mistake_is_tried_on_the_test_that_a_reader_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, named, other = (
        mistake_in("one_forward_one_backward"),
        "tests/test_files.py::test_it",
        "tests/test_kernels.py::test",
    )
    known = selection_of({named: set(), other: {f"{PIPELINE}:Pipeline.of"}})
    change = change_of(kernel, (ROOT / PIPELINE).read_bytes())
    monkeypatch.setattr(read_mistakes, "_read", lambda: {PIPELINE: {change: named}})
    assert known.tests_of(kernel) == ([named], 1.0)
    # Not as Python: the test may be one of ranks.
    assert known.tests_of(kernel, as_python=True) == ([], 0.0)
    monkeypatch.setattr(read_mistakes, "_read", lambda: {PIPELINE: {change + " ": named}})
    assert named not in known.tests_of(kernel)[0]


def test_remarks_of_mistakes_that_cannot_be_made_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (ROOT / PIPELINE).read_bytes()
    change = change_of(mistake_in(FUNCTION), source)
    remarks = {PIPELINE: {change: "a choice", "f: a -> b": "a choice"}, "src/gone.py": {"f: a -> b": "a choice"}}
    monkeypatch.setattr(read_mistakes, "_read", lambda: remarks)
    assert outdated_remarks({PIPELINE: source}) == [f"{PIPELINE}: f: a -> b", "src/gone.py: f: a -> b"]
