"""`trimtab trace export`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.import_items import kept
from trimtab.cli.main import main
from trimtab.planner.placement.serving_placement import count_parts, slot_loads
from trimtab.planner.rollout_placement import count_steps, judge_placements
from trimtab.trace import PRESETS, RoutingTrace, TraceReader, read_trace, synthesize_preset, write_trace
from trimtab.trace.formats import megatron
from trimtab.trace.formats.records import ImportOptions


@pytest.fixture
def trace(tmp_path: Path) -> RoutingTrace:
    made = synthesize_preset(
        PRESETS["qwen3-30b-math"], num_sequences=20, mean_length=20, max_length=40, num_layers=3, num_experts=16,
        top_k=4, num_steps=2, seed=0,
    )  # fmt: skip
    # MoE layers 1, 2 and 4 of a model with five.
    write_trace(replace(made, layer_indices=np.array([1, 2, 4], made.layer_indices.dtype)), tmp_path / "trace.parquet")
    return read_trace(tmp_path / "trace.parquet")


def export(folder: Path, form: str, *options: str) -> int:
    files = [str(folder / "trace.parquet"), "-o", str(folder / "out.json")]
    return main(["trace", "export", *files, "--to", form, *options])


def test_a_step_for_megatron(tmp_path: Path, trace: RoutingTrace) -> None:
    assert export(tmp_path, "megatron", "--step", "1") == 0
    records = kept(megatron.read(tmp_path / "out.json", ImportOptions()))
    second = trace.select(np.flatnonzero(trace.steps == 1))
    assert 0 < len(records) < trace.num_sequences
    np.testing.assert_array_equal(np.concatenate([record.ids for record in records]), second.expert_ids)


def test_placement_for_sglang(tmp_path: Path, trace: RoutingTrace) -> None:
    """A row for each decoder layer; the first P % E in order where there are no experts."""
    assert export(tmp_path, "sglang-placement", "--ranks", "4", "--redundant", "4", "--num-layers", "6") == 0
    content = json.loads((tmp_path / "out.json").read_text())
    assert list(content) == ["physical_to_logical_map"]
    slots = np.array(content["physical_to_logical_map"])
    assert slots.shape == (6, 20)
    # Without a number of layers, they end with the last of the trace.
    assert export(tmp_path, "sglang-placement", "--ranks", "4") == 0
    assert len(json.loads((tmp_path / "out.json").read_text())["physical_to_logical_map"]) == 5
    for layer, row in enumerate(slots):
        assert set(row.tolist()) == set(range(16))
        assert (row.tolist() == [*range(16), 0, 1, 2, 3]) == (layer in (0, 3, 5))


def test_a_placement_is_better_than_the_engine_s_own(
    tmp_path: Path, trace: RoutingTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(tmp_path, "sglang-placement", "--ranks", "4") == 0
    slots = np.array(json.loads((tmp_path / "out.json").read_text())["physical_to_logical_map"])[[1, 2, 4]]
    assert [sorted(row) for row in slots.tolist()] == [list(range(16))] * 3
    counts = count_parts(TraceReader(tmp_path / "trace.parquet"))
    after, before = (
        np.mean([load.max() / load.mean() if load.any() else 1 for load in slot_loads(counts, order, 4).reshape(-1, 4)])
        for order in (slots, np.array([range(16)] * 3))
    )
    assert after < before
    assert f"{after:.3f}; in the engine's own order {before:.3f}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("steps", "parts"), [((0, 1), 2), ((0,), 2), ((), 1)])
def test_placements_are_judged_on_routing_that_they_were_not_made_from(
    tmp_path: Path, trace: RoutingTrace, steps: tuple[int, ...], parts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the next step; of a trace with one step on its second half; of one sequence not at all."""
    kept_S = np.flatnonzero(np.isin(trace.steps, steps)) if steps else [0]
    write_trace(trace.select(kept_S), tmp_path / "trace.parquet")
    assert export(tmp_path, "sglang-placement", "--ranks", "4") == 0
    shown = " ".join(capsys.readouterr().out.split())
    if parts == 2:
        judged = judge_placements(count_steps(TraceReader(tmp_path / "trace.parquet")), 16, 4, 4)
        assert judged.by_age[1] > judged.by_age[0]
        age = "after 1 step" if len(steps) > 1 else "on the second half, if made from the first"
        assert f"held out {judged.by_age[1]:.3f} {age}; in the engine's own order {judged.usual:.3f}" in shown
    assert ("held out" in shown) == (parts == 2)
    assert ("a refresh pays not within 1 step" in shown) == (len(steps) > 1)


@pytest.mark.parametrize(
    ("form", "options", "expected"),
    [
        ("megatron", ["--ranks", "4"], "--ranks is for a placement"),
        ("sglang-placement", [], "needs --ranks"),
        ("sglang-placement", ["--ranks", "3"], "3 ranks don't divide 16 experts"),
        ("sglang-placement", ["--ranks", "4", "--num-layers", "4"], "the trace has decoder layer 4"),
        ("sglang-placement", ["--ranks", "4", "--ranks-per-node", "3"], "3 ranks a node don't divide 4 ranks"),
        ("sglang-placement", ["--ranks", "4", "--step", "0"], "--step is for traces"),
        ("megatron", ["--step", "9"], "no step 9"),
        ("sglang-placement", ["--ranks", "4", "-o", "{folder}/out.pt"], "named *.json"),
    ],
)
def test_input_errors(
    tmp_path: Path, trace: RoutingTrace, error_of: Callable[..., str], form: str, options: list[str], expected: str
) -> None:
    words = ["trace", "export", tmp_path / "trace.parquet", "--to", form, "-o", tmp_path / "out.json"]
    assert expected in error_of(*words, *(option.format(folder=tmp_path) for option in options))
    assert not list(tmp_path.glob("out.*"))
