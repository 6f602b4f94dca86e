"""The row of `analyze` on a plan for each micro-step is that of `plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trimtab
from trimtab.analysis.balance import lost_part
from trimtab.analysis.fixed_placements import SLOTS
from trimtab.api import analyze as analyze_module
from trimtab.report.analysis_tables import placements_table
from trimtab.trace import RoutingTrace, synthesize
from trimtab.trace.store import ROW_GROUP_BYTES


def random_trace(seed: int) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    trace = synthesize(
        num_sequences=int(rng.integers(8, 80)), sequence_length=int(rng.integers(8, 200)),
        num_layers=int(rng.integers(1, 5)), num_experts=int(rng.choice([16, 32, 128])), top_k=int(rng.integers(1, 9)),
        zipf=float(rng.uniform(0, 2)), seed=seed,
    )  # fmt: skip
    return replace(trace, steps=np.arange(trace.num_sequences, dtype=np.int32) * (seed % 2 + 1) // trace.num_sequences)


def planned_row(result: Any) -> dict[str, Any]:
    """Figures of the plan."""
    return result.figures()["placements"]["strategies"]["plan"]


@pytest.mark.parametrize("seed", range(20))
def test_it_equals_the_plan_of_the_last_step(seed: int) -> None:
    rng, trace = np.random.default_rng(100 + seed), random_trace(seed)
    run: dict[str, Any] = {"ranks": int(rng.choice([4, 8, 16])), "ranks_per_node": int(rng.choice([2, 4]))}
    run |= rng.choice([{}, {"micro_steps": 3}, {"token_budget": 256}, {"model": "qwen3-30b-a3b"}])  # type: ignore[arg-type]
    if "model" in run and (trace.num_experts, trace.top_k) != (128, 8):
        del run["model"]
    result, plan = trimtab.analyze(trace, trimtab.Run(**run)), trimtab.plan(trace, trimtab.Run(slots=SLOTS, **run))
    row = planned_row(result)
    assert row["max_over_mean_mean"] == pytest.approx(plan.balance_after.mean)
    assert row["max_over_mean_p99"] == pytest.approx(plan.balance_after.p99)
    assert row["expert_time_lost"] == pytest.approx(lost_part(plan.loads_after_MLR))
    idle = 1 - 1 / (plan.loads_before_MLR.max(axis=2).sum() / plan.loads_before_MLR.mean(axis=2).sum())
    if row["recovered_fraction"] is not None:
        assert row["recovered_fraction"] * idle == pytest.approx(plan.expert_time_saved)
    shown = placements_table(result.analysis).rows[-1]
    assert (shown.name, shown.is_ours) == ("a plan for each micro-step", True)
    assert shown.cells[2] == f"{plan.balance_after.mean:.3f}"


def test_a_plan_can_lose_time() -> None:
    """8 experts get all tokens, so that no replicas are enough."""
    ids = np.broadcast_to(np.arange(8), (25 * 64, 2, 8))
    result = trimtab.analyze(RoutingTrace.from_sequences(np.split(ids, 25), num_experts=128), trimtab.Run(ranks=16))
    assert planned_row(result)["max_over_mean_mean"] > 1.5
    assert "1.00" not in placements_table(result.analysis).rows[-1].cells


def test_one_rank_needs_no_plan() -> None:
    assert "plan" not in trimtab.analyze(random_trace(1), trimtab.Run(ranks=1)).figures()["placements"]["strategies"]


def test_parts_of_a_large_step_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = synthesize(num_sequences=96, sequence_length=4096, num_layers=8, num_experts=64, top_k=8, zipf=1.0)
    trimtab.write_trace(trace, tmp_path / "large.parquet")
    assert trace.expert_ids.nbytes > ROW_GROUP_BYTES
    whole = trimtab.analyze(trace, trimtab.Run(ranks=8))
    monkeypatch.setattr(analyze_module, "PLANNED_BYTES", trace.expert_ids.nbytes // 2)
    monkeypatch.setattr(analyze_module, "ROW_GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(analyze_module, "MOST_BYTES", trace.expert_ids.nbytes // 2)
    part = trimtab.analyze(trace, trimtab.Run(ranks=8))
    assert placements_table(part.analysis).rows[-1].name == "a plan for each micro-step, of 48 of 96 sequences"
    assert planned_row(part)["expert_time_lost"] == pytest.approx(planned_row(whole)["expert_time_lost"], abs=0.01)
    # Of a file, without reading all of it.
    from_file = trimtab.analyze(tmp_path / "large.parquet", trimtab.Run(ranks=8))
    assert from_file.analysis.estimate is None
    assert planned_row(from_file) == planned_row(trimtab.analyze(trace, trimtab.Run(ranks=8)))


def test_what_counts_tell_is_said_before_anything_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(0)
    said: list[str] = []

    def stop(*_: Any, **__: Any) -> None:
        raise InterruptedError

    analysis = trimtab.analyze(trace, trimtab.Run(ranks=4)).analysis
    monkeypatch.setattr(analyze_module, "planned_loads", stop)
    with pytest.raises(InterruptedError):
        trimtab.analyze(trace, trimtab.Run(ranks=4), first=said.append)
    (text,) = said
    assert text.startswith(f"On 4 ranks the busiest computes {analysis.total.max_over_mean.mean:.2f} times the mean")
    assert "plan for each micro-step" not in text
