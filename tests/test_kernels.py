"""Kernels compiled on disk follow the kernels and values that they have inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

CALLER = """
from trimtab.kernels import kernel
from inner import FACTOR, shifted

@kernel
def scaled(x):
    return doubled_or_so(x)

# Behind the kernel that calls it, and no kernel of another file is in that one itself.
@kernel
def doubled_or_so(x):
    return FACTOR * shifted(x)

print(scaled(1), sum(scaled.stats.cache_hits.values()))
"""

INNER = """
from trimtab.kernels import kernel
{}

FACTOR = {}

@kernel
def shifted(x):
    return x + {}
"""

INNERMOST = """
from trimtab.kernels import kernel

@kernel
def shift(x):
    return {} if x < 100 else shift(x - 100)
"""


def _run(folder: Path) -> list[int]:
    """Result and number of hits of the cache, in a new process."""
    code = [sys.executable, "-B", "caller.py"]
    return [int(word) for word in subprocess.run(code, cwd=folder, check=True, capture_output=True).stdout.split()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "innermost.py").write_text(INNERMOST.format("10"))
    (tmp_path / "inner.py").write_text(INNER.format("from innermost import shift", 2, "shift(x)"))
    return tmp_path


def test_kernels_run_as_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    (folder / "caller.py").write_text(CALLER.replace("sum(scaled.stats.cache_hits.values())", "3"))
    assert _run(folder) == [22, 3]
    assert not (folder / "kernels").exists()


@pytest.mark.parametrize(("factor", "innermost", "expected"), [(3, "10", 33), (2, "1000", 2002), (2, "10 * x + 5", 32)])
def test_a_cached_kernel_follows_what_it_has_inside(folder: Path, factor: int, innermost: str, expected: int) -> None:
    assert _run(folder) == [22, 0]
    assert _run(folder) == [22, 1]
    (folder / "innermost.py").write_text(INNERMOST.format(innermost))
    if factor != 2:
        (folder / "inner.py").write_text(INNER.format("from innermost import shift", factor, "shift(x)"))
    assert _run(folder)[0] == expected


def test_code_that_a_wheel_has_is_used_where_the_cache_has_none(folder: Path) -> None:
    run = "import trimtab.kernels, pathlib; trimtab.kernels.SHIPPED = pathlib.Path('shipped.zip'); import caller"
    (folder / "run.py").write_text(run)

    def hits() -> list[int]:
        printed = subprocess.run([sys.executable, "-B", "run.py"], cwd=folder, check=True, capture_output=True).stdout
        return [int(word) for word in printed.split()]

    assert hits() == [22, 0]
    kernels = folder / "kernels" / "trimtab-kernels"
    with zipfile.ZipFile(folder / "shipped.zip", "w", zipfile.ZIP_LZMA) as shipped:
        for file in kernels.iterdir():
            shipped.write(file, file.name)
    shutil.rmtree(folder / "kernels")
    assert hits() == [22, 1]
    assert not list(kernels.iterdir())
    # That of another source is not.
    (folder / "innermost.py").write_text(INNERMOST.format("1000"))
    assert hits() == [2002, 0]


PAIR = """
from typing import NamedTuple

class Pair(NamedTuple):
    {}: int
    {}: int
"""

TAKER = """
from pairs import Pair
from trimtab.kernels import kernel

@kernel
def first(pair):
    return pair.a

print(first(Pair(1, 2)), sum(first.stats.cache_hits.values()))
"""


def test_named_tuples_with_other_fields_are_other_arguments(folder: Path) -> None:
    (folder / "caller.py").write_text(TAKER)
    (folder / "pairs.py").write_text(PAIR.format("a", "b"))
    assert _run(folder) == [1, 0]
    assert _run(folder) == [1, 1]
    (folder / "pairs.py").write_text(PAIR.format("b", "a"))
    assert _run(folder) == [2, 0]


def test_code_that_is_not_used_is_removed(folder: Path) -> None:
    _run(folder)
    kernels = folder / "kernels" / "trimtab-kernels"
    old, used = kernels / "old", next(kernels.glob("*scaled*"))
    old.write_bytes(b"")
    for file, days in ((old, 61), (used, 59)):
        os.utime(file, (time.time() - days * 86400,) * 2)
    assert _run(folder) == [22, 1]
    # Nothing was compiled, so nothing was removed.
    assert old.exists()
    (folder / "innermost.py").write_text(INNERMOST.format("1000"))
    _run(folder)
    assert used.exists()
    assert not old.exists()


EDITED = """
import sys
from pathlib import Path

from trimtab.kernels import kernel
import constants

@kernel
def scaled(x):
    return constants.FACTOR * x + {}

def make(y):
    @kernel
    def added(x):
        return x + y
    return added

if len(sys.argv) > 1:
    # Edited between import and first use.
    Path("caller.py").write_text(Path("caller.py").read_text().replace("* x + 1", "* x + 1000"))
print(scaled(1) + make(10)(0) + make(20)(0), sum(scaled.stats.cache_hits.values()))
"""


def test_code_is_kept_as_it_is_in_the_process_that_compiles_it(folder: Path) -> None:
    (folder / "constants.py").write_text("FACTOR = 2")
    (folder / "caller.py").write_text(EDITED.format(1))
    code = [sys.executable, "-B", "caller.py", "edit"]
    assert subprocess.run(code, cwd=folder, check=True, capture_output=True).stdout.split()[0] == b"33"
    assert _run(folder) == [1032, 0]
    (folder / "caller.py").write_text(EDITED.format(1))
    assert _run(folder) == [33, 1]
    (folder / "constants.py").write_text("FACTOR = 3")
    assert _run(folder) == [34, 0]


def test_damaged_code_is_compiled_anew(folder: Path) -> None:
    assert _run(folder) == [22, 0]
    for file in (folder / "kernels" / "trimtab-kernels").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert _run(folder) == [22, 0]
    assert _run(folder) == [22, 1]


def test_other_options_are_other_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(folder) == [22, 0]
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    assert _run(folder) == [22, 0]
    monkeypatch.delenv("NUMBA_BOUNDSCHECK")
    (folder / "caller.py").write_text(CALLER.replace("import kernel\n", "import inlined_kernel as kernel\n"))
    assert _run(folder) == [22, 0]
