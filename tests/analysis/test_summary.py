"""The sentences of an analysis are correct for all traces, and contain finite figures."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.trace_counts import random_counts, trace_counts_of
from trimtab.analysis import TraceCounts, analyze
from trimtab.analysis.analysis import figures
from trimtab.analysis.cost_estimate import CostEstimate, PermutedIds
from trimtab.analysis.fixed_placements import PlacementComparison, PlacementStrategy
from trimtab.analysis.summary import answer, cost_summary, layers_summary, notes
from trimtab.simulator.resampling import LEAST_SEQUENCES


@pytest.mark.parametrize(
    ("counts", "steps", "words"),
    [
        ([[[4, 4, 4, 4]]] * 4, None, "almost nothing to gain"),
        # A loss just above NEGLIGIBLE_LOSS.
        ([[[53, 47]], [[47, 53]]], None, "idle for 6% of"),
        ([[[8, 8, 0, 0]]] * 4, None, "placement based on the first half of the step would recover 100% of that, so"),
        ([[[8, 8, 0, 0]]] * 4, [0, 0, 1, 1], "placement based on the step before would recover 100%"),
        ([[[8, 8, 0, 0]]], None, "All tokens fit one micro-step"),
        (
            [[[9, 1, 1, 1]], [[1, 9, 1, 1]], [[1, 1, 9, 1]], [[1, 1, 1, 9]]] * 2,
            None,
            "would still be lost, since loads change",
        ),
    ],
)
def test_the_answer_for_given_counts(counts: Any, steps: Any, words: str) -> None:
    analysis = analyze(trace_counts_of(counts, steps), ranks=2)
    assert words in answer(analysis)
    assert ("almost nothing" in answer(analysis)) == ("almost nothing" in words)
    assert cost_summary(analysis) == ""
    assert layers_summary(analysis) == ""
    assert "nan" not in " ".join((answer(analysis), *notes(analysis)))


@pytest.mark.parametrize(
    ("past", "step", "in_sum", "words"),
    [
        (0.02, 0.02, 0.0, "step before would recover 95% of that, so a balancer that uses past loads is enough."),
        (0.2, 0.188, 0.0, "A placement based on the step before would recover 50% of that; 20% of expert"),
        (0.2, 0.02, 0.0, "95% of that if based on the step itself, and 50% if based on the step before, so known"),
        (0.05, 0.05, 0.01, "since loads change from micro-step to micro-step. A plan for each micro-step leaves 1.2%."),
        (0.3, 0.2, 0.09, "20% of expert time would still be lost, since loads change from"),
        (0.3, 0.2, 0.11, "since some experts are too hot for 2 replicas per rank in equal shares."),
        (0.1, 0.2, 0.0, "A placement based on the step before would recover 75% of that; 10% of"),
    ],
)
def test_the_answer_depends_on_what_placements_recover(past: float, step: float, in_sum: float, words: str) -> None:
    analysis = analyze(trace_counts_of([[[9, 1, 1, 1]], [[1, 9, 1, 1]]], [0, 1]), ranks=2)
    ways = tuple(
        PlacementStrategy(knows, "", knows, 1.0, 1.0, lost, in_sum, 1 - lost / 0.4)
        for knows, lost in (("past", past), ("step", step), ("micro-step", 0.012))
    )
    assert words in answer(replace(analysis, placements=PlacementComparison(ways, "step", 2)))


@pytest.mark.parametrize(("permuted_s", "percent"), [(0.0, "0%"), (0.3, "15%")])
@pytest.mark.parametrize("sequences", [None, LEAST_SEQUENCES, LEAST_SEQUENCES - 1])
@pytest.mark.parametrize("layers", [1, 4])
def test_the_cost_in_seconds(permuted_s: float, percent: str, sequences: int | None, layers: int) -> None:
    analysis = analyze(trace_counts_of([[[9, 1, 1, 1]], [[1, 9, 1, 1]]]), ranks=2)
    estimate = CostEstimate("h100x8", "m", 2.0, 1.5, 0.25, {}, (0.5,), layers, sequences=sequences)
    permuted = PermutedIds(5, 0.1, step_s=2.0, lost_s=permuted_s)
    text = cost_summary(replace(analysis, estimate=estimate, permuted=permuted))
    assert (
        f"0.5 s of a step of 2 s (25%; of it, waiting 12%; {percent} with permuted expert ids) on h100x8 with m" in text
    )
    assert ("scaled from 1 to 4 MoE layers" in text) == (layers == 4)
    assert ("too few sequences" in text) == (sequences == LEAST_SEQUENCES - 1)


FEW = "much of the imbalance is random"


@pytest.mark.parametrize(
    ("counted", "is_noted", "words"),
    [
        (trace_counts_of([[[63] * 4]] * 2), True, "with 63 for the mean expert it makes few"),
        (trace_counts_of([[[64] * 4]] * 2), False, "for the mean expert it makes few"),
        (trace_counts_of([[[24, 0], [12, 12]]], top_k=1, unknown_routes=12), True, "25.0% of (token, layer) pairs"),
        (trace_counts_of([[[24, 0], [12, 12]]], top_k=1), True, "12 tokens for the mean expert"),
        (trace_counts_of([[[24, 8]]]), False, "tokens for the mean expert"),
        # 16 tokens for each of two experts are enough, if every token has both of them.
        (trace_counts_of([[[20, 12]]], top_k=2, num_tokens=16), False, FEW),
        (trace_counts_of([[[20, 10]]], top_k=2, num_tokens=15), True, FEW),
    ],
)
def test_notes_on_unknown_routes_and_few_tokens(counted: TraceCounts, is_noted: bool, words: str) -> None:
    assert (words in " ".join(notes(analyze(counted, ranks=2)))) == is_noted


@pytest.mark.parametrize(
    ("busiest_L", "names", "says"),
    [
        ([20, 21, 22, 21], [3, 4, 7, 9], "Layer 7 loses most of all: 2"),
        ([20, 21, 22, 21] * 2, range(10, 18), "All layers lose about the same: the worst quarter (12, 16) has 2"),
        ([19, 15, 15, 15, 15, 15, 15, 19], range(8), "Some layers lose more than others: the worst quarter (0, 7) has"),
        ([10, 10, 10, 10, 10, 100, 10, 10], range(8), "Some layers lose more than others: the worst quarter (5, "),
    ],
)
def test_the_worst_layers_have_the_models_numbers(busiest_L: list[int], names: list[int], says: str) -> None:
    counts = np.full((4, len(busiest_L), 4), 10)
    counts[:, :, 0] = busiest_L
    counted = trace_counts_of(counts, layer_indices=np.array(names))
    assert layers_summary(analyze(counted, ranks=4)).startswith(says)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    micro_steps=st.integers(1, 5),
    layers=st.integers(1, 3),
    ranks=st.sampled_from([1, 2, 8]),
    steps=st.integers(1, 3),
)
def test_figures_are_finite_for_random_traces(seed: int, micro_steps: int, layers: int, ranks: int, steps: int) -> None:
    counts = random_counts(seed, micro_steps, layers)
    if not counts.any():
        return
    analysis = analyze(trace_counts_of(counts, np.arange(micro_steps) * steps // micro_steps), ranks=ranks)
    content = json.dumps(figures(analysis), allow_nan=False)
    assert json.loads(content)["micro_steps"] == micro_steps
    text = " ".join((answer(analysis), layers_summary(analysis), *notes(analysis)))
    assert "nan" not in text
    assert text.startswith("On " if ranks > 1 else "One rank")
    assert ("Permuted ids" in text) == (ranks > 1)
