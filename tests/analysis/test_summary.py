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
from trimtab.analysis import analyze
from trimtab.analysis.analysis import figures
from trimtab.analysis.fixed_placements import PlacementComparison, PlacementStrategy
from trimtab.analysis.summary import answer, cost_summary, layers_summary, notes


@pytest.mark.parametrize(
    ("counts", "steps", "words"),
    [
        ([[[4, 4, 4, 4]]] * 4, None, "almost nothing to gain"),
        (
            [[[8, 8, 0, 0]]] * 4,
            None,
            "placement based on the first half of the step would recover 100% of that, so a balancer",
        ),
        ([[[8, 8, 0, 0]]] * 4, [0, 0, 1, 1], "placement based on the step before would recover 100%"),
        ([[[8, 8, 0, 0]]], None, "All tokens fit one micro-step"),
        ([[[9, 1, 1, 1]], [[1, 9, 1, 1]], [[1, 1, 9, 1]], [[1, 1, 1, 9]]] * 2, None, "known routing is worth it"),
    ],
)
def test_the_answer_for_given_counts(counts: Any, steps: Any, words: str) -> None:
    analysis = analyze(trace_counts_of(counts, steps), ranks=2)
    assert words in answer(analysis)
    assert cost_summary(analysis) == ""
    assert layers_summary(analysis) == ""
    assert "nan" not in " ".join((answer(analysis), *notes(analysis)))


@pytest.mark.parametrize(("tokens", "words"), [(63, "with 63 for the mean expert it makes few"), (64, "of about 1.00")])
def test_the_last_note_depends_on_tokens_per_expert(tokens: int, words: str) -> None:
    analysis = analyze(trace_counts_of([[[tokens] * 4]] * 2), ranks=2)
    assert words in notes(analysis)[-1]


@pytest.mark.parametrize(
    ("past", "step", "in_sum", "words"),
    [
        (0.02, 0.02, 0.0, "step before would recover 95% of that, so a balancer that uses past loads is enough."),
        (0.2, 0.188, 0.0, "A placement based on the step before would recover 50% of that; 20% of expert"),
        (
            0.2,
            0.02,
            0.0,
            "95% of that if based on the step itself, and 50% if based on the step before, so known routing helps",
        ),
        (0.05, 0.05, 0.01, "since loads change from micro-step to micro-step. Only known routing can balance that."),
        (0.3, 0.2, 0.09, "20% of expert time would still be lost, since loads change from"),
        (0.3, 0.2, 0.09, "Planning from known routing is worth it."),
        (0.3, 0.2, 0.11, "since some experts are too hot for 2 replicas per rank in equal shares."),
        (0.1, 0.2, 0.0, "A placement based on the step before would recover 75% of that; 10% of"),
    ],
)
def test_the_answer_depends_on_what_placements_recover(past: float, step: float, in_sum: float, words: str) -> None:
    analysis = analyze(trace_counts_of([[[9, 1, 1, 1]], [[1, 9, 1, 1]]], [0, 1]), ranks=2)
    ways = tuple(
        PlacementStrategy(knows, "", knows, 1.0, 1.0, lost, in_sum, 1 - lost / 0.4)
        for knows, lost in (("past", past), ("step", step))
    )
    assert words in answer(replace(analysis, placements=PlacementComparison(ways, "step", 2)))


def test_a_loss_of_6_percent_is_not_negligible() -> None:
    """A loss between NEGLIGIBLE_LOSS and LARGE_LOSS."""
    text = answer(analyze(trace_counts_of([[[53, 47]], [[47, 53]]]), ranks=2))
    assert "idle for 6% of" in text
    assert "almost nothing" not in text


def test_notes_report_unknown_routes_and_few_tokens() -> None:
    few = analyze(trace_counts_of([[[24, 0], [12, 12]]], top_k=1, unknown_routes=12), ranks=2)
    text = " ".join(notes(few))
    assert "25.0% of (token, layer) pairs have no recorded route" in text
    assert "12 tokens for the mean expert" in text
    assert "tokens for the mean expert" not in " ".join(notes(analyze(trace_counts_of([[[24, 8]]]), ranks=2)))


def test_tokens_of_the_mean_expert_are_rows() -> None:
    """16 tokens for each of two experts are enough, if every token has both of them."""
    text = "much of the imbalance is random"
    assert text not in " ".join(notes(analyze(trace_counts_of([[[20, 12]]], top_k=2, num_tokens=16), ranks=2)))
    assert text in " ".join(notes(analyze(trace_counts_of([[[20, 10]]], top_k=2, num_tokens=15), ranks=2)))


def test_layers_have_the_models_numbers() -> None:
    counts = np.full((4, 4, 4), 10)
    counts[:, :, 0] = [20, 21, 22, 21]
    names = np.array([3, 4, 7, 9])
    assert layers_summary(analyze(trace_counts_of(counts, layer_indices=names), ranks=4)).startswith(
        "Layer 7 loses most of all: 2"
    )
    equal = np.concatenate([counts, counts], axis=1)
    text = layers_summary(analyze(trace_counts_of(equal, layer_indices=np.arange(8) + 10), ranks=4))
    assert text.startswith("All layers lose about the same: the worst quarter (12, 16) has 2")
    equal[:, :, 0] = [19, 15, 15, 15, 15, 15, 15, 19]
    assert layers_summary(analyze(trace_counts_of(equal), ranks=4)).startswith(
        "Some layers lose more than others: the worst quarter (0, 7) has 38%"
    )


def test_the_worst_layers_are_named() -> None:
    counts = np.full((4, 8, 4), 10)
    counts[:, 5, 0] = 100
    analysis = analyze(trace_counts_of(counts), ranks=4)
    assert layers_summary(analysis).startswith("Some layers lose more than others: the worst quarter (5, ")
    assert analysis.lost_share_L.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


@settings(max_examples=30, deadline=None)
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
