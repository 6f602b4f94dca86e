"""`python -m benchmarks.papers`: its cases, figures of tiny traces, and what is computed and printed from them."""

from __future__ import annotations

import json
import re
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
    SCHEMA,
    PapersBenchmark,
    TraceSizes,
    case_figures,
    comparison_case,
    draw,
    make_cases,
    pipeline_stage,
)
from benchmarks.papers_summary import gap_by_part, medians, print_figures, ratio, summarise
from trimtab import InputError
from trimtab.cluster import load_model
from trimtab.planner.plan.pass_times import PARTS
from trimtab.policies import POLICIES
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.yardstick import yardstick

TINY = PapersBenchmark(
    pairs=(("qwen3-30b-a3b", 8), ("gpt-oss-120b", 16)), tokens=(16384,),
    presets=("qwen3-30b-math",), sizes=TraceSizes(layers=2, mean_length=128, max_length=256, tokens_per_rank=512),
)  # fmt: skip


def test_every_pair_has_all_tokens_and_presets_and_slots_alternate() -> None:
    settings = PapersBenchmark()
    cases = settings.cases()
    assert len(cases) == 48 == len({case.name for case in cases})
    for model, ranks in settings.pairs:
        mine = [case for case in cases if (case.model, case.ranks) == (model, ranks)]
        assert len({(case.tokens, case.preset) for case in mine}) == 4
        assert Counter(case.slots for case in mine) == {1: 2, 2: 2}
    assert Counter((case.tokens, case.preset, case.slots) for case in cases) == dict.fromkeys(
        [(tokens, preset, slots) for tokens in settings.tokens for preset in settings.presets for slots in (1, 2)], 6
    )
    assert {case.ranks for case in cases} == {8, 16, 32, 64, 128}
    # One trace for each preset, size of the model and tokens.
    assert len({case.trace(100) for case in cases}) == 3 * 4


def test_only_chooses_cases_by_name() -> None:
    assert [case.name for case in PapersBenchmark(only="deepseek-v3-64-8M").cases()] == [
        "deepseek-v3-64-8M-qwen3-30b-math-s2",
        "deepseek-v3-64-8M-nemotron-3-nano-text-s1",
    ]
    with pytest.raises(InputError, match=r"no case has 'kimi' in its name; the first is qwen3-30b-a3b-8-0\.5M-"):
        PapersBenchmark(only="kimi").cases()


def test_a_case_is_the_last_step_of_its_trace_after_the_earlier_ones() -> None:
    case = make_cases(TINY.pairs, TINY.tokens, TINY.presets)[1]
    steps = draw(case.trace(1), TINY.sizes)
    compared = comparison_case(case, steps, TINY.sizes, "h100x8")
    assert compared.sequences is steps[2]
    assert compared.earlier == steps[:2]
    assert not np.array_equal(steps[1].counts_SLE.sum(axis=0), steps[2].counts_SLE.sum(axis=0))
    assert (compared.cluster.ranks, compared.cluster.ranks_per_node, compared.cluster.slots_per_rank) == (16, 8, 2)
    assert compared.sequences.counts_SLE.shape == (128, 2, 128)
    # The model's own experts of a token, and 512 tokens of a rank in each of two micro-steps.
    assert compared.sequences.top_k == 4
    assert compared.settings.checkpointing
    assert simulate_policy(compared, "static").plan.num_micro_steps == 2


