"""The solver is optional and silent: without it everything else works, with it nothing reaches standard output."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from trimtab import InputError, simulate, write_trace
from trimtab.cli.main import main
from trimtab.planner.plan.bounds import load_bound
from trimtab.planner.plan.solver import new_solver, why_no_solver
from trimtab.policies import POLICIES
from trimtab.trace import synthesize

REMEDY = "highspy is not installed; pip install '.[solver]' in Trimtab's checkout"
SIZE = ["--ranks", "4", "--token-budget", "512"]
COMPARE = ["simulate", "--ranks", "4"]


@pytest.fixture
def no_highspy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    # Other tests may have made it.
    monkeypatch.setitem(vars(POLICIES)["_entries"], "lplb", ("rivals.lplb", "Lplb"))


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    trace = synthesize(num_sequences=32, sequence_length=64, num_layers=2, num_experts=32, top_k=4, zipf=0.9)
    write_trace(trace, tmp_path / "trace.parquet")
    return tmp_path / "trace.parquet"


@pytest.mark.usefixtures("no_highspy")
def test_a_plan_without_the_solver_lacks_the_bound_alone(
    trace_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", str(trace_file), *SIZE, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["gap_to_bound_mean"] is None
    assert figures["expert_time_saved"] > 0
    assert main(["plan", str(trace_file), *SIZE]) == 0
    assert REMEDY in capsys.readouterr().out


@pytest.mark.usefixtures("no_highspy")
@pytest.mark.parametrize("command", [["plan", *SIZE], COMPARE, [*COMPARE, "--policy", "all"]])
def test_what_needs_the_solver_names_it_and_the_remedy(
    command: list[str], trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], str(trace_file), *command[1:], "--policy", "lplb"]) == 2
    out, error = capsys.readouterr()
    assert (out, error) == ("", f"trimtab {command[0]}: policy lplb: {REMEDY}\n")


@pytest.mark.usefixtures("no_highspy")
def test_a_bound_without_the_solver_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"bounds of plans: highspy is not installed; pip install"):
        load_bound(np.array([3, 4]), np.array([0, 1]), 2, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("no_highspy")
def test_a_comparison_of_all_leaves_out_who_needs_the_solver(
    trace_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "trimtab"):
        compared = {*simulate(trace_file, ranks=4, micro_steps=2, policies="all").outcomes}
    assert compared == {*POLICIES} - {"lplb"}
    assert f"left out: policy lplb: {REMEDY}" in caplog.messages


def test_a_solver_that_can_not_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "highspy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "highspy.py").write_text("raise ImportError('libhighs.so: cannot open\\nmore')")
    assert (
        why_no_solver()
        == "highspy can't be imported (libhighs.so: cannot open); pip install '.[solver]' in Trimtab's checkout"
    )
    (tmp_path / "highspy.py").write_text("import no_such_module")
    assert "No module named 'no_such_module'" in why_no_solver()


def talkative_package(say: Callable[[bytes], object], calls: list[object]) -> ModuleType:
    """A highspy whose solvers print when they are made, and note what they are told."""
    module = ModuleType("highspy")

    def make() -> SimpleNamespace:
        say(b"version 1.16")
        return SimpleNamespace(
            silent=lambda: calls.append("silent"), setOptionValue=lambda *option: calls.append(option)
        )

    vars(module)["Highs"] = make
    return module


def test_a_new_solver_prints_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What C code prints before and after is kept, also what it has only buffered."""
    libc = ctypes.CDLL(None)
    # Python may have been told to buffer nothing.
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 0, 4096)
    calls: list[object] = []
    monkeypatch.setitem(sys.modules, "highspy", talkative_package(libc.puts, calls))
    libc.puts(b"before")
    new_solver("a test")
    libc.puts(b"after")
    libc.fflush(None)
    assert capfd.readouterr().out == "before\nafter\n"
    assert calls == ["silent", ("threads", 1)]
