"""Counts of shards, merged, are those of one pass over the trace."""

from __future__ import annotations

import pickle
import runpy
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trimtab
from helpers.traces import odd_trace
from trimtab import InputError, TraceReader, write_trace
from trimtab.analysis import TraceCounts, count_shard, count_trace, merge, plan_counts
from trimtab.analysis.local_jobs import count_in_processes
from trimtab.cli.main import main
from trimtab.trace import store

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace of several steps and domains in three files of several chunks each."""
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 64)
    trace = odd_trace(3, sequences=40, steps=4)
    for index, edge in enumerate([0, 7, 30]):
        write_trace(trace.part(edge, [7, 30, 40][index]), tmp_path / "run" / f"{index}.parquet")
    return tmp_path / "run"


def assert_equal(one: TraceCounts, other: TraceCounts) -> None:
    for field in fields(TraceCounts):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        assert np.array_equal(mine, its), field.name
        assert getattr(mine, "dtype", None) == getattr(its, "dtype", None)


@pytest.mark.parametrize("shards", [1, 2, 6, 1000])
@pytest.mark.parametrize("settings", [{"ranks": 2}, {"ranks": 1, "micro_steps": 2}, {"ranks": 2, "step": 1}])
def test_merged_shards_equal_one_pass(shards: int, settings: dict[str, Any], folder: Path) -> None:
    plan = plan_counts(folder, shards=shards, **settings)
    chunks = len(list(TraceReader(folder).chunks()))
    assert chunks > 6
    assert len(plan.shards) == min(shards, chunks)
    assert max(map(len, plan.shards)) - min(map(len, plan.shards)) <= 1
    sent = pickle.loads(pickle.dumps(plan))
    order = np.random.default_rng(0).permutation(len(plan.shards))
    counts = (pickle.loads(pickle.dumps(count_shard(sent, shard))) for shard in order)
    assert_equal(merge(plan, counts), count_trace(TraceReader(folder), **settings))


def test_every_shard_is_merged_once(folder: Path) -> None:
    plan = plan_counts(folder, ranks=2, shards=3)
    counts = [count_shard(plan, shard) for shard in range(3)]
    for some in (counts[:2], [*counts, counts[0]], []):
        with pytest.raises(InputError, match=rf"counts of {len(some)} shards; the plan has 3"):
            merge(plan, some)
    whole = merge(plan, counts)
    assert_equal(whole, merge(plan, counts))


def test_a_file_that_is_gone_or_damaged_is_one_line(folder: Path) -> None:
    plan = plan_counts(folder, ranks=2, shards=3)
    (folder / "0.parquet").unlink()
    with pytest.raises(InputError, match=r"0\.parquet: "):
        count_shard(plan, 0)
    with pytest.raises(InputError, match=r"0\.parquet: "):
        count_in_processes(plan, 2, lambda done, total: None)


def test_several_jobs_give_the_figures_of_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = trimtab.analyze(folder, ranks=2).figures()
    calls: list[tuple[int, int]] = []
    assert trimtab.analyze(folder, ranks=2, jobs=2, progress=lambda *done: calls.append(done)).figures() == one
    assert calls == [(1, 2), (2, 2)]
    assert main(["analyze", str(folder), "--ranks", "2", "--jobs", "2", "--json", str(folder / "a.json")]) == 0
    assert "On 2 ranks" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(InputError, match="jobs: 0 should be"):
        trimtab.analyze(folder, ranks=2, jobs=0)


def test_the_example_counts_by_tasks_of_ray(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in, which pickles what tasks take and return, as Ray does."""

    def remote(function: Any) -> Any:
        return SimpleNamespace(remote=lambda *args: pickle.dumps(function(pickle.loads(args[0]), *args[1:])))

    ray = SimpleNamespace(put=pickle.dumps, get=pickle.loads, remote=remote, init=None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    example = runpy.run_path(str(EXAMPLES / "analyze_on_ray.py"))
    assert example["analyze"](str(folder), 2, shards=5).figures() == trimtab.analyze(folder, ranks=2).figures()
