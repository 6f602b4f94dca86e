"""Layouts: pipelines against an event loop, tensor and context parallelism against plain sums, memory by stage."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab
from helpers.comparison_cases import some_case
from helpers.simulated_steps import Case, cases
from trimtab import ClusterSpec, InputError, RoutingTrace, Schedule
from trimtab.cluster import Layout, ModelSpec
from trimtab.cluster.operations import OperationCosts, moved_bytes
from trimtab.planner.plan.step_times import dense_seconds, exchange_seconds
from trimtab.simulator import pipeline
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.memory import RankLoad, largest_micro_batch, rank_memory
from trimtab.simulator.pipeline import BUBBLE, Pipeline, one_forward_one_backward
from trimtab.simulator.resampling import cut_step, cut_trace
from trimtab.simulator.step import StepSettings
from trimtab.trace import PRESETS, synthesize_preset

QWEN = ModelSpec.named("qwen3-30b-a3b")
LARGE = ModelSpec.named("qwen3-235b-a22b")
DEEPSEEK = ModelSpec.named("deepseek-v3")
CLUSTER = ClusterSpec(16, 8)


def event_loop(forward_MP: np.ndarray, backward_MP: np.ndarray, send_M: np.ndarray, *, backward: bool) -> float:
    """A pipeline, event by event: stages take the next job of their 1F1B order as soon as its input is there."""
    num, stages = forward_MP.shape
    orders: list[list[tuple[str, int]]] = []
    for stage in range(stages):
        ahead = min(num, stages - 1 - stage) if backward else num
        order = [("F", m) for m in range(ahead)]
        for m in range(num if backward else 0):
            order += [("F", ahead + m)] if ahead + m < num else []
            order += [("B", m)]
        orders.append(order)
    arrived = {("F", m, 0): 0.0 for m in range(num)}
    events = [(0.0, stage) for stage in range(stages)]
    free, end = [0.0] * stages, 0.0
    while events:
        now, stage = heapq.heappop(events)
        if now < free[stage] or not orders[stage]:
            continue
        kind, m = orders[stage][0]
        input_at = arrived.get((kind, m, stage), math.inf)
        if input_at > now:
            continue
        orders[stage].pop(0)
        done = now + (forward_MP if kind == "F" else backward_MP)[m, stage]
        free[stage] = done
        end = max(end, done)
        heapq.heappush(events, (done, stage))
        last = stage == stages - 1
        to, at, what = (stage + 1, done + send_M[m], "F") if kind == "F" else (stage - 1, done + send_M[m], "B")
        if kind == "F" and last and backward:
            to, at, what = stage, done, "B"
        if 0 <= to < stages:
            arrived[what, m, to] = at
            heapq.heappush(events, (at, to))
    assert not any(orders)
    return end


@settings(max_examples=200)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32), st.booleans())
def test_a_pipeline_equals_an_event_loop(stages: int, num: int, seed: int, backward: bool) -> None:
    rng = np.random.default_rng(seed)
    seconds_2MP = rng.lognormal(0, 1, (2, num, stages)) * (rng.random((2, num, stages)) > 0.1)
    send_M = rng.lognormal(-2, 1, num) * rng.integers(0, 2)
    found = one_forward_one_backward(seconds_2MP, send_M, backward)
    assert found == pytest.approx(event_loop(seconds_2MP[0], seconds_2MP[1], send_M, backward=backward), rel=1e-12)
    # At least the busiest stage, and all stages of each micro-step.
    work_2MP = seconds_2MP if backward else seconds_2MP[:1]
    assert found >= work_2MP.sum(axis=(0, 1)).max() * (1 - 1e-12)
    assert found >= work_2MP.sum(axis=(0, 2)).max() * (1 - 1e-12)


def test_equal_stages_have_the_known_bubble() -> None:
    """(M + P - 1) (f + b), as of GPipe and 1F1B."""
    for stages, num in ((1, 5), (4, 1), (4, 16), (8, 3)):
        seconds_2MP = np.stack([np.full((num, stages), 1.0), np.full((num, stages), 2.0)])
        assert one_forward_one_backward(seconds_2MP, np.zeros(num), True) == pytest.approx(3 * (num + stages - 1))
        assert one_forward_one_backward(seconds_2MP, np.zeros(num), False) == pytest.approx(num + stages - 1)


@settings(max_examples=60)
@given(cases(), st.integers(1, 4))
def test_a_step_with_a_pipeline_is_its_passes_and_a_bubble(case: Case, pp: int) -> None:
    layers = max(pp, case.plan.num_layers)
    model = ModelSpec("any", num_experts=8, top_k=2, hidden_size=4, expert_width=4, moe_layers=layers)

    def run(pp: int) -> Any:
        from trimtab.simulator.step import simulate_step

        return simulate_step(
            case.plan, case.workload, case.lengths, case.costs, case.cluster, case.traits,
            before=case.before, settings=replace(case.settings, layout=Layout(pp=pp)), model=model,
        )  # fmt: skip

    one, many = run(1), run(pp)
    assert BUBBLE not in one.parts_s
    for step in (one, many):
        assert sum(step.parts_s.values()) == pytest.approx(step.step_time_s, rel=1e-9)
        assert sum(step.causes_s.values()) == pytest.approx(step.step_time_s, rel=1e-9)
    if pp > 1:
        assert many.parts_s[BUBBLE] >= -1e-9 * many.step_time_s
        if case.traits.known_at != "step":
            # The same work, in stages: all parts are those of one stage, divided.
            for part, seconds in one.parts_s.items():
                assert many.parts_s[part] == pytest.approx(seconds / pp, rel=1e-9, abs=1e-12), part


def test_the_slowest_stage_determines_a_long_step() -> None:
    """Of a model whose layers are all simulated, each stage has its own; else their mean."""
    layout = Layout(pp=2)
    model = replace(QWEN, moe_layers=4, moe_layer_indices=())
    whole = Pipeline.of(layout, model, 4, 1.0, np.zeros(1))
    assert whole.weights_PX.tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]
    part = Pipeline.of(layout, model, 2, 1.0, np.zeros(1))
    assert part.weights_PX.tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 1]]
    for each in (whole, part, Pipeline.of(Layout(pp=8), DEEPSEEK, 58, 0.3, np.zeros(1))):
        assert each.weights_PX.sum(axis=0) == pytest.approx(np.ones(each.weights_PX.shape[1]))


def test_layers_of_stages() -> None:
    assert Layout(pp=4).stages(QWEN)[0].tolist() == [12] * 4
    # 94 layers, embedding and head are 96: Megatron's recipe for 8 stages.
    assert Layout(pp=8).stages(LARGE)[0].tolist() == [11, *[12] * 6, 11]
    moe, dense = Layout(pp=16).stages(DEEPSEEK)
    assert dense.tolist() == [3, *[0] * 15]
    assert (moe + dense).tolist() == [3, *[4] * 14, 2]
    assert Layout(pp=4).stages(replace(QWEN, moe_layers=5, moe_layer_indices=()))[0].tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize("size", [32, 4096])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 4), (4, 2), (8, 4)])
@pytest.mark.parametrize("model", [QWEN, DEEPSEEK, ModelSpec.named("gpt-oss-120b")], ids=lambda model: model.name)
def test_dense_parts_of_ranks_that_share_sequences_equal_plain_sums(
    model: ModelSpec, tp: int, cp: int, size: int
) -> None:
    """Every rank of a group of `tp * cp` computes its part of whole sequences, and receives what the others have."""
    pieces, layout = tp * cp, Layout(tp=tp, cp=cp)
    costs, alone = (OperationCosts.of(CLUSTER, model, layout=each) for each in (layout, Layout()))
    # The ring is hidden behind attention where sequences are long.
    whole = np.array([4, 1, 8]) * size
    lengths = np.repeat(whole // pieces, pieces)
    schedule = Schedule(
        np.zeros(len(lengths), np.int32), np.tile(np.arange(pieces), 3).astype(np.int32), np.zeros(1, np.int32), pieces
    )
    inside_MR, outside_MR = dense_seconds(schedule, lengths, costs)
    tokens = sum(whole.tolist())
    square = alone.square_s * sum(n**2 for n in whole.tolist())
    square += alone.reach_s * float(alone.pairs_within_reach(whole).sum())
    assert inside_MR == pytest.approx(alone.layer_s + (alone.token_s * tokens + square) / pieces)
    assert outside_MR == pytest.approx(alone.outer_s + (
        alone.outer_token_s * tokens + alone.outer_square_s * sum(n**2 for n in whole.tolist())
        + alone.outer_reach_s * float(alone.pairs_within_reach(whole).sum())
    ) / pieces)  # fmt: skip
    inside_2MR, outside_2MR = exchange_seconds(schedule, lengths, costs)
    # Tokens that a rank of a tensor group lacks, gathered before and scattered after each block.
    width = model.hidden_size * model.weight_bytes
    lacking = tokens / cp * (tp - 1) / tp
    blocks = 2 if model.shared_width else 1
    tensor = blocks * 2 * lacking * width / CLUSTER.node_bytes_per_s
    # Keys and values of all other parts of the sequences, of the rank's own heads.
    rate = CLUSTER.node_bytes_per_s if pieces <= 8 else CLUSTER.network_bytes_per_s
    ring = (cp - 1) * tokens / cp * model.key_value_width / tp * model.weight_bytes / rate
    for way, times, factor in ((0, 1, 1.0), (1, 2, alone.dense_backward)):
        expected = tensor + max(0.0, times * ring - factor * square / pieces)
        assert inside_2MR[way] == pytest.approx(expected, rel=1e-9, abs=1e-15)
        expected = (2 * model.dense_layers + 1) * 2 * lacking * width / CLUSTER.node_bytes_per_s
        assert outside_2MR[way] == pytest.approx(expected, abs=1e-15)


def test_activations_that_are_computed_again_are_a_part_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[np.ndarray] = []

    def capture(seconds_2MP: np.ndarray, send_M: np.ndarray, has_backward: bool) -> float:
        if has_backward:
            captured.append(seconds_2MP)
        return float(one_forward_one_backward(seconds_2MP, send_M, has_backward))

    monkeypatch.setattr(pipeline, "one_forward_one_backward", capture)
    case = some_case()
    for checkpointing in (False, True):
        run_as = StepSettings(checkpointing=checkpointing, layout=Layout(pp=2))
        simulate_policy(replace(case, settings=run_as), "static")
    kept, again = captured[0], captured[len(captured) // 2]
    assert again[0] == pytest.approx(kept[0], rel=1e-6)
    assert again[1] == pytest.approx(kept[1] + kept[0], rel=0.2)
    assert again[1].sum() > kept[1].sum() + 0.8 * kept[0].sum()


def test_keys_and_values_of_a_token() -> None:
    assert QWEN.key_value_width == 2 * 4 * 128
    assert ModelSpec.named("gpt-oss-120b").key_value_width == 2 * 8 * 64
    # Latent attention, expanded to 128 heads of 192 and 128.
    assert DEEPSEEK.key_value_width == 128 * (192 + 128)


def test_the_exchange_is_part_of_the_step() -> None:
    case = some_case()
    even = replace(case, settings=StepSettings(layout=Layout(tp=2)))
    free, some = (simulate_policy(each, "static").simulated for each in (case, even))
    costs = OperationCosts.of(case.cluster, case.model, moe_layers=case.sequences.num_layers, layout=Layout(tp=2))
    assert costs.exchange_token_s > 0
    assert some.parts_s["attention"] > free.parts_s["attention"]
    assert some.step_time_s > free.step_time_s


def some_trace(sequences: int = 12) -> RoutingTrace:
    return synthesize_preset(
        PRESETS["qwen3-30b-math"], num_sequences=sequences, mean_length=64, max_length=256, num_layers=2, num_steps=1
    )


@given(st.integers(1, 9))
def test_pieces_have_all_tokens_and_routes(pieces: int) -> None:
    trace = some_trace()
    cut = cut_trace(trace, pieces)
    assert cut.num_sequences == pieces * trace.num_sequences
    assert cut.sequence_lengths.reshape(-1, pieces).sum(axis=1).tolist() == trace.sequence_lengths.tolist()
    assert np.ptp(cut.sequence_lengths.reshape(-1, pieces), axis=1).max() <= 1
    from trimtab.planner import SequenceCounts

    whole = SequenceCounts.from_trace(trace)
    counts, found = cut_step(whole, trace, pieces)
    assert isinstance(found, RoutingTrace)
    summed = counts.counts_SLE.reshape(-1, pieces, *counts.counts_SLE.shape[1:]).sum(axis=1)
    assert np.array_equal(summed, whole.counts_SLE)


def load_of(model: ModelSpec, ranks: int, tokens: int, micro_steps: int = 12, layers: int = 2) -> RankLoad:
    rows = np.full((micro_steps, layers, ranks), tokens * model.top_k)
    homes = np.full(ranks, layers * model.num_experts // ranks)
    return RankLoad(layers, homes, np.full((micro_steps, ranks), tokens), rows, np.zeros(ranks, np.int64))


@pytest.mark.parametrize("checkpointing", [False, "selective", True])
@pytest.mark.parametrize("pp", [1, 2, 8])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("model", [QWEN, LARGE, DEEPSEEK], ids=lambda model: model.name)
def test_memory_of_stages_equals_a_plain_sum(model: ModelSpec, tp: int, pp: int, checkpointing: Any) -> None:
    ranks, groups, tokens = 16, 2, 1024
    found = rank_memory(
        load_of(model, ranks, tokens), model, groups=groups, checkpointing=checkpointing, layout=Layout(tp=tp, pp=pp)
    )
    totals = []
    moe_P, dense_P = Layout(pp=pp).stages(model)
    for stage, (moe, dense) in enumerate(zip(moe_P.tolist(), dense_P.tolist(), strict=True)):
        expert = moe * model.num_experts // ranks * model.expert_parameters
        ends = (stage == 0) + (stage == pp - 1)
        matrices = moe * (model.moe_attention.parameters + model.shared_parameters)
        matrices += dense * (model.dense_attention.parameters + 3 * model.hidden_size * model.dense_width)
        weights = (matrices + ends * model.vocab_size * model.hidden_size) / tp + moe * model.router_parameters
        total = expert * (6 + 12 / groups) + weights * (6 + 12 / (ranks * groups / tp))
        again = checkpointing == "selective"
        # A group has half of the 12 micro-steps.
        in_flight = min(6, pp - stage)
        from trimtab.simulator.memory import attention_values

        kept = 2 * ((2 if again else 4) * model.hidden_size + attention_values(model))
        widths = 2 if again else 3
        token = kept + 2 * widths * model.shared_width + 8 * model.num_experts
        row = 2 * (2 * model.hidden_size + widths * model.expert_width)
        a_layer, a_dense = token + row * model.top_k, kept + 2 * widths * model.dense_width
        if checkpointing is True:
            held = in_flight * 2 * model.hidden_size * (moe + dense) + max(a_layer, a_dense * (model.dense_layers > 0))
        else:
            held = in_flight * (moe * a_layer + dense * a_dense)
        total += tokens * held + tokens * 2 * model.hidden_size * 2 * model.top_k
        if stage == pp - 1:
            total += tokens * (4 * model.hidden_size + 4 * model.vocab_size)
        totals.append(total)
    assert sum(found.values()) == pytest.approx(max(totals), rel=1e-6)


def test_stages_keep_only_micro_steps_that_there_are() -> None:
    few = load_of(QWEN, 16, 1024, micro_steps=3)
    many = load_of(QWEN, 16, 1024, micro_steps=30)
    kept = [rank_memory(each, QWEN, layout=Layout(pp=8))["activations"] for each in (few, many)]
    assert kept[1] > kept[0]


def test_more_stages_and_tensors_never_need_more_parameters() -> None:
    load = load_of(LARGE, 16, 1024)
    sizes = [rank_memory(load, LARGE, layout=Layout(pp=pp), sharding="ddp") for pp in (1, 2, 4, 8, 16)]
    for purpose in ("expert parameters", "expert gradients", "expert optimizer state"):
        assert [each[purpose] for each in sizes] == sorted((each[purpose] for each in sizes), reverse=True)
    dense = [rank_memory(load, LARGE, layout=Layout(tp=tp))["dense parameters"] for tp in (1, 2, 4, 8)]
    assert dense == sorted(dense, reverse=True)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("pp", [1, 8])
def test_the_largest_micro_batch_fits_and_one_more_token_does_not(pp: int, checkpointing: bool) -> None:
    load, same = load_of(LARGE, 32, 1000), {"checkpointing": checkpointing, "layout": Layout(tp=2, pp=pp)}
    device = 200e9 if pp == 1 else 80e9
    tokens, rows = largest_micro_batch(load, LARGE, device, groups=4, **same)  # type: ignore[arg-type]
    assert tokens > 0
    assert rows == tokens * LARGE.top_k
    for most, is_enough in ((tokens, True), (tokens + 1, False)):
        there = load_of(LARGE, 32, most)
        needs = rank_memory(there, LARGE, groups=4, **same)  # type: ignore[arg-type]
        assert (sum(needs.values()) <= device) == is_enough
    assert largest_micro_batch(load, LARGE, 1e9) == (0, 0)
    # Twice the rows on one rank leave less.
    rows_MLR = load.rows_MLR.copy()
    rows_MLR[0, :, 3] *= 2
    skewed = replace(load, rows_MLR=rows_MLR)
    assert largest_micro_batch(skewed, LARGE, device, groups=4, **same)[0] < tokens  # type: ignore[arg-type]


def test_what_a_move_costs_depends_on_sharding() -> None:
    weights = QWEN.expert_parameters
    assert moved_bytes(QWEN) == moved_bytes(QWEN, "ddp", 4) == 14 * weights
    assert moved_bytes(QWEN, "zero1", 4) == (2 + 3) * weights
    assert moved_bytes(QWEN, "fsdp", 4) == 3 * weights
    costs = [OperationCosts.of(CLUSTER, QWEN, groups=4, sharding=name).far_state_s for name in ("ddp", "zero1", "fsdp")]
    assert costs == pytest.approx([size * weights / CLUSTER.network_bytes_per_s for size in (14, 5, 3)])


def test_selective_recomputation_takes_a_little_more_time_and_less_memory() -> None:
    case = some_case()
    kept, some, all_ = (
        simulate_policy(replace(case, settings=StepSettings(checkpointing=each)), "static")
        for each in (False, "selective", True)
    )
    assert kept.simulated.step_time_s < some.simulated.step_time_s < all_.simulated.step_time_s
    assert kept.peak_bytes > some.peak_bytes > all_.peak_bytes


SETTING: dict[str, Any] = {"model": "qwen3-30b-a3b", "ranks": 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "--tp 3 doesn't divide the 32 attention heads of qwen3-30b-a3b; use 2 or 4"),
        ({"tp": 4, "cp": 4}, r"is 16, which doesn't divide the 8 ranks of a stage .*; their product should be 8"),
        ({"cp": 3}, "is 3, which doesn't divide the 8 ranks .*; their product should be 2 or 4"),
        ({"pp": 49}, "--pp 49: qwen3-30b-a3b has 48 layers; use 48 or less"),
        ({"pp": 0}, "pp: 0 should be a whole number of at least 1"),
        ({"recompute_granularity": "all"}, "unknown recompute_granularity all"),
    ],
)
def test_a_run_that_can_not_exist_is_refused(options: dict[str, Any], message: str) -> None:
    for function in (trimtab.simulate, trimtab.advise, trimtab.analyze):
        with pytest.raises(InputError, match=message):
            function(some_trace(), trimtab.Run(**SETTING | options))


def test_a_layout_of_ones_changes_nothing() -> None:
    trace = some_trace(32)
    plain = trimtab.simulate(trace, trimtab.Run(**SETTING), policies="static,trimtab")
    ones = trimtab.simulate(
        trace, trimtab.Run(tp=1, pp=1, cp=1, recompute_granularity="none", **SETTING), policies="static,trimtab"
    )
    for name in ("static", "trimtab", "balanced"):
        assert plain.outcomes[name].simulated.parts_s == ones.outcomes[name].simulated.parts_s
        assert plain.outcomes[name].memory == ones.outcomes[name].memory


def test_layouts_reach_all_functions() -> None:
    trace = some_trace(32)
    layout: dict[str, Any] = {"tp": 2, "cp": 2, "pp": 4, "groups": 2, "recompute_granularity": "full", "sampled": 1.0}
    simulated = trimtab.simulate(trace, trimtab.Run(**SETTING, **layout), policies="static")
    step = simulated.outcomes["static"].simulated
    assert simulated.figures()["settings"]["layout"] == {"tp": 2, "pp": 4, "cp": 2}
    assert simulated.case.sequences.num_sequences == 4 * 32
    assert step.parts_s[BUBBLE] > 0
    analysis = trimtab.analyze(trace, trimtab.Run(**SETTING, **layout)).analysis
    assert analysis.estimate
    assert analysis.estimate.causes_s == step.causes_s
    advised = trimtab.advise(trace, trimtab.Run(**SETTING, **layout))
    assert advised.outcomes["nothing"].simulated.step_time_s == step.step_time_s
    figures = advised.figures()
    assert figures["gpus"] == 8 * 2 * 4
    assert figures["layout"] == {"tp": 2, "pp": 4, "cp": 2}
    assert "bubble" in figures["waterfall_s"]
    for each in figures["strategies"].values():
        assert each["largest_micro_batch_tokens"] >= 0
