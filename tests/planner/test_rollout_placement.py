"""Placements for a rollout engine: renewed step by step, judged on later steps, and read by SGLang's own loader."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from helpers.framework_batches import MODEL, miles, random_sequences
from helpers.planned_steps import Step, make
from helpers.rank_tests import runs_on_ranks
from trimtab import InputError, RoutingTrace
from trimtab.array_type import Array
from trimtab.errors import RanksDisagreeError
from trimtab.observe import Observer
from trimtab.planner.placement.serving_placement import fill_slots, slot_loads
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.rollout_placement import RolloutPlacement, count_steps, judge_placements, refresh_after
from trimtab.trace import PRESETS, synthesize_preset
from trimtab.trace.store import MemoryReader

# Where SGLang's wheel is unpacked.
SGLANG = os.environ.get("SGLANG", "")
# Sequences of a step of `some_steps`.
HALVES = (range(20), range(20, 40))


def some_steps(steps: int = 3, drift: float = 0.3) -> RoutingTrace:
    preset = replace(PRESETS["qwen3-30b-math"], drift=drift, zipf=(1.0, 1.2))
    return synthesize_preset(
        preset, num_sequences=40, mean_length=24, max_length=48, num_layers=2, num_experts=16, top_k=4,
        num_steps=steps, seed=0,
    )  # fmt: skip


def of_step(trace: RoutingTrace, step: int) -> RoutingTrace:
    return trace.select(np.flatnonzero(trace.steps == step))


def plain_max_over_mean(trace: RoutingTrace, slots_LP: list[list[int]], ranks: int) -> float:
    """The mean over layers and 32 parts of sequences taken in turn; every row is counted on its own."""
    found = []
    for part in range(32):
        for layer, slots_P in enumerate(slots_LP):
            loads, places = [0.0] * ranks, {e: [p for p, s in enumerate(slots_P) if s == e] for e in range(16)}
            for sequence in range(part, trace.num_sequences, 32):
                start, end = trace.sequence_starts[sequence : sequence + 2]
                for expert in trace.expert_ids[start:end, layer].ravel().tolist():
                    for place in places[expert]:
                        loads[place * ranks // len(slots_P)] += 1 / len(places[expert])
            if sum(loads):
                found.append(max(loads) * ranks / sum(loads))
            else:
                found.append(1.0)
    return float(np.mean(found))


def test_the_map_of_a_step_is_written_with_the_weights_of_the_next(tmp_path: Path) -> None:
    trace, path = some_steps(), tmp_path / "map.json"
    layers = int(trace.layer_indices.max()) + 1
    placement = RolloutPlacement(path, ranks=4, redundant=4, num_layers=layers + 1)
    assert placement.make(0) == {}
    assert placement.sync(0) is None
    maps = []
    for step in range(3):
        for part in np.array_split(np.arange(of_step(trace, step).num_sequences), 3):
            placement.add(of_step(trace, step).select(part))
        figures = placement.make(step)
        # Its own step's weights are older than the routing.
        assert placement.sync(step) is None
        assert placement.sync(step + 1) == path
        rows = json.loads(path.read_text())["physical_to_logical_map"]
        assert len(rows) == layers + 1
        assert all(set(row) == set(range(16)) and len(row) == 20 for row in rows)
        maps.append([rows[layer] for layer in trace.layer_indices])
        own = plain_max_over_mean(of_step(trace, step), maps[step], 4)
        assert figures["placement_max_over_mean"] == pytest.approx(own)
        if step:
            held_out = plain_max_over_mean(of_step(trace, step), maps[step - 1], 4)
            assert figures["placement_held_out"] == pytest.approx(held_out)
            assert held_out > own
    assert maps[0] != maps[1]


def test_a_step_that_fails_is_not_counted_with_the_next(tmp_path: Path) -> None:
    trace, maps = some_steps(2), []

    def fail(counts: Array) -> Array:
        raise RuntimeError("a rank is gone")

    for name, has_failed in (("one", True), ("other", False)):
        placement = RolloutPlacement(tmp_path / f"{name}.json", ranks=4)
        if has_failed:
            placement.add(of_step(trace, 0))
            with pytest.raises(RuntimeError, match="a rank is gone"):
                placement.make(0, fail)
            assert placement.sync(1) is None
        placement.add(of_step(trace, 1))
        placement.make(1)
        written = placement.sync(2)
        assert written is not None
        maps.append(written.read_text())
    assert maps[0] == maps[1]


def test_wrong_numbers_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"only if it is named \*.json"):
        RolloutPlacement(tmp_path / "map.pt", ranks=4)
    for name in ("ranks", "ranks_per_node", "num_layers"):
        numbers: dict[str, Any] = {"ranks": 4, name: 0}
        with pytest.raises(InputError, match=f"{name}: it should be at least 1"):
            RolloutPlacement(tmp_path / "map.json", **numbers)
    with pytest.raises(InputError, match="redundant: it should be at least 0"):
        RolloutPlacement(tmp_path / "map.json", ranks=4, redundant=-1)
    placement = RolloutPlacement(tmp_path / "map.json", ranks=4, num_layers=1)
    placement.add(some_steps(1))
    placement.make(0)
    with pytest.raises(InputError, match="--num-layers is 1; the trace has decoder layer 1"):
        placement.sync(1)
    assert not (tmp_path / "map.json").exists()


def test_an_observer_makes_the_map_of_every_step(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    placement = RolloutPlacement(tmp_path / "map.json", ranks=2, redundant=2)
    with pytest.raises(InputError, match="2 ranks don't divide 8 experts and 3 redundant ones"):
        Observer(
            "slime", ranks=2, num_experts=8, placement=RolloutPlacement(tmp_path / "no.json", ranks=2, redundant=3)
        )
    with Observer("miles", ranks=2, model=MODEL, placement=placement) as observer:
        for step in range(2):
            observer.record(miles(random_sequences(rng, 12)), step)
            assert observer.flush(300)
        figures = observer.metrics()
    assert {"placement_max_over_mean", "placement_held_out"} <= {name.split("/")[-1] for name in figures}
    assert placement.sync(1) is None
    assert placement.sync(2) == tmp_path / "map.json"


def kept_in(totals: list[Array], counts: Array) -> Array:
    totals.append(counts)
    return counts


@runs_on_ranks(2)
def test_a_session_writes_the_map_of_all_ranks(tmp_path: Path) -> None:
    session, _, _ = make(slots_per_rank=2)
    step = Step(0)
    assert session.sync_placement(1) is None
    session.rollout_placement = RolloutPlacement(tmp_path / "map.json", ranks=2)
    # No plan yet.
    assert session.sync_placement(1) is None
    step.apply(session)
    written = session.sync_placement(2)
    assert written == (tmp_path / "map.json" if dist.get_rank() == 0 else None)
    if written:
        # Each rank takes its sequences in turn into the parts, from the first.
        alone, totals = RolloutPlacement(tmp_path / "alone.json", ranks=2), list[Array]()
        for rank in range(2):
            own = RolloutPlacement(tmp_path / "own.json", ranks=2)
            own.add(step.trace.select(step.schedule.sequences_of(rank)))
            own.make(1, partial(kept_in, totals))
        alone.add(step.trace)
        alone.make(1, lambda _: totals[0] + totals[1])
        alone.sync(2)
        assert (tmp_path / "map.json").read_text() == (tmp_path / "alone.json").read_text()
    # What one rank can't write fails on all of them, and the next call works.
    (tmp_path / "folder.json").mkdir(exist_ok=True)
    session.rollout_placement.path = tmp_path / "folder.json"
    step.apply(session)
    with pytest.raises(InputError, match=r"folder\.json"):
        session.sync_placement(2)
    no_space = mock.patch.object(RolloutPlacement, "sync", side_effect=OSError("no space left"))
    with no_space, pytest.raises((OSError, RuntimeError), match="no space left"):
        session.sync_placement(2)
    session.rollout_placement.path = tmp_path / "map.json"
    assert bool(session.sync_placement(2)) == (dist.get_rank() == 0)
    # Ranks that don't agree raise in place of a hang.
    if dist.get_rank():
        session.rollout_placement = None
    with pytest.raises(RanksDisagreeError, match="rollout_placement"):
        session.sync_placement(3)
    session.close()


def test_placements_are_judged_on_later_steps() -> None:
    trace = some_steps(4)
    steps = count_steps(MemoryReader(trace))
    assert [each.shape for each in steps] == [(32, 2, 16)] * 4
    for number, counts_MLE in enumerate(steps):
        assert counts_MLE.sum() == of_step(trace, number).expert_ids.size
    judged = judge_placements(steps, 20, 4, 4)
    assert len(judged.by_age) == 4
    assert judged.by_age[0] < min(judged.by_age[1:]) <= max(judged.by_age[1:]) < judged.usual
    # Each pair on its own: the placement of step 1, in step 3, is one of the two of age 2.
    slots = [fill_slots(steps[step], 20, 4, 4) for step in range(2)]
    pairs = [max_over_mean(slot_loads(steps[step + 2], slots[step], 4)).mean() for step in range(2)]
    assert judged.by_age[2] == pytest.approx(np.mean(pairs))
    # Routing that does not change: later steps are like the first.
    same = judge_placements([steps[0]] * 3, 20, 4, 4)
    assert same.by_age == pytest.approx([same.by_age[0]] * 3)
    assert same.refresh_after is None
    halves = count_steps(MemoryReader(of_step(trace, 0)))
    assert [each.sum() for each in halves] == [of_step(trace, 0).select(half).expert_ids.size for half in HALVES]


def test_only_the_last_steps_count() -> None:
    trace = some_steps(7)
    steps = count_steps(MemoryReader(trace))
    assert [each.sum() for each in steps] == [of_step(trace, step).expert_ids.size for step in range(2, 7)]


@pytest.mark.parametrize(
    ("by_age", "expected"), [([1.0, 1.1, 1.2], 1), ([1.0, 1.1, 1.1005, 1.112], 2), ([1.0, 1.1, 1.1], None)]
)
def test_a_refresh_pays_from_one_percent(by_age: list[float], expected: int | None) -> None:
    ages = np.subtract.outer(np.arange(len(by_age)), np.arange(len(by_age))).T
    table_SS = np.where(ages < 0, np.nan, np.array(by_age)[ages])
    assert refresh_after(table_SS) == expected
    # Steps that are uneven by themselves don't matter.
    assert refresh_after(table_SS * np.linspace(1, 3, len(by_age))) == expected


@pytest.mark.skipif(not SGLANG, reason="SGLANG should name the folder of SGLang 0.5.23's unpacked wheel")
def test_sglangs_loader_reads_the_file(tmp_path: Path) -> None:
    """`compute_initial_expert_location_metadata` of release 0.5.23, whose settings come from a stand-in."""
    trace, path = some_steps(1), tmp_path / "map.json"
    placement = RolloutPlacement(path, ranks=4, redundant=4)
    placement.add(trace)
    placement.make(0)
    assert placement.sync(1) == path
    context: Any = ModuleType("sglang.srt.runtime_context")
    moe = SimpleNamespace(
        init_expert_location=str(path), ep_num_redundant_experts=4, ep_dispatch_algorithm="dynamic",
        moe_a2a_backend="none", ep_join_mode="none",
    )  # fmt: skip
    context.get_exec = lambda: SimpleNamespace(moe=moe)
    context.get_parallel = lambda: SimpleNamespace(ep_size=4, elastic_ep_initial_size=None, nnodes=1)
    context.get_device = lambda: SimpleNamespace(device="cpu")
    context.get_resources = SimpleNamespace
    file = Path(SGLANG) / "sglang" / "srt" / "eplb" / "expert_location.py"
    packages = {name: ModuleType(name) for name in ("sglang", "sglang.srt")}
    with mock.patch.dict(sys.modules, {**packages, context.__name__: context}):
        spec = importlib.util.spec_from_file_location("sglang_expert_location", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, {"sglang_expert_location": module}):
            spec.loader.exec_module(module)
    layers = int(trace.layer_indices.max()) + 1
    sizes = module.ModelConfigForExpertLocation(num_layers=layers, num_logical_experts=16)
    with mock.patch.object(module.ModelConfigForExpertLocation, "from_model_config", return_value=sizes):
        found = module.compute_initial_expert_location_metadata(None, moe_ep_rank=1)
    assert found.physical_to_logical_map.tolist() == json.loads(path.read_text())["physical_to_logical_map"]
    assert (found.num_layers, found.num_logical_experts, found.num_local_physical_experts) == (layers, 16, 5)
    copies = found.logical_to_all_physical_map_num_valid
    assert copies.sum(dim=1).tolist() == [20] * layers
    assert copies.min() == 1
