"""Recorded parts of steps, scaled to whole steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.comparison_cases import some_case, some_trace
from trimtab import InputError, RoutingTrace, read_trace, write_trace
from trimtab.api.run import Run
from trimtab.api.steps import read_steps, spread_layers
from trimtab.cluster import load_model
from trimtab.planner import SequenceCounts
from trimtab.policies import POLICIES
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.resampling import RecordedStep, ResampledTrace, resample, whole_steps
from trimtab.simulator.step import StepSettings
from trimtab.simulator.token_replay import count_transfers
from trimtab.trace import synthesize
from trimtab.trace.store import open_trace


def recorded(lengths: list[int], prompts: list[int], tokens: int) -> RecordedStep:
    ids = [np.tile(np.array([0, 1], np.uint8), (length, 1, 1)) for length in lengths]
    trace = RoutingTrace.from_sequences(ids, num_experts=4, prompt_hashes=np.array(prompts, np.uint64))
    return RecordedStep(SequenceCounts.from_trace(trace), trace, tokens)


@given(st.data())
def test_prompts_are_drawn_with_all_their_answers(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    prompts = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    step = recorded(lengths, prompts, data.draw(st.integers(1, 400)))
    found = step.prompts()
    assert sorted(np.concatenate(found).tolist()) == list(range(count))
    for prompt in found:
        hashes = {prompts[index] for index in prompt.tolist()}
        assert len(hashes) == 1
        assert len(prompt) == (1 if hashes == {0} else prompts.count(hashes.pop()))
    index_S = resample(step, found, np.random.default_rng(data.draw(st.integers(0, 99))))
    times = Counter(index_S.tolist())
    for prompt in found:
        assert len({times[index] for index in prompt.tolist()}) == 1
    largest = max(sum(lengths[index] for index in prompt.tolist()) for prompt in found)
    total = sum(lengths[index] for index in index_S.tolist())
    # The nearest number of tokens, but one prompt at least.
    assert abs(total - step.tokens) <= largest / 2 or len(index_S) == len(next(p for p in found if index_S[0] in p))


def test_halves_share_no_prompt_and_are_the_same_in_every_drawing_of_a_seed() -> None:
    steps = [recorded([3] * 20, [1 + index // 2 for index in range(20)], 300)] * 2
    for seed in range(5):
        first, second = (whole_steps(steps, seed, half=half) for half in (0, 1))
        for (_, one), (_, other) in zip(first, second, strict=True):
            mine, others = ({index // 2 for index in each.index_S.tolist()} for each in (one, other))
            # Of 10 prompts.
            assert not mine & others
            assert len(mine) == len(others) == 5
        assert [t.index_S.tolist() for _, t in whole_steps(steps, seed)] == [
            t.index_S.tolist() for _, t in whole_steps(steps, seed)
        ]
    # The two steps are drawn independently.
    assert whole_steps(steps, 0)[0][1].index_S.tolist() != whole_steps(steps, 0)[1][1].index_S.tolist()


def test_transfers_of_drawn_sequences_are_those_of_their_copies() -> None:
    trace = some_trace(steps=(0,) * 8, longer=20)
    case = some_case(trace, token_budget=60)
    index_S = np.random.default_rng(0).integers(trace.num_sequences, size=3 * trace.num_sequences)
    copied = trace.select(index_S)
    larger = replace(case, sequences=SequenceCounts.from_trace(copied), traces=(copied,), measured=1, token_budget=120)
    plan = simulate_policy(larger, "trimtab").plan
    wanted, found = count_transfers(plan, copied), count_transfers(plan, ResampledTrace(trace, index_S))
    for one, other in zip(wanted, found, strict=True):
        assert np.array_equal(one, other)
    # Some micro-steps stand for all.
    near_MLR, far_MLR, counted_ML = count_transfers(plan, copied, most_rows=1)
    assert counted_ML.any(axis=1).sum() == 1
    for part, whole in zip((near_MLR, far_MLR), wanted[:2], strict=True):
        assert np.array_equal(part[counted_ML], whole[counted_ML])
        assert not part[~counted_ML].any()


def test_one_of_several_equal_micro_steps_stands_for_all() -> None:
    """Tokens share transfers in all of them as in the one that is counted."""
    trace = some_trace().select(np.zeros(16, np.int64))
    case = some_case(trace, token_budget=trace.num_tokens // 16, traces=(trace,))
    whole, part = (
        simulate_policy(replace(case, settings=StepSettings(counted_rows=rows)), "static") for rows in (1 << 62, 1)
    )
    assert whole.plan.num_micro_steps == 4
    estimated = simulate_policy(replace(case, traces=()), "static")
    for name in ("near_MLR", "far_MLR"):
        found, counted, guessed = (getattr(each.simulated.work, name).sum(axis=2) for each in (part, whole, estimated))
        assert found == pytest.approx(counted, rel=1e-9, abs=0)
        assert guessed.sum() < counted.sum()


def test_a_trace_keeps_its_prompts_and_its_sampled_part(tmp_path: Path) -> None:
    trace = replace(
        synthesize(num_sequences=4, sequence_length=3, num_layers=1, num_experts=4, top_k=2, zipf=0.5),
        prompt_hashes=np.array([7, 7, 0, 2**64 - 1], np.uint64),
        sampled=0.25,
    )
    write_trace(trace, tmp_path / "t.parquet")
    found = read_trace(tmp_path / "t.parquet")
    assert found.prompt_hashes.tolist() == trace.prompt_hashes.tolist()
    assert found.sampled == 0.25
    steps = read_steps(open_trace(tmp_path / "t.parquet"), Run())
    assert steps.is_scaled
    assert steps.recorded[0].tokens == 4 * 12
    assert not read_steps(open_trace(tmp_path / "t.parquet"), Run(sampled=1.0)).is_scaled
    with pytest.raises(InputError, match="sampled parts can't be joined"):
        RoutingTrace.concatenate([trace, replace(trace, sampled=0.5)])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"step_tokens": 11}, "--step-tokens 11: step 0 of trace in memory has 12 tokens"),
        ({"sampled": 0.0}, "sampled: 0.0 should be above 0"),
        ({"sampled": 1.5}, "sampled: 1.5 should be above 0"),
        ({"sampled": float("nan")}, "sampled: nan should be above 0"),
        ({"sampled": 0.5, "step_tokens": 99}, "step_tokens: not allowed with argument sampled"),
        ({"step": 3}, "there is no step 3"),
        ({"steps": 2}, "--steps 2: trace in memory has 1 step"),
    ],
)
def test_wrong_scales_give_one_line(settings: dict[str, float], reason: str) -> None:
    trace = synthesize(num_sequences=4, sequence_length=3, num_layers=1, num_experts=4, top_k=2, zipf=0.5)
    with pytest.raises(InputError, match=reason):
        read_steps(open_trace(trace), Run(**settings))  # type: ignore[arg-type]


def test_the_option_wins_over_the_trace_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trace = replace(
        synthesize(num_sequences=4, sequence_length=3, num_layers=1, num_experts=4, top_k=2, zipf=0.5), sampled=0.5
    )
    with caplog.at_level("INFO", "trimtab"):
        assert read_steps(open_trace(trace), Run(sampled=0.1)).recorded[0].tokens == 120
        assert read_steps(open_trace(trace), Run(step_tokens=50)).recorded[0].tokens == 50
        assert read_steps(open_trace(trace), Run()).recorded[0].tokens == 24
    texts = [record.message for record in caplog.records]
    assert texts == [
        "--sampled is used; trace in memory says that 0.5 of each step was recorded",
        "--step-tokens is used; trace in memory says that 0.5 of each step was recorded",
    ]


def test_layers_stand_for_all_in_the_order_of_their_imbalance() -> None:
    trace = synthesize(num_sequences=32, sequence_length=16, num_layers=9, num_experts=8, top_k=2, zipf=1.0)
    steps = read_steps(open_trace(trace), Run())
    loads_LR = steps.recorded[0].counts.counts_SLE.sum(axis=0, dtype=int).reshape(9, 4, 2).sum(axis=2)
    order = np.argsort(loads_LR.max(axis=1) / loads_LR.mean(axis=1), kind="stable").tolist()
    assert spread_layers(steps, 4, 3).tolist() == sorted(order[place] for place in (1, 4, 7))
    assert spread_layers(steps, 4, 99).tolist() == list(range(9))
    fewer = steps.with_layers(np.array([2, 5]))
    assert np.array_equal(fewer.last.expert_ids, np.sort(trace.expert_ids[:, [2, 5]], axis=-1))
    assert fewer.last.layer_indices.tolist() == [2, 5]
    counted = SequenceCounts.from_trace(fewer.last)
    assert np.array_equal(counted.counts_SLE, fewer.recorded[0].counts.counts_SLE)


def test_a_scaled_case_has_halves_and_one_budget() -> None:
    trace = synthesize(num_sequences=40, sequence_length=32, num_layers=2, num_experts=16, top_k=4, zipf=1.0)
    steps = read_steps(open_trace(trace), Run(step_tokens=12_800))
    run = Run(ranks=4, micro_steps=4, slots=2, recompute_granularity="none")
    case = steps.case(run, replace(load_model("qwen3-30b-a3b"), num_experts=16, top_k=4))
    assert len(case.halves) == 2
    assert case.recorded == 40
    assert case.is_too_small
    assert {each.token_budget for each in (case, *case.halves)} == {case.token_budget}
    assert int(case.sequences.lengths.sum()) == 12_800
    permuted = case.with_permuted_experts(0)
    assert isinstance(permuted.halves[0].traces[0], ResampledTrace)
    outcome = simulate_policy(permuted, "static", POLICIES["static"])
    assert len(outcome.drawn_s) == 3
