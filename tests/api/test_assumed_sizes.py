"""What commands assume where nobody states it: the size of a step, a past of a single step, checkpointing."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import trimtab
from helpers.calls import called
from trimtab.cluster import ModelSpec
from trimtab.planner import SequenceCounts
from trimtab.report.simulation import scale_note
from trimtab.simulator.resampling import RecordedStep, whole_steps
from trimtab.trace import RoutingTrace, synthesize

MODEL = ModelSpec.named("qwen3-30b-a3b")
RUN: dict[str, Any] = {"ranks": 4, "model": MODEL}


def part_of_a_step(sequences: int = 64) -> RoutingTrace:
    """8 tokens a sequence, far below one micro-step of 8,192 tokens on every rank."""
    return synthesize(num_sequences=sequences, sequence_length=8, num_layers=2, num_experts=128, top_k=8, zipf=1.0)


@pytest.mark.parametrize("command", ["analyze", "simulate", "advise"])
def test_a_part_of_a_step_is_scaled_to_one_full_micro_step(command: str) -> None:
    function, trace = getattr(trimtab, command), part_of_a_step()
    result = called(function, trace, **RUN, token_budget=1024)
    first = {"analyze": lambda: result.analysis.estimate, "advise": lambda: result.advice.case}.get(
        command, lambda: result.case
    )().assumed[0]
    assert first.startswith("Scaled from 512 recorded tokens to a step of 4,096, one full micro-step of every rank;")
    assert "--step-tokens" in first
    assert "--sampled 1" in first
    assert first in repr(result).splitlines()[1]
    # As if its size had been given, and not if it is, in any way.
    stated = called(function, trace, **RUN, token_budget=1024, step_tokens="4096")
    assert _seconds(stated) == _seconds(result)
    for size in ({"token_budget": 1024, "sampled": 1.0}, {"micro_steps": 2}):
        taken = called(function, trace, **RUN, **size)
        assert "Scaled" not in repr(taken)
        assert _seconds(taken) < _seconds(result)


def _seconds(result: Any) -> float:
    """Step time of `static`."""
    figures = result.figures()
    if "policies" in figures:
        return figures["policies"]["static"]["step_time_s"]
    estimate = figures.get("estimate") or figures["strategies"]["nothing"]["step_s"]
    return estimate.get("step_s", estimate.get("value"))


def test_each_case_of_a_sweep_is_scaled_to_its_own_ranks() -> None:
    result = trimtab.simulate(
        part_of_a_step(), trimtab.Run(model=MODEL, token_budget=512).sweep(ranks=(2, 4)), policies="static"
    )
    assert [int(case.case.sequences.lengths.sum()) for case in result.cases] == [1024, 2048]
    assert "a step of 1,024," in repr(result)
    assert "a step of 2,048," in repr(result)


def test_a_trace_that_states_its_part_or_fills_a_micro_step_is_not_scaled_further() -> None:
    trace = part_of_a_step()
    trace = RoutingTrace.from_sequences([trace.sequence(index) for index in range(64)], num_experts=128, sampled=0.5)
    half = trimtab.simulate(trace, trimtab.Run(**RUN), policies="static")
    assert int(half.case.sequences.lengths.sum()) == 1024
    full = trimtab.simulate(part_of_a_step(), trimtab.Run(token_budget=128, **RUN), policies="static")
    assert full.case.recorded is None
    assert not full.case.assumed


def test_a_single_scaled_step_has_another_drawing_as_its_past() -> None:
    result = trimtab.simulate(part_of_a_step(), trimtab.Run(token_budget=1024, **RUN), policies="eplb,trimtab")
    assert len(result.case.earlier) == 1
    assert result.case.knows_past
    assert result.case.past_is_drawn
    assert "balancers know another drawing of it" in scale_note(result.case)
    assert "times as fast as eplb" in repr(result)
    assert result.outcomes["eplb"].replicas_per_instance > 0
    drawn, past = result.case.sequences, result.case.earlier[0]
    assert drawn.lengths.sum() == past.lengths.sum()
    assert not np.array_equal(drawn.counts_SLE, past.counts_SLE)
    whole = trimtab.simulate(part_of_a_step(), trimtab.Run(token_budget=64, **RUN), policies="eplb")
    assert not whole.case.earlier
    assert not whole.case.past_is_drawn


@pytest.mark.parametrize("half", [0, 1])
def test_the_past_of_a_half_is_drawn_from_the_same_half(half: int) -> None:
    """So the correction of scaled steps holds for what a balancer gains from a past."""
    trace = part_of_a_step(40)
    step = RecordedStep(SequenceCounts.from_trace(trace), trace, 4096)
    (_, first), (_, second) = whole_steps([step, step], 3, half=half)
    (_, other), _ = whole_steps([step, step], 3, half=1 - half)
    assert set(first.index_S) == set(second.index_S)
    assert not set(first.index_S) & set(other.index_S)
    assert not np.array_equal(first.index_S, second.index_S)


def test_unknown_routes_stand_beside_the_first_figure() -> None:
    trace = part_of_a_step()
    ids = trace.expert_ids.copy()
    ids[: len(ids) // 10] = trace.no_route
    unknown = RoutingTrace.from_sequences(np.split(ids, 64), num_experts=128)
    for function in (trimtab.analyze, trimtab.simulate):
        assert "(10% of the routes are not recorded)" in repr(function(unknown, trimtab.Run(micro_steps=2, **RUN)))
        assert "not recorded" not in repr(function(trace, trimtab.Run(micro_steps=2, **RUN)))


def test_a_step_that_only_lacks_checkpointing_is_simulated_with_the_least_that_fits() -> None:
    trace = synthesize(num_sequences=64, sequence_length=1024, num_layers=2, num_experts=128, top_k=8, zipf=0.5)
    run: dict[str, Any] = {"ranks": 8, "model": MODEL, "token_budget": 8192, "groups": 2}
    without = trimtab.simulate(trace, trimtab.Run(recompute_granularity="none", **run), policies="trimtab")
    assert repr(without).count("Does not fit") == 1
    found = trimtab.simulate(trace, trimtab.Run(**run), policies="trimtab")
    (text,) = [text for text in found.case.assumed if "checkpointing" in text]
    pattern = r"Simulated with (\w+) activation .*, since the step does not fit without; --recompute-granularity none "
    name = re.match(pattern, text)
    assert name
    assert "Does not fit: EP" not in repr(found)
    given = trimtab.simulate(trace, trimtab.Run(recompute_granularity=name[1], **run), policies="trimtab")
    assert "checkpointing" not in repr(given)
    assert _seconds(given) == _seconds(found) > _seconds(without)
    # What comes before it does not fit.
    if name[1] == "full":
        assert "Does not fit" in repr(
            trimtab.simulate(trace, trimtab.Run(recompute_granularity="selective", **run), policies="trimtab")
        )


def test_where_checkpointing_is_not_enough_the_answer_says_what_is() -> None:
    trace = synthesize(num_sequences=16, sequence_length=1024, num_layers=2, num_experts=256, top_k=8, zipf=0.5)
    found = trimtab.simulate(
        trace, trimtab.Run(ranks=8, model="deepseek-v3", token_budget=2048, sampled=1.0), policies="static"
    )
    assert not found.case.assumed
    assert "Does not fit: EP 8 needs" in repr(found)
