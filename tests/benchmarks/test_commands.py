"""Commands of benchmarks: small runs, `--json -`, and one line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import capture, transfer
from benchmarks.harness import run_command
from trimtab.integrations.transformers import RoutingRecord

# These start commands or ranks.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
Printed = Callable[..., str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs a benchmark, which succeeds, and returns what it prints."""

    def run(name: str, *words: str) -> str:
        assert run_command(f"benchmarks.{name}", words) == 0
        return capsys.readouterr().out

    return run


def test_planner(tmp_path: Path, printed: Printed) -> None:
    out = ["--json", str(tmp_path / "bench.json"), "--frontier", str(tmp_path / "frontier.svg")]
    size = ["--sizes", "4/32", "--preset", "qwen3-30b-math", "--slots", "1", "--layers", "1"]
    output = printed("planner", *size, "--policy", "static", "llep", "trimtab", "balanced", *out)
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert "equal terms" in output
    assert f"yardstick {figures['yardstick']}" in output
    cases = {(case["policy"], case["terms"]): case for case in figures["cases"]}
    assert len(cases) == 8
    assert cases["static", "own"]["max_over_mean_mean"] > 1.05
    assert cases["trimtab", "own"]["max_over_mean_mean"] < 1.02
    assert 0 <= cases["trimtab", "own"]["gap_to_bound_mean"] < 0.02
    assert cases["balanced", "own"]["max_over_mean_mean"] == 1.0
    assert cases["balanced", "own"]["predicted_ms_per_instance"] < cases["static", "own"]["predicted_ms_per_instance"]
    assert "<svg" in (tmp_path / "frontier.svg").read_text()


def test_capture(tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = partial(capture.CaptureBenchmark, layers=2, experts=8, hidden=64, length=32)
    monkeypatch.setattr(capture, "CaptureBenchmark", smaller)
    assert "1 alternating pairs" in printed("capture", "--rounds", "1", "--json", str(tmp_path / "bench.json"))
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert figures["schema"] == "trimtab-bench-capture-1"
    for name in ("forward", "generate"):
        taken = figures[name]
        assert taken["overhead"] == taken["recorded"]["s"][0] / taken["plain"]["s"][0] - 1
        assert 0 < taken["work_fraction"] < 1
    assert RoutingRecord.begin.__qualname__ == "RoutingRecord.begin"


@pytest.mark.nightly
def test_transfer(tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = replace(transfer.CPU, models=transfer.CPU.models[:1], overlap_s=0.01)
    monkeypatch.setattr(transfer, "CPU", smaller)
    output = printed("transfer", "--rounds", "1", "--json", str(tmp_path / "bench.json"))
    for title in ("forward", "Host path", "Planned layer", "Slowest rank", "Peer path", "No GPU here"):
        assert title in output
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert figures["device"] == "cpu"
    for part in ("grouped", "host_path", "planned_layer", "critical_path"):
        assert [row["model"] for row in figures[part]] == ["qwen3-30b-a3b/64"]
    assert all(point["ms"] > 0 for row in figures["grouped"] for point in row["tokens_per_expert"])
    # Whatever the speed, the copies and the planned layer have to be right.
    assert all(row["right"] is True for row in (*figures["host_path"], *figures["planned_layer"], figures["peer_path"]))
    for row in figures["host_path"]:
        assert {"gb_per_s", "gb_per_s_beside_compute", "compute_ms", "slowdown"} <= row.keys()
    for row in figures["planned_layer"]:
        assert (row["replicas"], row["waits_for_device"]) == (2, "not a GPU")
    for row in figures["critical_path"]:
        assert row["max_over_mean_planned"] < row["max_over_mean_static"]
        assert row["speedup"] == row["static_ms"] / row["planned_ms"]


def test_json_to_stdout_is_pure_json(tmp_path: Path) -> None:
    words = "--sizes 2/16 --layers 1 --slots 1 --policy static --preset spike --json -"
    command = [sys.executable, "-m", "benchmarks.planner", *words.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(result.stdout)["schema"] == "trimtab-bench-planner-1"
    assert not (ROOT / "-").exists()


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("planner", ["--sizes", "8"], "'8' should be ranks/experts, such as 8/128"),
        ("planner", ["--sizes", "3/128"], "3 ranks don't divide 128 experts"),
        ("step", ["--largest", "8"], "the smallest step has 32 ranks"),
        ("runtime", ["--nodes", "2", "--ranks", "3"], "--nodes is 2; it should divide the 3 ranks"),
        ("runtime", ["--link-mbit", "500"], "--nodes should be 2 or more"),
        ("planner", ["--presets", "qwen3-30b-mxed"], "qwen3-30b-mxed; did you mean qwen3-30b-mixed?"),
        ("papers", ["--only", "mixtral"], "no case has 'mixtral' in its name; the first is "),
        ("live", ["--tokens", "100"], "--tokens is 100; it should be a multiple of 256"),
        ("planning", ["--tokens", "100"], "--tokens is 100; it should be a multiple of 128"),
        ("t_ppo", ["--places", "8"], "--places is 8; it should be a multiple of 16"),
        ("t_ppo", ["--picture", "{folder}"], "a folder; name the file to write"),
        ("payload", ["--json", "{folder}"], "a folder; name the file to write"),
    ],
)
def test_input_errors_are_one_line_with_status_2(
    name: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run_command(f"benchmarks.{name}", [word.format(folder=tmp_path) for word in words])
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, error = capsys.readouterr()
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"python -m benchmarks.{name}: ")
    assert message in error