@pytest.mark.slow
def test_the_command_writes_figures_of_the_simulated_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {name: getattr(TINY, name) for name in ("pairs", "tokens", "presets", "sizes")}
    monkeypatch.setattr(papers, "PapersBenchmark", partial(PapersBenchmark, **tiny))
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--seeds", "1", "0", "--only", "gpt-oss", "--processes", "1"]
    assert run_command("benchmarks.papers", [*words, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    (case,) = PapersBenchmark(only="gpt-oss", **tiny).cases()
    assert case.name in capsys.readouterr().out
    assert (figures["schema"], figures["yardstick"], figures["seeds"]) == (SCHEMA, yardstick(), [1, 0])
    assert figures["settings"]["sizes"]["steps"] == 3
    assert [(row["case"], row["seed"]) for row in figures["cases"]] == [(case.name, 0), (case.name, 1)]
    for row in figures["cases"]:
        seconds = row["step_s"]
        assert list(seconds) == list(POLICIES)
        others = {name: seconds[name] for name in seconds if name not in ("trimtab", "balanced")}
        assert row["best_other"] == min(others, key=lambda name: others[name])
        assert set(row["plans"]) == {"trimtab", row["best_other"], row["best_other_without_planning"]}
        for name, plan in row["plans"].items():
            assert sum(plan["parts_s"].values()) == pytest.approx(seconds[name], rel=1e-5)
            assert plan["parts_s"]["planning"] == row["planning_s"].get(name, 0.0)
            assert plan["max_over_mean"] >= 1
        assert row["plans"]["trimtab"]["strategy"]
        assert row["planning_s"]["trimtab"] > 0
        assert not row["planning_s"].keys() & {"static", "eplb", "balanced"}
        assert sum(row["bound_parts_s"].values()) < seconds["trimtab"]
        assert set(row["does_not_fit"]) <= set(seconds)
    compared = comparison_case(case, draw(case.trace(0), TINY.sizes), TINY.sizes, TINY.cluster)
    outcome = simulate_policy(compared, "relibra")
    row = figures["cases"][0]
    assert row["step_s"]["relibra"] == pytest.approx(outcome.simulated.step_time_s, rel=1e-6)
    # Seconds of the whole model, whose layers are 18 times those of the trace.
    assert row["bound_parts_s"]["attention"] == pytest.approx(outcome.simulated.parts_s["attention"], rel=1e-6)


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
    case = TINY.cases()[0]
    compared = comparison_case(case, draw(case.trace(0), TINY.sizes), TINY.sizes, TINY.cluster)
    stage = pipeline_stage(compared.model, 2)
    outcome = simulate_policy(replace(compared, model=stage), "trimtab")
    for device_bytes, fits in ((outcome.peak_bytes * 1.5, True), (outcome.peak_bytes * 0.5, False)):
        cramped = replace(compared, cluster=replace(compared.cluster, device_bytes=device_bytes))
        assert ("trimtab" not in case_figures(case, 0, cramped)["does_not_fit"]) == fits


def some_row(case: str, seed: int, ranks: int, trimtab: float, laer: float, echo: float) -> dict[str, Any]:
    """`trimtab` plans for 1 s, `echo` for 3 s."""
    nothing = dict.fromkeys(PARTS, 0.0)
    return {
        "case": case, "seed": seed, "ranks": ranks, "best_other": "laer" if laer < echo else "echo",
        "best_other_without_planning": "laer" if laer < echo - 3 else "echo",
        "step_s": {"trimtab": trimtab, "laer": laer, "echo": echo, "eplb": 120.0, "static": 150.0, "balanced": 90.0},
        "planning_s": {"trimtab": 1.0, "echo": 3.0}, "does_not_fit": ["laer"],
        "plans": {"trimtab": {"parts_s": nothing | {"dispatch": trimtab - 51, "experts": 50.0, "planning": 1.0}}},
        "bound_parts_s": nothing | {"dispatch": 30.0, "experts": 50.0},
    }  # fmt: skip


ROWS = [
    some_row("a", 0, 16, 99.0, 100.0, 110.0),
    some_row("a", 1, 16, 100.0, 104.0, 100.0),
    some_row("a", 2, 16, 101.0, 102.0, 100.0),
    some_row("b", 0, 32, 94.0, 100.0, 101.0),
]


def test_ratios_are_to_the_best_other_with_and_without_planning() -> None:
    assert ratio(ROWS[0]) == pytest.approx(99 / 100 - 1)
    assert ratio(ROWS[0], planning=False) == pytest.approx(98 / 100 - 1)
    assert ratio(ROWS[2]) == pytest.approx(101 / 100 - 1)
    assert ratio(ROWS[2], planning=False) == pytest.approx(100 / 97 - 1)
    assert ratio(ROWS[3], planning=False) == pytest.approx(93 / 98 - 1)


def test_the_summary_has_means_worst_cases_and_targets() -> None:
    found = {(group["group"], group["planning"]): group for group in summarise(ROWS)}
    small, large = found["EP 8 to 16", True], found["EP 32 to 128", True]
    assert len(found) == 4
    assert small["mean"] == {"value": pytest.approx((-0.01 + 0 + 0.01) / 3), "target": -0.003, "met": False}
    assert small["worst"] == {"value": pytest.approx(0.01), "target": 0.002, "met": False}
    assert (small["worst_case"], small["worst_seed"]) == ("a", 2)
    assert small["worst_median"] == {"value": 0.0, "target": 0.002, "met": True}
    assert (small["slower"], small["pairs"], large["slower"], large["pairs"]) == (1, 3, 0, 1)
    assert large["mean"] == {"value": pytest.approx(-0.06), "target": -0.03, "met": True}
    assert large["worst_median"]["value"] == pytest.approx(-0.06)
    assert large["worst"]["met"]
    unplanned = found["EP 32 to 128", False]["mean"]
    assert unplanned == {"value": pytest.approx(93 / 98 - 1, abs=1e-6), "target": -0.03, "met": True}
    assert found["EP 8 to 16", False]["mean"]["met"] is None
    # No figures of a group without cases.
    assert {group["group"] for group in summarise(ROWS[3:])} == {"EP 32 to 128"}


def test_tables_show_medians_over_seeds_and_the_worst_cases_first(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = medians(ROWS)
    assert (b["case"], b["best"], b["best_fits"]) == ("b", "laer", False)
    assert (a["case"], a["best"], a["best_fits"]) == ("a", "echo", True)
    assert (a["trimtab_s"], a["best_s"], a["ratio"]) == (100.0, 100.0, 0.0)
    assert sum(gap_by_part(ROWS[1]).values()) == pytest.approx(100 / 80 - 1) == pytest.approx(a["gap"])
    assert a["gap_by_part"]["dispatch"] == pytest.approx(19 / 80)
    assert a["gap_by_part"]["planning"] == pytest.approx(1 / 80)
    figures = {"yardstick": "0123", "seeds": [0, 1, 2], "cases": ROWS[::-1], "summary": summarise(ROWS)}
    print_figures(figures, Console(width=220))
    every, summary, worst = capsys.readouterr().out.split("seeds 0, 1, 2")[1].split("┏")[1:]
    assert "echo 100 s │" in every
    assert "laer 100 s * │" in every
    assert every.index("│ b ") < every.index("│ a ")
    assert "+0.2%, missed" in summary
    assert "-3.0%, met" in summary
    assert "1 of 3" in summary
    assert worst.index("│ a ") < worst.index("│ b ")
    # Only parts that are above the bound somewhere.
    assert re.findall(r"\w+", worst.splitlines()[1]) == ["case", "ratio", "above", "bound", "dispatch", "planning"]
