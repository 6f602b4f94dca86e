"""`python -m benchmarks.papers`: its cases, figures of tiny traces, and what is computed and printed from them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import papers
from benchmarks.harness import run_command
from benchmarks.papers import (
    GRID,
    MOST_PLACES,
    RESULTS,
    SCHEMA,
    PapersBenchmark,
    PapersCase,
    TraceSizes,
    case_figures,
    comparison_case,
    draw,
    draw_cases,
    pipeline_stage,
)
from benchmarks.papers_summary import medians, page_blocks, print_figures, ratio, summarise
from experiments.page_tables import read_page, tables_of_page
from trimtab import InputError
from trimtab.cluster import load_model
from trimtab.policies import POLICIES
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.yardstick import yardstick
from trimtab.trace.numbering import permute_experts, random_orders

SIZES = TraceSizes(layers=2, mean_length=128, max_length=256, tokens_per_rank=512, steps=3)
CASE = PapersCase("h100x8", "gpt-oss-120b", 16, 2, 2, "qwen3-30b-math", permuted=False, forwards=True)
FIGURES = Path(__file__).parents[2] / "docs" / "benchmarks" / "step-time.json"


@pytest.mark.nightly
def test_cases_are_drawn_from_the_whole_grid() -> None:
    drawn = draw_cases(1000)
    assert len({case.name for case in drawn}) == 1000
    for field, values in GRID.items():
        assert Counter(getattr(case, field) for case in drawn).keys() == set(values)
    for case in drawn:
        assert load_model(case.model).num_experts % case.ranks == 0
        assert case.ranks * case.micro_steps <= MOST_PLACES
    # A smaller number are the first ones.
    assert draw_cases(36) == drawn[:36] == PapersBenchmark(count=36, drifting=0).cases()


@pytest.mark.nightly
def test_only_chooses_cases_by_name() -> None:
    chosen = PapersBenchmark(only="kimi").cases()
    assert chosen
    assert all(case.model == "kimi-k2" for case in chosen)
    with pytest.raises(InputError, match=r"no case has 'mixtral' in its name; the first is [a-z0-9-]+-m\d+-s\d-"):
        PapersBenchmark(only="mixtral").cases()


def test_a_case_is_all_steps_of_its_trace_but_the_first() -> None:
    traces = draw(CASE, 1, SIZES)
    compared = comparison_case(CASE, traces)
    steps = compared.steps
    assert [part.num_sequences for part in steps] == [trace.num_sequences for trace in traces]
    assert compared.measured == 2
    # Tokens of the steps that are measured; where every row is sent, their counts tell all.
    assert compared.traces == traces[1:]
    assert comparison_case(replace(CASE, forwards=False), traces).traces == ()
    assert not np.array_equal(steps[1].counts_SLE.sum(axis=0), steps[2].counts_SLE.sum(axis=0))
    assert (compared.cluster.ranks, compared.cluster.ranks_per_node, compared.cluster.slots_per_rank) == (16, 8, 2)
    assert compared.cluster.dispatch_forwards
    assert not comparison_case(replace(CASE, forwards=False), traces).cluster.dispatch_forwards
    assert compared.sequences.counts_SLE.shape == (128, 2, 128)
    # The model's own experts of a token, and 512 tokens of a rank in each of two micro-steps.
    assert compared.sequences.top_k == 4
    assert compared.settings.checkpointing
    assert simulate_policy(compared, "static").plan.num_micro_steps == 2
    permuted = comparison_case(replace(CASE, permuted=True), traces)
    expected = permute_experts(steps[0].counts_SLE, random_orders(2, 128, 0))
    assert np.array_equal(permuted.earlier[0].counts_SLE, expected)
    rack = replace(CASE, cluster="gb200-nvl72", ranks=128)
    assert comparison_case(rack, traces).cluster.ranks_per_node == 64


@pytest.mark.nightly
@pytest.mark.slow
def test_the_command_writes_figures_of_the_simulated_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "PapersBenchmark", partial(PapersBenchmark, sizes=SIZES))
    monkeypatch.setattr(papers, "GRID", {field: (getattr(CASE, field),) for field in GRID})
    monkeypatch.setenv("COLUMNS", "250")
    words = ["--seeds", "1", "0", "--processes", "1"]
    assert run_command("benchmarks.papers", [*words, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert CASE.name in capsys.readouterr().out
    assert (figures["schema"], figures["yardstick"], figures["seeds"]) == (SCHEMA, yardstick(), [1, 0])
    assert figures["settings"]["sizes"]["steps"] == 3
    assert [(row["case"], row["seed"]) for row in figures["cases"]] == [(CASE.name, 0), (CASE.name, 1)]
    for row in figures["cases"]:
        seconds = row["step_s"]
        assert list(seconds) == list(POLICIES)
        assert not {"trimtab", "static", "scheduled", "eplb"} & set(row["estimated"])
        others = {name: seconds[name] for name in seconds if name not in ("trimtab", "balanced")}
        assert row["best_other"] == min(set(others) - set(row["estimated"]), key=lambda name: others[name])
        # What was not counted is estimated to be slower than the best by more than estimates are off.
        assert all(seconds[name] > 1.02 * seconds[row["best_other"]] for name in row["estimated"] if name != "balanced")
        assert set(row["plans"]) == {"trimtab", row["best_other"], row["best_with_our_slots"]}
        # Those have as many copies as they want.
        assert row["best_with_our_slots"] not in ("laer", "fastermoe", "moonep")
        for name, plan in row["plans"].items():
            assert sum(plan["parts_s"].values()) == pytest.approx(seconds[name], rel=1e-5)
            assert plan["max_over_mean"] >= 1
        assert row["plans"]["trimtab"]["strategy"]
        assert row["above_bound"] > 0
        assert abs(row["predicted"]) < 0.1
        assert set(row["does_not_fit"]) <= set(seconds)
    compared = comparison_case(CASE, draw(CASE, 0, SIZES))
    for name in POLICIES:
        case = replace(compared, traces=()) if name in figures["cases"][0]["estimated"] else compared
        seconds = simulate_policy(case, name).simulated.step_time_s
        assert figures["cases"][0]["step_s"][name] == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3"])
def test_a_pipeline_stage_has_its_share_of_the_parameters(name: str) -> None:
    model = load_model(name)
    stage = pipeline_stage(model, 8)
    assert stage.expert_parameters == model.expert_parameters
    ends = 2 * model.vocab_size * model.hidden_size
    inside = (stage.dense_parameters - ends) / (model.dense_parameters - ends)
    layers = model.moe_layers + model.dense_layers
    # Dense layers are wider.
    assert inside == pytest.approx(8 / layers, rel=0.01 if not model.dense_layers else 0.2)
    assert stage.parameters < model.parameters * 9 / layers + ends


def test_copies_that_exceed_the_memory_of_a_stage_do_not_fit() -> None:
    compared = comparison_case(CASE, draw(CASE, 0, SIZES))
    stage = pipeline_stage(compared.model, 2)
    outcome = simulate_policy(replace(compared, model=stage), "trimtab")
    for device_bytes, fits in ((outcome.peak_bytes * 1.5, True), (outcome.peak_bytes * 0.5, False)):
        cramped = replace(compared, cluster=replace(compared.cluster, device_bytes=device_bytes))
        assert ("trimtab" not in case_figures(CASE, 0, cramped)["does_not_fit"]) == fits


def some_row(case: str, seed: int, nodes: int, trimtab: float, laer: float, echo: float) -> dict[str, Any]:
    """`laer` has more slots than `trimtab`."""
    return {
        "case": case, "seed": seed, "nodes": nodes, "forwards": True,
        "preset": "drift" if case == "b" else "qwen3-30b-math", "best_other": "laer" if laer < echo else "echo",
        "best_with_our_slots": "echo", "does_not_fit": ["laer"], "above_bound": 0.1 * seed, "predicted": -0.01 * seed,
        "step_s": {
            "trimtab": trimtab, "laer": laer, "echo": echo, "eplb": 120.0, "static": 150.0, "scheduled": 140.0,
            "balanced": 90.0,
        },
    }  # fmt: skip


ROWS = [
    some_row("a", 0, 1, 99.0, 100.0, 110.0),
    some_row("a", 1, 1, 100.0, 104.0, 100.0),
    some_row("a", 2, 1, 101.0, 102.0, 100.0),
    some_row("b", 0, 2, 96.0, 95.0, 101.0),
]


def test_medians_are_those_of_the_seeds_of_a_case() -> None:
    assert ratio(ROWS[0]) == pytest.approx(99 / 100 - 1)
    assert ratio(ROWS[0], "best_with_our_slots") == pytest.approx(99 / 110 - 1)
    a, b = medians(ROWS)
    assert (b["case"], b["best"], b["alike"]) == ("b", "laer", "echo")
    assert (a["case"], a["best"]) == ("a", "echo")
    assert (a["trimtab_s"], a["ratio"], a["gap"], a["predicted"]) == (100.0, 0.0, 0.1, -0.02)
    assert b["ratio"] == pytest.approx(96 / 95 - 1)
    assert b["alike_ratio"] == pytest.approx(96 / 101 - 1)
    assert b["over_scheduled"] == pytest.approx(140 / 96)


def test_the_summary_counts_cases_that_are_behind() -> None:
    found = {group["group"]: group for group in summarise(ROWS)}
    names = ["one domain of fast links", "several domains, tokens sent", "hot experts change between steps"]
    assert list(found) == ["all", *names]
    every, several = found["all"], found["several domains, tokens sent"]
    assert found["hot experts change between steps"]["worst"] == several["worst"]
    assert (every["count"], every["behind"], every["alike_behind"]) == (2, 1, 0)
    assert every["worst"] == pytest.approx(96 / 95 - 1, abs=1e-6)
    assert every["median"] == pytest.approx((0 + 96 / 95 - 1) / 2, abs=1e-6)
    assert several["alike_worst"] == several["alike_median"] == pytest.approx(96 / 101 - 1, abs=1e-6)
    assert several["over_eplb"] == pytest.approx(120 / 96)


def test_tables_show_the_worst_cases_first(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        "yardstick": "0123", "seeds": [0, 1, 2], "cases": ROWS, "summary": summarise(ROWS),
        "settings": {"sizes": {"steps": 7}},
    }  # fmt: skip
    print_figures(figures, Console(width=220))
    printed = capsys.readouterr().out
    assert "`laer`" in printed
    assert printed.index("│ b ") < printed.index("│ a ")
    blocks = page_blocks(figures)
    assert blocks["papers"].startswith("Behind others with the same slots by more than 0.5%: in no case.")
    assert "at most 2.0% from the simulated time" in blocks["papers"]
    assert "mean of 6 steps" in blocks["papers"]
    assert blocks["cases"].splitlines()[2].startswith("| b | 96.0 s | `laer` | +1.05% | `echo` | -4.95% | 1.25x |")


def test_the_page_shows_the_stored_figures() -> None:
    blocks = tables_of_page(read_page(RESULTS))
    assert {name: blocks[name] for name in ("papers", "cases")} == page_blocks(json.loads(FIGURES.read_text()))
