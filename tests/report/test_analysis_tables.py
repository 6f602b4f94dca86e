"""Tables, charts and grids of an analysis: known loads, and the figure that each cell should show."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.trace_counts import trace_counts_of
from trimtab.analysis import Analysis, analyze
from trimtab.analysis.fixed_placements import PlacementComparison, PlacementStrategy
from trimtab.report import page_data
from trimtab.report.analysis_tables import (
    balance_table,
    domains_table,
    hot_facts,
    hottest_table,
    layers_table,
    placements_table,
    ranks_chart,
    run_bars,
    setting_facts,
    sizes_by_ranks_table,
    sizes_chart,
    sizes_table,
    stability_facts,
)
from trimtab.report.model import AnalysisReport
from trimtab.report.page_data import hot_values, load_map, vio_columns, vio_values


def analysis_of_growing_skew() -> Analysis:
    """101 micro-steps in which the busiest of two ranks has 1 to 2 times the mean; the layer is decoder layer 7."""
    counts = [[[100 + i, 100 - i]] for i in range(101)]
    return analyze(trace_counts_of(counts, layer_indices=np.array([7])), ranks=2)


def test_spreads_have_mean_p50_p99_and_worst() -> None:
    table = balance_table(analysis_of_growing_skew())
    assert table.title == "Balance over 101 instances"
    assert table.columns == ("figure", "mean", "p50", "p99", "worst")
    vio, even = table.rows
    assert (vio.name, *vio.cells) == ("max_vio of ranks", "0.500", "0.500", "0.990", "1.000")
    assert even.cells[1:] == ("0.667", "0.503", "0.500")


def test_layers_are_named_and_sorted_by_their_part_of_the_loss() -> None:
    """Busiest ranks have 3, 9 and 1 more than the mean."""
    counts = [[[13, 7], [19, 1], [11, 9]]] * 2
    analysis = analyze(trace_counts_of(counts, layer_indices=np.array([2, 4, 8])), ranks=2)
    table = layers_table(analysis, 2)
    assert [(row.name, row.layer, row.cells[0], row.cells[1]) for row in table.rows] == [
        ("layer 4", 1, "69.2%", "0.900"),
        ("layer 2", 0, "23.1%", "0.300"),
    ]
    assert table.columns[1:3] == ("of lost time", "max_vio")


def test_placements_show_loss_recovered_part_mean_and_p99() -> None:
    static = PlacementStrategy("static", "contiguous homes", "nothing", 1.5, 2.25, 0.4, 0.1, 0.0)
    past = PlacementStrategy("homes_from_past", "homes from the past", "past", 1.2, 1.75, 0.1, 0.1, 0.75)
    analysis = analysis_of_growing_skew()
    planned = PlacementStrategy("plan", "a plan", "micro-step", 1.083, 1.212, 0.077, 0.0, 0.81)
    object.__setattr__(analysis, "placements", PlacementComparison((static, past, planned), "step", 101))
    first, second, plan = placements_table(analysis).rows
    assert (first.cells, first.about, first.bar) == (("40.0%", "0%", "1.500", "2.250"), "static", 1.0)
    assert (second.cells, second.about, second.bar) == (
        ("10.0%", "75%", "1.200", "1.750"), "based on past loads", 0.25,
    )  # fmt: skip
    assert plan.cells == ("7.7%", "81%", "1.083", "1.212")
    assert [row.is_ours for row in (first, second, plan)] == [False, False, True]


def test_sizes_and_ranks_have_the_max_vio_of_their_own_size() -> None:
    """Four experts take turns, so that two micro-steps are even on two ranks, and four on four."""
    counts = [[[8, 0, 0, 0]], [[0, 0, 8, 0]], [[0, 8, 0, 0]], [[0, 0, 0, 8]]] * 2
    analysis = analyze(trace_counts_of(counts), ranks=2)
    chart = sizes_chart(analysis)
    assert list(chart.places) == ["1×", "2×", "4×", "step"]
    assert [list(line.values) for line in chart.lines] == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert "1× is 8 tokens" in chart.x_label
    assert sizes_table(analysis).rows[0].cells == ("8", "16", "32", "64")
    table = sizes_by_ranks_table(analysis)
    assert table.columns == ("micro-step", "2 ranks", "4 ranks")
    assert [row.cells for row in table.rows] == [
        ("1.000", "3.000"), ("0.000", "1.000"), ("0.000", "0.000"), ("0.000", "0.000"),
    ]  # fmt: skip
    assert table.rows[1].about == "16 tokens, 4 micro-steps"
    same_step, same_rank = ranks_chart(analysis).lines
    # On four ranks instead of two, twice the tokens are as many for a rank.
    assert list(same_step.values) == [1.0, 3.0]
    assert list(same_rank.values) == [1.0, 1.0]


def test_facts_of_stability_and_hot_experts() -> None:
    counts = [[[9, 1, 1, 1]], [[9, 1, 1, 1]], [[1, 9, 1, 1]], [[3, 3, 3, 3]]]
    analysis = analyze(trace_counts_of(counts), ranks=2)
    facts = dict(stability_facts(analysis))
    # Two of four micro-steps equal the one before: 12, 4 and 6 of 12 tokens are in common.
    assert facts["neighbouring micro-steps"] == f"{np.mean([1, 4 / 12, 6 / 12]):.1%} of expert load in common"
    assert facts["halves of a step"] == f"{(4 + 2 + 2 + 2) / 24:.1%} of expert load in common"
    assert facts["max/mean of a whole step"].startswith("1.500,")
    assert facts["max/mean of a micro-step"].startswith(f"{(3 * 10 / 6 + 1) / 4:.3f},")
    hot = dict(hot_facts(analysis))
    assert hot["per instance"] == "0.8 of 4 experts are hot; they compute 56% of all tokens"
    assert hot["persistence"] == "33% are hot again in the next micro-step; by chance it would be 18.8%"
    assert hot["duration"] == "1.5 consecutive micro-steps on average"
    assert run_bars(analysis) == [("1", 1), ("2", 1)]
    first = hottest_table(analysis).rows[0]
    assert (first.name, first.cells) == ("layer 0, expert 0", (f"{22 * 4 / 48:.2f}×", "50%", "2"))


def test_domains_have_their_share_of_tokens_and_skew() -> None:
    domains = np.array([[[6, 2, 0, 0]], [[6, 6, 6, 6]]])
    counted = trace_counts_of([[[12, 8, 6, 6]]], counts_DLE=domains, domains=("maths", ""))
    maths, rest = domains_table(analyze(counted, ranks=2)).rows
    assert (maths.name, maths.cells) == ("maths", ("25.0%", "2.000", "100.0%", "3.00×"))
    assert (rest.name, rest.cells) == ("(no label)", ("75.0%", "1.000", "50.0%", "1.00×"))


def test_facts_of_the_setting() -> None:
    facts = dict(setting_facts(AnalysisReport("t.parquet", analysis_of_growing_skew())))
    assert facts["model"] == "unknown: 1 MoE layer, 2 experts, top-1"
    assert facts["contents"] == "20,200 tokens in 101 sequences, step 0"
    assert facts["ranks"] == "2, 2 per node, contiguous homes"


def test_columns_of_many_micro_steps_are_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven micro-steps in columns of three; one of them has no load in the second layer."""
    monkeypatch.setattr(page_data, "MOST_COLUMNS", 3)
    vio = [[0.0, 0.2], [0.5, 0.4], [1.0, 0.6], [0.25, 0.0], [0.25, np.nan], [1.0, 1.0], [0.75, 0.3]]
    counts = np.array([[[0, 0] if np.isnan(v) else [100 + 100 * v, 100 - 100 * v] for v in row] for row in vio])
    analysis = analyze(trace_counts_of(np.rint(counts)), ranks=2)
    assert vio_columns(analysis).tolist() == [0, 3, 6]
    assert vio_values(analysis) == pytest.approx(np.array([[0.5, 0.5, 0.75], [0.4, 0.5, 0.3]]))


def test_hot_values_are_tokens_over_the_mean_experts() -> None:
    counts = [[[9, 1, 1, 1], [0, 0, 0, 0]], [[3, 3, 0, 6], [4, 0, 0, 0]]]
    values_LEC = hot_values(analyze(trace_counts_of(counts), ranks=2))
    assert values_LEC[0].T.tolist() == [[3, 1 / 3, 1 / 3, 1 / 3], [1, 1, 0, 2]]
    assert np.isnan(values_LEC[1, :, 0]).all()
    assert values_LEC[1, :, 1].tolist() == [4, 0, 0, 0]


def test_a_map_of_many_micro_steps_has_evenly_chosen_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "MOST_COLUMNS", 40)
    loads, chosen = load_map(analysis_of_growing_skew())
    assert chosen.tolist() == list(range(0, 101, 3))
    assert loads.loads_MLR[:, 0].tolist() == [[100 + i, 100 - i] for i in range(0, 101, 3)]
