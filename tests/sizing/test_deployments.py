"""Sizes of a rollout: the formula against an event simulation, and the search against all sizes, computed plainly."""

from __future__ import annotations

import heapq
import importlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import trimtab
from helpers.calls import called
from trimtab.api.size_rollout import RolloutSizing
from trimtab.array_type import Array
from trimtab.cli.main import main
from trimtab.cluster import ModelSpec, load_cluster
from trimtab.cluster.operations import OperationCosts
from trimtab.report.rollout_sizing import engine_settings
from trimtab.sizing.deployments import SEQUENCES, colocated_seconds, token_seconds
from trimtab.sizing.expert_times import DRAWS
from trimtab.trace import RoutingTrace, synthesize, write_trace

# A folder with afd-plugin's source.
AFD_PLUGIN = os.environ.get("AFD_PLUGIN", "")
MODEL = ModelSpec(
    "small", num_experts=8, top_k=2, hidden_size=4096, expert_width=8192, moe_layers=3, dense_layers=1,
    dense_width=8192, vocab_size=50_000, attention_heads=32, cache_width=2048, cache_heads=8,
)  # fmt: skip


def some_trace(steps: int = 2, zipf: float = 1.2) -> RoutingTrace:
    made = synthesize(num_sequences=48, sequence_length=40, num_layers=3, num_experts=8, top_k=2, zipf=zipf)
    return replace(made, steps=np.repeat(np.arange(steps), 48 // steps).astype(np.int32))


def size(trace: RoutingTrace | None = None, **changes: Any) -> RolloutSizing:
    fixed: dict[str, Any] = {"gpus": 6, "context": 4000, "token_ms": 20} | changes
    return called(trimtab.size_rollout, trace or some_trace(), **{"model": MODEL, "slots": 1} | fixed)


def simulated_s(
    attention: float, expert_L: Array, exchange: float, outer: float, micro_batches: int, *, colocated: bool = False
) -> float:
    """Period of a token: stages that serve first come first, one at a time, and micro-batches that never end."""
    stages = "attention", "there", "attention" if colocated else "experts", "back"
    path = [(stages[k], (attention, exchange, experts, exchange)[k]) for experts in expert_L for k in range(4)]
    path[0] = ("attention", attention + outer)
    rounds, skipped, free = 14, 4, dict.fromkeys(stages, 0.0)
    queue = [(0.0, batch, batch, 0) for batch in range(micro_batches)]
    ends, number = [0.0] * (rounds + 1), micro_batches
    while queue:
        arrival, _, batch, done = heapq.heappop(queue)
        stage, seconds = path[done % len(path)]
        free[stage] = max(arrival, free[stage]) + seconds
        done, number = done + 1, number + 1
        if done % len(path) == 0:
            ends[done // len(path)] = max(ends[done // len(path)], free[stage])
        if done < rounds * len(path):
            heapq.heappush(queue, (free[stage], number, batch, done))
    return (ends[rounds] - ends[skipped]) / (rounds - skipped)


@settings(max_examples=80)
@given(
    experts=some.floats(0.2, 5), exchange=some.floats(0, 2), outer=some.floats(0, 1.5), layers=some.integers(32, 60),
    micro_batches=some.integers(2, 4),
)  # fmt: skip
def test_the_formula_is_that_of_an_event_simulation(
    experts: float, exchange: float, outer: float, layers: int, micro_batches: int
) -> None:
    even_L = np.full(layers, experts)
    uneven_L = experts * np.random.default_rng(layers).uniform(0.75, 1.25, layers)
    for expert_L, beside, exactness in ((even_L, outer, 0.02), (even_L, 0.0, 1e-9), (uneven_L, outer, 0.1)):
        found = token_seconds(np.array(1.0), expert_L, np.array(exchange), np.array(beside), micro_batches)
        assert found == pytest.approx(simulated_s(1.0, expert_L, exchange, beside, micro_batches), rel=exactness)
    for number in (1, 2):
        found = colocated_seconds(np.array(1.0), even_L, np.array(exchange), np.array(outer), number)
        simulated = simulated_s(1.0, even_L, exchange, outer, number, colocated=True)
        assert found == pytest.approx(simulated, rel=1e-9)


def test_enough_micro_batches_keep_the_busier_side_from_waiting() -> None:
    found = size(cluster="h20x8").best(colocated=False)
    assert found is not None
    least = found.least_micro_batches
    one = found.attention_s + found.expert_s + 2 * found.exchange_s
    assert least == pytest.approx(one / max(found.attention_s, found.expert_s))
    # The paper's case, equal times of both sides.
    equal = replace(found, expert_s=found.attention_s)
    assert equal.least_micro_batches == pytest.approx(2 * (1 + found.exchange_s / found.attention_s))


def plain_best(result: RolloutSizing, colocated: bool, copies: int, token_s: float) -> float:
    """Tokens a second and GPU of the best of all sizes: every batch on its own, with a loop over layers and draws."""
    cluster, best = load_cluster("h100x8", ranks=8), 0.0
    times, experts = result.search.times, MODEL.num_experts
    most_bytes, wide, hidden = 0.9 * cluster.device_bytes, 2, MODEL.hidden_size
    expert_s = {}
    # One rank has each expert, and none twice.
    for ranks in (2, 4) if copies else (1, 2, 4):
        slots_LP = times.slots_LP(ranks, copies, 8)
        per_rank = slots_LP.shape[1] // ranks
        seconds = []
        for counts_DLE in times.counts_PDLE:
            layers = []
            for layer, slots_P in enumerate(slots_LP):
                busiest = []
                for draw in range(DRAWS):
                    loads = []
                    for rank in range(ranks):
                        load = 0.0
                        for expert in slots_P[rank * per_rank : (rank + 1) * per_rank]:
                            rows = counts_DLE[draw, layer, expert] / np.count_nonzero(slots_P == expert)
                            tiles = np.ceil(rows / 16) * 16
                            compute = tiles * 2 * MODEL.expert_parameters / cluster.expert_flops
                            read = MODEL.expert_bytes / cluster.memory_bytes_per_s
                            passes = rows * 5 * (hidden + MODEL.expert_width) * wide / cluster.memory_bytes_per_s
                            load += (cluster.copy_s + max(compute, read) + passes) if rows else 0.0
                        loads.append(load)
                    busiest.append(max(loads))
                layers.append(np.mean(busiest))
            seconds.append(layers)
        expert_s[ranks] = np.array(seconds)

    def product_s(parameters: float, tokens: float, tp: int) -> float:
        read = parameters * wide / tp / cluster.memory_bytes_per_s
        return max(read, 2 * parameters * tokens / tp / cluster.dense_flops)

    def block_s(tokens: float, tp: int, exchanges: int) -> float:
        read = tokens * 2048 * 4000 * wide / tp / cluster.memory_bytes_per_s
        compute = tokens * 2 * 2 * hidden * 4000 / tp / cluster.attention_flops
        passes = cluster.layer_s + tokens * 20 * hidden * wide / cluster.memory_bytes_per_s
        exchange = cluster.dispatch_s + tokens * 2 * (tp - 1) / tp * hidden * wide / cluster.node_bytes_per_s
        return product_s(4 * hidden**2, tokens, tp) + max(read, compute) + passes + (exchanges * exchange) * (tp > 1)

    for ranks, table in expert_s.items():
        slots = experts // ranks + copies
        expert_bytes = slots * 3 * MODEL.expert_bytes
        for attention in [ranks] if colocated else range(ranks, 6 - ranks + 1, ranks):
            for tp in (each for each in (1, 2, 4) if attention % each == 0):
                for m in (1, 2) if colocated else (2, 3, 4):
                    for sequences in SEQUENCES:
                        tokens = tp * sequences
                        weights = wide * (4 * 4 * hidden**2 + 3 * hidden * 8192 + 3 * hidden * 8 + 2 * 50_000 * hidden)
                        used = weights / tp + m * tokens * 4 * 2048 * 4000 * wide / tp
                        if used + colocated * expert_bytes > most_bytes or expert_bytes > most_bytes:
                            continue
                        attention_s = block_s(tokens, tp, 1) + product_s(hidden * 8, tokens, tp)
                        outer = block_s(tokens, tp, 2) + product_s(3 * hidden * 8192, tokens, tp)
                        outer += product_s(50_000 * hidden, tokens, tp)
                        outer += tokens * 12 * 50_000 / tp / cluster.memory_bytes_per_s
                        total = attention * sequences
                        # All are on one node: a token goes once to each rank that has one of its experts.
                        without = min((1 - 2 / 8) ** (8 / ranks), (1 - 1 / ranks) ** 2)
                        sent = total * ranks * (1 - without) * hidden * wide
                        sent *= (ranks - 1) / ranks if colocated else 1
                        exchange = cluster.dispatch_s + sent / ranks / cluster.dispatch_node_bytes_per_s
                        spent = 0.0
                        for layer in range(3):
                            own = np.interp(total, times.tokens_P, table[:, layer])
                            first = attention_s + (outer if layer == 0 else 0.0)
                            if colocated:
                                spent += max(m * first, first + exchange) + max(m * own, own + exchange)
                            else:
                                spent += max(m * max(first, own, exchange), first + own + 2 * exchange)
                        if spent <= token_s:
                            gpus = attention + (0 if colocated else ranks)
                            best = max(best, total * m / spent / gpus)
    return best


# The last one is limited by memory.
@pytest.mark.parametrize("token_ms", [2, 20, 1000])
def test_the_search_finds_the_best_of_all_sizes(token_ms: int) -> None:
    result = size(token_ms=token_ms)
    for colocated in (True, False):
        for copies in (0, 1):
            expected = plain_best(result, colocated, copies, token_ms / 1e3)
            same = [each for each in result.deployments if (each.colocated, each.copies) == (colocated, copies)]
            assert (same[0].tokens_per_s_per_gpu if same else 0.0) == pytest.approx(expected, rel=1e-9)


def test_limits_hold_and_sizes_are_those_of_the_connector() -> None:
    result = size(gpus=12, token_ms=2)
    for found in result.deployments:
        assert found.token_s <= 2e-3
        assert max(found.attention_bytes, found.expert_bytes) <= 0.9 * 80e9
        assert found.gpus <= 12
        assert found.attention_ranks % found.expert_ranks == 0 <= found.attention_idle < 1
        assert found.attention_ranks % found.tp == 0 <= found.expert_idle < 1
    looser = size(gpus=12, token_ms=4)
    assert looser.deployments[0].worth >= result.deployments[0].worth


def test_copies_of_hot_experts_help_where_routing_is_skewed() -> None:
    times = size(some_trace(zipf=2.5)).search.times
    costs = OperationCosts.of(load_cluster("h100x8", ranks=8), MODEL)
    (before_PL, uneven_before), (after_PL, uneven_after) = (
        times.table(costs, times.slots_LP(8, copies, 8), 8) for copies in (0, 2)
    )
    assert uneven_after[-1] < 0.8 * uneven_before[-1]
    assert (after_PL[-1] < before_PL[-1]).all()
    # Copies are placed by the step before.
    trace = some_trace(zipf=2.5)
    first = size(trace.select(np.flatnonzero(trace.steps == 0))).search.times
    np.testing.assert_array_equal(times.slots_LP(8, 2, 8), first.slots_LP(8, 2, 8))
    # The same step's own loads do at least as well on average.
    hindsight = size(some_trace(steps=1, zipf=2.5)).search.times
    assert hindsight.table(costs, hindsight.slots_LP(8, 2, 8), 8)[1][-1] <= 1.1 * uneven_after[-1]


def test_money_decides_between_kinds() -> None:
    cheap = size(cluster="h20x8", expert_cluster="h100x8", gpu_hour=1.0, expert_gpu_hour=100.0)
    separate = cheap.best(colocated=False)
    assert separate is not None
    hours = separate.attention_ranks * 1.0 + separate.expert_ranks * 100.0
    assert separate.tokens_per_money == pytest.approx(separate.tokens_per_s * 3600 / hours)
    colocated = cheap.best(colocated=True)
    assert colocated is not None
    assert colocated.cluster == colocated.expert_cluster == "h20x8"
    assert colocated.tokens_per_money == pytest.approx(colocated.tokens_per_s * 3600 / colocated.gpus)
    assert cheap.answer.startswith("Colocate: disaggregation does not pay")
    dear = size(cluster="h20x8", expert_cluster="h100x8", gpu_hour=100.0, expert_gpu_hour=1.0).best(colocated=True)
    assert dear is not None
    assert dear.cluster == "h100x8"


def test_settings_are_what_the_plugin_accepts() -> None:
    result = size(gpus=12)
    best = result.best(colocated=False)
    assert best is not None
    found = replace(best, tp=2, attention_ranks=6, expert_ranks=3)
    commands = engine_settings(found, "some/model", 8)
    lines = [line for line in commands if "vllm serve some/model" in line]
    assert "--data-parallel-size 3 --tensor-parallel-size 2" in lines[0]
    assert "--data-parallel-size 3 --tensor-parallel-size 1" in lines[1]
    for role, line in zip(("attention", "ffn"), lines, strict=True):
        config = json.loads(line.split("--additional-config ")[1].strip("'"))["afd"]
        assert set(config) == {"role", "connector", "host", "port", "num_attention_ranks", "num_ffn_ranks"}
        assert config["role"] == role
        assert (config["num_attention_ranks"], config["num_ffn_ranks"]) == (found.attention_ranks, found.expert_ranks)
    assert sum("--afd-role" in line for line in commands) == 2
    # SGLang has one node a side.
    assert not any("--afd-role" in line for line in engine_settings(found, "some/model", 4))
    assert result.commands == engine_settings(best, "small", 8)


@pytest.mark.skipif(not AFD_PLUGIN, reason="AFD_PLUGIN should name a folder with afd-plugin's source at 2e4378f2")
@pytest.mark.parametrize("gpus", [2, 6, 12])
def test_the_plugin_accepts_the_settings(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(AFD_PLUGIN)
    read = importlib.import_module("afd_plugin.config").afd_config_from_mapping
    lines = [line for line in size(gpus=gpus).commands if "vllm serve" in line]
    for role, line in zip(("attention", "ffn"), lines, strict=True):
        config = json.loads(line.split("--additional-config ")[1].strip("'"))["afd"]
        read(config, expected_role=role)
        with pytest.raises(ValueError, match="multiple"):
            read(config | {"num_attention_ranks": 2 * config["num_attention_ranks"] + 1, "num_ffn_ranks": 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ms": 1, "context": 4_000_000, "gpus": 2}, "no deployment of at most 2 GPUs"),
        ({"token_ms": 1}, "--token-ms 1: no deployment of at most 6 GPUs is as fast; the fastest takes 1.1"),
        ({"model": replace(MODEL, expert_width=1 << 20)}, "of weights; no deployment of at most 6 GPUs"),
        ({"micro_batches": [5]}, r"micro_batches: \[5\] should be of 2, 3, 4"),
        ({"gpu_hour": -1.0}, "gpu_hour: -1.0 should be a price, 0 or more"),
        ({"expert_gpu_hour": 2.0}, "expert_gpu_hour: needs gpu_hour and expert_cluster"),
        ({"gpu_hour": 2.0, "expert_cluster": "h20x8"}, "with an expert_cluster it needs expert_gpu_hour"),
        ({"gpus": 0}, "gpus: 0 should be a whole number of at least 1"),
        ({"context": 0}, "context: 0 should be a whole number of at least 1"),
        ({"step": 9}, "there is no step 9"),
        ({"cluster": "h100x9"}, "h100x9"),
        ({"model": "deepseek-v3"}, "is not of model deepseek-v3"),
    ],
)
def test_bad_input_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(trimtab.InputError, match=message) as error:
        size(**changes)
    assert "\n" not in str(error.value)


def test_one_gpu_has_no_separate_ranks() -> None:
    result = size(gpus=1)
    assert result.best(colocated=False) is None
    assert result.answer.startswith("Colocate: attention and experts on different ranks don't fit")
    assert result.commands == []


def test_the_command_prints_what_the_function_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = synthesize(num_sequences=16, sequence_length=32, num_layers=2, num_experts=128, top_k=8, zipf=1.0)
    write_trace(made, tmp_path / "trace.parquet")
    words = ["rollout", str(tmp_path / "trace.parquet"), "--model", "qwen3-30b-a3b", "--gpus", "16"]
    assert main([*words, "--json", str(tmp_path / "out.json"), "--context", "3000"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    result = trimtab.size_rollout(tmp_path / "trace.parquet", trimtab.Run(model="qwen3-30b-a3b"), gpus=16, context=3000)
    assert json.loads((tmp_path / "out.json").read_text()) == result.figures()
    assert result.answer in shown
    assert result.answer in repr(result)
    # Without --context, that of the trace: all tokens are responses.
    assert trimtab.size_rollout(
        made, trimtab.Run(model="qwen3-30b-a3b"), gpus=2
    ).search.attention.context == pytest.approx(16.5)
