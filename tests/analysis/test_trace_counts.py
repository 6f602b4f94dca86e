"""Counting a trace in chunks, or in merged shards, equals counting it token by token."""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.traces import odd_trace
from trimtab import InputError, RoutingTrace, TraceReader, write_trace
from trimtab.analysis import TraceCounts, count_shard, count_trace, merge, plan_counts
from trimtab.analysis import trace_counts as module
from trimtab.analysis.balance import by_size
from trimtab.planner import pack_by_length
from trimtab.trace import store, synthesize

FEW = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def plain_counts(trace: RoutingTrace, group_S: np.ndarray, groups: int) -> np.ndarray:
    counts = np.zeros((groups, trace.num_layers, trace.num_experts), np.int64)
    for s, group in enumerate(group_S):
        for (_, layer, _), expert in np.ndenumerate(trace.sequence(s)):
            if group >= 0 and expert != trace.no_route:
                counts[group, layer, expert] += 1
    return counts


def plain_micro_steps(trace: RoutingTrace, ranks: int, budget: int) -> tuple[np.ndarray, list[int]]:
    """Micro-step of every sequence, steps one after another, and the step of every micro-step."""
    group = np.full(trace.num_sequences, -1)
    steps: list[int] = []
    for step in np.unique(trace.steps[trace.sequence_lengths > 0]):
        mine = np.flatnonzero(trace.steps == step)
        schedule = pack_by_length(trace.sequence_lengths[mine], num_ranks=ranks, token_budget=budget)
        group[mine] = schedule.micro_step + len(steps)
        steps += [int(step)] * schedule.num_micro_steps
    return group, steps


@FEW
@given(
    seed=st.integers(0, 10**6), ranks=st.sampled_from([1, 2, 4]), budget=st.integers(12, 60), files=st.integers(1, 3)
)
def test_counting_in_chunks_equals_counting_at_once(
    seed: int, ranks: int, budget: int, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 64)
    trace = odd_trace(seed)
    folder = tmp_path / f"{seed}-{ranks}-{budget}-{files}"
    edges = np.linspace(0, trace.num_sequences, files + 1).astype(int)
    for index in range(files):
        write_trace(trace.part(edges[index], edges[index + 1]), folder / f"{index}.parquet")
    counted = count_trace(TraceReader(folder), ranks=ranks, token_budget=budget)
    micro_step_S, steps = plain_micro_steps(trace, ranks, budget)
    assert counted.step_M.tolist() == steps
    assert np.array_equal(counted.counts_MLE, plain_counts(trace, micro_step_S, len(steps)))
    numbers = [counted.domains.index(name) if name in counted.domains else -1 for name in trace.domains.tolist()]
    assert np.array_equal(counted.counts_DLE, plain_counts(trace, np.array(numbers), len(counted.domains)))
    tokens = [trace.sequence_lengths[trace.domains == name].sum() for name in counted.domains]
    assert tokens == sorted(tokens, reverse=True)
    assert counted.unknown_routes == np.count_nonzero(trace.expert_ids[:, :, 0] == trace.no_route)
    assert counted.num_tokens == trace.num_tokens
    assert counted.step_starts.tolist() == [*np.flatnonzero(np.diff(steps, prepend=-1)), len(steps)]


