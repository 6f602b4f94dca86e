"""Files that earlier versions wrote are read, and mean the same. `fixtures/make.py` made them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fixtures.make import trace_facts
from trimtab import StepPlan, Workload
from trimtab.cli.main import main
from trimtab.cluster import load_cluster
from trimtab.trace import read_trace

FOLDER = Path(__file__).parent / "fixtures" / "0.1.0"
FACTS: dict[str, Any] = json.loads((FOLDER / "facts.json").read_text())
CHECKPOINT = FOLDER / "run" / "checkpoints" / "step-00002"
SIZES = ["--ranks", "4", "--ranks-per-node", "2"]
NODES = ["--cluster", str(FOLDER / "cluster.toml"), "--model", str(CHECKPOINT)]
# Of commands that wrote `NAME.json`.
COMMANDS = {
    "plan": [*SIZES, "--token-budget", "256", "--step", "0"],
    "analyze": [*SIZES, *NODES],
    "simulate": [*SIZES, *NODES, "--micro-steps", "2", "--policy", "all"],
}
# Of these files, what does not depend on how steps are planned and simulated.
MEASURED = {
    "plan": ["schema", "step", "cluster", "max_over_mean_before", "cross_node_token_fraction_before"],
    "analyze": ["schema", "steps", "tokens", "max_vio", "balancedness", "expert_time_lost", "nodes"],
    "simulate": ["schema", "trace_hash", "cluster", "model"],
}


@pytest.mark.parametrize("name", FACTS["traces"])
def test_a_stored_trace_is_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    stored = FACTS["traces"][name]
    assert trace_facts(FOLDER / name) == stored
    assert main(["trace", "info", str(FOLDER / name), "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["unknown_routes"] * shown["top_k"] == sum(rows[-1] for rows in stored["rows"])
    assert (shown["experts"], shown["tokens"]) == (len(stored["rows"][0]) - 1, sum(stored["sequence_lengths"]))
    assert shown["domains"] == sorted(set(stored["domains"]))


def changed(stored: Any, today: Any, where: str, *, values: bool = False) -> list[str]:
    """Where today's figures lack keys of stored ones, or have another type; with `values`, other numbers or texts."""
    if isinstance(stored, dict) and isinstance(today, dict):
        missing = [f"{where}.{key} is missing" for key in stored if key not in today]
        both = [(stored[key], today[key], f"{where}.{key}") for key in stored if key in today]
    elif isinstance(stored, list) and isinstance(today, list):
        missing = [f"{where} has {len(today)} entries, had {len(stored)}"] if len(today) < len(stored) else []
        both = [(*pair, f"{where}[{n}]") for n, pair in enumerate(zip(stored, today, strict=False))]
    else:
        numbers = isinstance(stored, int | float) and isinstance(today, int | float)
        same = stored == (pytest.approx(today) if numbers else today)
        optional = None in (stored, today) and not values
        fits = same or optional or (not values and (numbers or type(stored) is type(today)))
        return [] if fits else [f"{where} is {today!r}, was {stored!r}"]
    return missing + [text for each in both for text in changed(*each, values=values)]


@pytest.mark.parametrize("command", COMMANDS)
def test_figures_of_a_stored_trace_keep_their_keys_and_what_they_measure(command: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert main([command, str(FOLDER / "synth.parquet"), *COMMANDS[command], "--json", str(figures)]) == 0
    stored, today = (json.loads(path.read_text()) for path in (FOLDER / f"{command}.json", figures))
    assert not changed(stored, today, command)
    kept = {name: stored[name] for name in MEASURED[command]}
    assert not changed(kept, today, command, values=True)


def test_a_stored_cluster_file_has_the_same_figures() -> None:
    today = asdict(load_cluster(FOLDER / "cluster.toml", ranks=4))
    assert not changed(FACTS["cluster"], today, "cluster.toml", values=True)


def test_a_stored_plan_is_read_and_gives_the_same_loads() -> None:
    trace = read_trace(FOLDER / "synth.parquet", step=0)
    plan = StepPlan.load(FOLDER / "plan.npz")
    workload = Workload.from_trace(trace, plan.schedule)
    plan.check(workload)
    assert plan.num_replicas == json.loads((FOLDER / "plan.json").read_text())["replicas"] > 0
    assert plan.home.tolist() == FACTS["plan"]["homes"]
    assert plan.rank_loads(workload).tolist() == FACTS["plan"]["loads"]


def test_the_routing_of_a_stored_run_has_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["analyze", str(FOLDER / "run" / "routing"), "--ranks", "2", "--html", str(page)]) == 0
    assert "max_vio" in page.read_text()
