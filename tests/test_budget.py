"""Lines with code are counted, and folders above their budget, or without one, are named."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

LINES = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "lines.py"))
SOURCE = '''"""Not counted."""

# Nor is this.
NAMES = [
    # Nor this.
    "a",
]

def f():
    """Nor
    this."""
    return """counted,

    with blank lines"""
'''


def test_lines_of_docstrings_and_comments_do_not_count() -> None:
    assert LINES["lines_with_code"](SOURCE) == 7


def test_files_count_for_their_folder(tmp_path: Path) -> None:
    for name in ("src/trimtab/a.py", "src/trimtab/b/c/d.css", "tests/e.sh", "recipes/f/tests/g.py", "examples/h.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n\n")
    assert LINES["count"](tmp_path) == {"": 1, "b": 1, "tests": 2}


@pytest.mark.parametrize(
    ("lines", "names"), [({"a": 101, "b": 0}, []), ({"a": 102}, ["a"]), ({"a": 1, "new": 1}, ["new"])]
)
def test_a_budget_may_be_exceeded_by_1_percent(lines: dict[str, int], names: list[str]) -> None:
    problems = LINES["problems"](lines, {"a": 100, "b": 0})
    assert [problem.split("'")[1] for problem in problems] == names