def test_each_chunk_counts_its_own_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence is a chunk, and uses an expert of its own."""
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 1)
    ids = [np.full((length, 1, 1), expert) for expert, length in enumerate((3, 1, 2))]
    trace = RoutingTrace.from_sequences(ids, num_experts=4, steps=[0, 1, 2], domains=["a", "b", "c"])
    counted = count_trace(read(trace, tmp_path), ranks=1)
    assert counted.counts_MLE[:, 0].tolist() == [[3, 0, 0, 0], [0, 1, 0, 0], [0, 0, 2, 0]]
    assert counted.domains == ("a", "c", "b")
    assert counted.counts_DLE[:, 0].tolist() == [[3, 0, 0, 0], [0, 0, 2, 0], [0, 1, 0, 0]]


def test_other_sizes_equal_direct_counts(tmp_path: Path) -> None:
    trace = synthesize(num_sequences=88, sequence_length=8, num_layers=2, num_experts=8, top_k=2, zipf=0.9)
    counted = count_trace(read(trace, tmp_path), ranks=2, token_budget=32)
    assert (counted.parts, counted.num_micro_steps) == (4, 11)
    assert set((counted.counts_FLE[:, 0].sum(axis=1) // 2).tolist()) == {16}
    assert np.array_equal(counted.counts_MLE, plain_counts(trace, plain_micro_steps(trace, 2, 32)[0], 11))
    found = {size.factor: size for size in by_size(counted, [2, 4])}
    assert list(found) == [0.25, 0.5, 1, 2, 4, 8, None]
    for factor, size in found.items():
        assert size.tokens == (704 if factor is None else 64 * factor)
        width = 44 if factor is None else int(factor * 4)
        groups = [counted.counts_FLE[g * width : (g + 1) * width].sum(axis=0) for g in range(44 // width)]
        assert size.micro_steps == len(groups)
        for ranks, balance in size.by_ranks.items():
            loads_GLR = np.array(groups).reshape(len(groups), 2, ranks, -1).sum(axis=-1)
            ratios = (loads_GLR.max(axis=-1) / loads_GLR.mean(axis=-1)).ravel()
            assert balance.max_over_mean.mean == pytest.approx(np.mean(ratios))
            assert balance.max_over_mean.worst == pytest.approx(max(ratios))


def read(trace: RoutingTrace, folder: Path) -> TraceReader:
    """The trace as a file."""
    write_trace(trace, folder / "t.parquet")
    return TraceReader(folder / "t.parquet")


def test_the_default_budget_fits_the_longest_sequence(tmp_path: Path) -> None:
    trace = synthesize(num_sequences=2, sequence_length=9000, num_layers=1, num_experts=4, top_k=1, zipf=0.0)
    reader = read(trace, tmp_path)
    assert count_trace(reader, ranks=1).token_budget == 9000
    assert count_trace(reader, ranks=1, micro_steps=1).num_micro_steps == 1
    with pytest.raises(InputError, match="9000 tokens doesn't fit"):
        count_trace(reader, ranks=1, token_budget=8192)


def test_only_the_last_steps_are_kept_above_the_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = odd_trace(5, sequences=60, steps=4, unknown=0.0)
    reader = read(trace, tmp_path)
    whole = count_trace(reader, ranks=2, token_budget=12)
    last_two = np.flatnonzero(whole.step_M >= 2)
    monkeypatch.setattr(module, "COUNT_BYTES", 4 * 2 * 8 * len(last_two))
    part = count_trace(reader, ranks=2, token_budget=12)
    assert (part.steps, part.skipped_steps) == ([2, 3], 2)
    assert np.array_equal(part.counts_MLE, whole.counts_MLE[last_two])
    assert part.num_tokens == trace.sequence_lengths[trace.steps >= 2].sum()


def test_one_chosen_step_ignores_the_others(tmp_path: Path) -> None:
    """Budget and domains depend only on the chosen step."""
    lengths, names = [50, 5, 5, 3, 3, 40], ["code", "maths", "maths", "code", "code", "chat"]
    ids = [np.tile([[[0, 1]]], (length, 1, 1)) for length in lengths]
    trace = RoutingTrace.from_sequences(ids, num_experts=4, steps=[0, 1, 1, 1, 1, 2], domains=names)
    counted = count_trace(read(trace, tmp_path), ranks=2, micro_steps=1, step=1)
    # 16 tokens on two ranks, and a tenth to spare.
    assert (counted.token_budget, counted.num_micro_steps, counted.steps) == (9, 1, [1])
    assert (counted.num_sequences, counted.num_tokens, sorted(counted.lengths.tolist())) == (4, 16, [3, 3, 5, 5])
    assert counted.domains == ("maths", "code")
    assert counted.counts_DLE.tolist() == [[[10, 10, 0, 0]], [[6, 6, 0, 0]]]


def test_the_budget_is_that_of_the_largest_step(tmp_path: Path) -> None:
    ids = [np.tile([[[0, 1]]], (10, 1, 1))] * 6
    trace = RoutingTrace.from_sequences(ids, num_experts=4, steps=[0, 1, 1, 1, 1, 2])
    counted = count_trace(read(trace, tmp_path), ranks=2, micro_steps=1)
    # 40 tokens on two ranks, and a tenth to spare.
    assert (counted.token_budget, counted.num_micro_steps) == (22, 3)


def test_every_part_could_run_alone() -> None:
    """32 sequences of 4 tokens in two micro-steps."""
    packed = [(np.arange(32), np.arange(32) % 2, 2)]

    def parts(ranks: int, budget: int, most: int) -> int:
        return module._parts(packed, np.full(32, 4), ranks, budget, most)

    assert [parts(2, budget, 99) for budget in (16, 15, 8, 7)] == [4, 2, 2, 1]
    assert [parts(ranks, 16, 99) for ranks in (4, 5, 8, 9)] == [4, 2, 2, 1]
    assert [parts(2, 16, most) for most in (8, 7, 4, 3)] == [4, 2, 2, 1]


def test_the_longest_sequences_are_divided_first() -> None:
    lengths = np.array([1, 2, 3, 4, 9])
    assert module._divide(np.array([0, 0, 0, 0, 1]), lengths, 2).tolist() == [0, 1, 1, 0, 0]


def test_small_domains_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_DOMAINS", 2)
    trace = odd_trace(3, sequences=40)
    counted = count_trace(read(trace, tmp_path), ranks=1, token_budget=100)
    names, tokens = np.unique(np.repeat(trace.domains, trace.sequence_lengths), return_counts=True)
    assert counted.domains == (names[tokens.argmax()], "all others")
    group = np.where(trace.domains == counted.domains[0], 0, 1)
    assert np.array_equal(counted.counts_DLE, plain_counts(trace, group, 2))


def test_errors_for_empty_traces_unknown_routes_and_missing_steps(tmp_path: Path) -> None:
    empty = RoutingTrace.from_sequences([np.zeros((0, 1, 1), np.int64)], num_experts=4)
    unknown = RoutingTrace.from_sequences([np.full((3, 1, 1), 255)], num_experts=4)
    for trace, words in ((empty, "is empty"), (unknown, "no token has a recorded route")):
        with pytest.raises(InputError, match=words):
            count_trace(read(trace, tmp_path), ranks=1)
    with pytest.raises(InputError, match="no step 7 with tokens; it has steps 0 to 1"):
        count_trace(read(odd_trace(0), tmp_path), ranks=1, step=7)


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
