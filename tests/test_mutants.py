"""The list of mutants fits the source; `make mutants` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants.run import ROOT, Mutant, load_mutants

MUTANTS = load_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_can_be_applied(mutant: Mutant) -> None:
    assert mutant.problem(ROOT) == ""


def test_names_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1\nx = 1\ny = 2\n")
    (tmp_path / "test_code.py").write_text("def test_x():\n    pass\n")

    def problem(
        file: str = "code.py", old: str = "y = 2", new: str = "y = 3", test: str = "test_code.py::test_x"
    ) -> str:
        return Mutant("a mistake", file, old, new, (test,)).problem(tmp_path)

    assert problem() == ""
    assert problem(file="none.py") == "none.py does not exist"
    assert problem(old="x = 1") == "`old` occurs 2 times in code.py, not once"
    assert problem(new="y = 2") == "`new` equals `old`"
    assert problem(test="test_code.py::test_y") == "test_code.py::test_y does not exist"
