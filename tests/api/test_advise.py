"""`trimtab.advise`: its figures, its recommendation, and that all functions take their seconds from one simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import trimtab
from helpers.calls import called
from trimtab import InputError, RoutingTrace
from trimtab.api.advise import ABOUT_AS_FAST, LEAST_GAIN, AdviceResult
from trimtab.cluster import ModelSpec
from trimtab.report.advice import advice_table, advice_tiles, cost_table, waterfall, ways_text
from trimtab.simulator.draws import Estimate
from trimtab.simulator.strategies import NOTHING, STRATEGIES
from trimtab.trace import PRESETS, synthesize, synthesize_preset

MODEL = ModelSpec("small", num_experts=16, top_k=4, hidden_size=2048, expert_width=768, moe_layers=4, vocab_size=1000)
SETTING: dict[str, Any] = {"model": MODEL, "ranks": 4, "ranks_per_node": 2, "micro_steps": 4}


def some_steps(steps: int = 3, sequences: int = 64, **changes: Any) -> RoutingTrace:
    return synthesize_preset(
        replace(PRESETS["qwen3-30b-math"], zipf=(0.9, 1.2)), num_sequences=sequences, mean_length=512, max_length=1024,
        num_layers=2, num_experts=16, top_k=4, num_steps=steps, **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result() -> AdviceResult:
    return trimtab.advise(some_steps(), trimtab.Run(**SETTING), gpu_hour=2.5)


@pytest.fixture(scope="module")
def scaled() -> AdviceResult:
    return trimtab.advise(some_steps(), trimtab.Run(step_tokens=120_000, **SETTING))


def test_all_strategies_are_there_by_seconds(result: AdviceResult) -> None:
    seconds = [each.step_s.value for each in result.advice.strategies]
    assert seconds == sorted(seconds)
    assert {each.strategy.name for each in result.advice.strategies} == {each.name for each in STRATEGIES}
    figures = result.figures()
    assert figures == json.loads(json.dumps(figures, allow_nan=False))
    assert list(figures["strategies"]) == [each.strategy.name for each in result.advice.strategies]
    nothing = figures["strategies"]["nothing"]
    assert nothing["speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    for each in figures["strategies"].values():
        assert each["speedup"]["value"] == pytest.approx(nothing["step_s"]["value"] / each["step_s"]["value"])
        hours = each["step_s"]["value"] * 4 * 1000 / 3600
        assert each["gpu_hours_of_1000_steps"] == pytest.approx(hours)
        assert each["money_of_1000_steps"] == pytest.approx(2.5 * hours)
        assert each["of_even"] == pytest.approx(figures["even_s"] / each["step_s"]["value"])
        assert each["peak_bytes"] > 0
    assert 0 < figures["strategies"]["live by prediction"]["hit_rate"] <= 1
    assert figures["strategies"]["all"]["hit_rate"] is None


def test_the_simplest_strategy_that_is_about_as_fast_is_advised(result: AdviceResult) -> None:
    advice = result.advice
    times = {each.strategy.name: each.step_s.value for each in advice.strategies if each.fits}
    near = [each.name for each in STRATEGIES if times[each.name] <= (1 + ABOUT_AS_FAST) * min(times.values())]
    assert advice.chosen.strategy.name == advice.verdict == near[0]
    assert advice.answer.startswith(f"Use {near[0]} (")
    assert advice.answer.count(".") - advice.answer.count(". ") >= 1
    assert f"{advice.chosen.gain.value:.0%} less" in advice.answer
    assert advice.chosen.gain.value >= LEAST_GAIN


def test_the_waterfall_goes_from_nothing_to_the_strategy(result: AdviceResult, scaled: AdviceResult) -> None:
    for advice in (result.advice, scaled.advice):
        rows = waterfall(advice)
        assert rows[0].seconds == pytest.approx(advice.nothing.step_s.value, rel=1e-9)
        assert rows[-1].seconds == pytest.approx(advice.chosen.step_s.value, rel=1e-9)
        assert sum(row.seconds for row in rows[:-1]) == pytest.approx(rows[-1].seconds, rel=1e-9)


def test_analyze_simulate_and_advise_agree_to_the_last_digit(scaled: AdviceResult) -> None:
    scales: tuple[dict[str, Any], ...] = ({}, {"sampled": 0.5})
    for scale in scales:
        trace = some_steps()
        simulated = trimtab.simulate(trace, trimtab.Run(**scale, **SETTING), policies=["trimtab"])
        static = simulated.outcomes["static"].simulated
        estimate = trimtab.analyze(trace, trimtab.Run(**scale, **SETTING)).analysis
        assert estimate.estimate
        assert estimate.estimate.step_s == static.step_time_s
        assert estimate.estimate.causes_s == static.causes_s
        assert estimate.permuted.step_s == simulated.cases[0].permuted_s["static"]
        cost = 1 - simulated.cases[0].seconds("balanced") / static.step_time_s
        assert estimate.estimate.lost_part == simulated.cases[0].cost == cost > 0
        permuted_s = simulated.cases[0].permuted_s
        assert estimate.permuted.lost_part == pytest.approx(1 - permuted_s["balanced"] / permuted_s["static"])
        advised = trimtab.advise(trace, trimtab.Run(**scale, **SETTING), draws=1)
        assert advised.figures()["cost"] == cost
        assert advised.outcomes["nothing"].simulated.step_time_s == static.step_time_s
        assert advised.outcomes["all"].simulated.step_time_s == simulated.outcomes["trimtab"].simulated.step_time_s
    one = trimtab.analyze(some_steps(), trimtab.Run(step=1, **SETTING)).analysis.estimate
    assert one
    assert (
        one.step_s
        == trimtab.simulate(some_steps(), trimtab.Run(step=1, steps=1, **SETTING)).outcomes["static"].step_times_s[0]
    )


def test_intervals_hold_their_figures_and_seconds_are_of_the_whole_step(scaled: AdviceResult) -> None:
    advice = scaled.advice
    assert advice.draws == 2
    assert int(advice.case.sequences.lengths.sum()) == pytest.approx(120_000, rel=0.01)
    for each in advice.strategies:
        for estimate in (each.step_s, each.speedup, each.over_eplb):
            assert estimate
            assert estimate.low <= estimate.value <= estimate.high
    assert any(each.step_s.low < each.step_s.value for each in advice.strategies)


def test_an_interval_of_given_draws() -> None:
    found = Estimate.scaled([(10.0, 12.0, 14.0), (10.0, 13.0, 13.0)])
    assert found.value == 7.0
    # Halves differ by 2 once, so their mean varies by 1; the correction is 3.
    half = 2 * np.sqrt((1 + 0) / 2) + 3
    assert (found.low, found.high) == pytest.approx((7 - half, 7 + half))
    assert Estimate.measured([1.0, 2.0, 6.0]) == Estimate(3.0, 1.0, 6.0)


def test_one_step_has_no_history() -> None:
    told: list[str] = []
    calls: list[tuple[str, int, int]] = []
    result = trimtab.advise(
        some_steps(1), trimtab.Run(**SETTING), first=told.append, progress=lambda *each: calls.append(each)
    )
    names = {each.strategy.name for each in result.advice.strategies}
    assert names == {each.name for each in STRATEGIES if not each.needs_past}
    assert result.figures()["missing"] == ["renumber", "eplb", "live by prediction", "renumber, replicas"]
    assert all(each.over_eplb is None for each in result.advice.strategies)
    assert "over eplb" not in advice_table(result.advice).columns
    assert len(told) == 1
    assert told[0].startswith("first answer: a step takes nothing ")
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1][1] == calls[-1][2]


def test_too_few_sequences_have_no_verdict() -> None:
    result = trimtab.advise(some_steps(sequences=47), trimtab.Run(step_tokens=120_000, **SETTING))
    assert result.advice.verdict == "too few sequences"
    assert result.advice.answer.startswith("Too few sequences: 47 of a step were recorded; record 48 or more")
    assert all(each.over_eplb is None for each in result.advice.strategies)
    assert result.figures()["break_even_max_over_mean"] is None
    assert [name for name, *_ in advice_tiles(result.advice)] == ["Cost of imbalance", "Memory", "Basis"]
    # A whole step may have few.
    assert trimtab.advise(some_steps(sequences=16), trimtab.Run(**SETTING)).advice.verdict != "too few sequences"


def test_even_routing_is_not_worth_it() -> None:
    trace = synthesize(num_sequences=64, sequence_length=128, num_layers=2, num_experts=16, top_k=4, zipf=0)
    advice = trimtab.advise(trace, trimtab.Run(**SETTING)).advice
    assert advice.verdict == "not worth it"
    assert advice.chosen.strategy is NOTHING
    assert advice.answer.startswith("Not worth it: the best strategy, ")
    assert all(row.cells[1] == "0" for row in cost_table(advice).rows)
    assert advice.best.gain.value < LEAST_GAIN


def test_more_skew_than_break_even_pays(result: AdviceResult) -> None:
    break_even = result.advice.break_even
    assert break_even
    at, now = break_even
    assert at.low <= at.value <= at.high
    # Even routing, of max/mean 1, does not pay.
    assert 1 < at.value < now


def test_dispatcher_and_groups_change_the_case() -> None:
    found = trimtab.advise(some_steps(2), trimtab.Run(dispatcher="rows", groups=2, **SETTING), draws=1).advice
    assert not found.case.cluster.dispatch_forwards
    assert found.gpus == 8


def test_what_does_not_fit_names_settings_that_do() -> None:
    large = replace(MODEL, moe_layers=4000)
    advice = trimtab.advise(some_steps(1), trimtab.Run(**SETTING | {"model": large})).advice
    assert not advice.chosen.fits
    assert "it does not fit (" in advice.answer or advice.verdict == "not worth it"
    assert ways_text(advice).startswith(f"{advice.chosen.strategy.name} fits ")
    assert ways_text(trimtab.advise(some_steps(1), trimtab.Run(**SETTING)).advice) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ranks": 5, "gpu_hour": 0.0}, "--ranks 5 doesn't divide the 16 experts"),
        ({"gpu_hour": -1.0}, "gpu_hour: -1.0 should be a price, 0 or more"),
        ({"gpu_hour": float("nan")}, "gpu_hour: nan should be a price, 0 or more"),
        ({"token_budget": 64}, "micro_steps: not allowed with argument token_budget"),
        ({"draws": 0}, "draws: 0 should be a whole number of at least 1"),
        ({"dispatcher": "birds"}, "unknown dispatcher"),
        ({"sharding": "none"}, "unknown sharding"),
        ({"step": 9}, "there is no step 9"),
        ({"step_tokens": 5}, "--step-tokens 5: step 0 of trace in memory has"),
    ],
)
def test_wrong_arguments_give_one_line(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        called(trimtab.advise, some_steps(2), **SETTING | changes)
    assert "\n" not in str(caught.value)
