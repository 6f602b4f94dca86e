"""The page and tables of two traces: what differs, with its unit; the same JSON as the command's."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from helpers.reports import some_analysis, some_comparison
from trimtab.analysis import Analysis
from trimtab.analysis.cost_estimate import CostEstimate
from trimtab.analysis.trace_comparison import compare_traces, figures
from trimtab.report.charts import Line, LineChart, line_chart
from trimtab.report.comparison_report import ComparisonReport, comparison_notes, figures_table
from trimtab.report.html import page_of


def report_of(first: Analysis, second: Analysis) -> ComparisonReport:
    names = ("a.parquet", "b.parquet")
    return ComparisonReport(names, compare_traces(names, first, second))


def with_seconds(analysis: Analysis, lost_s: float, step_s: float = 2.0) -> Analysis:
    estimate = CostEstimate("h100x8", "m", step_s, step_s - lost_s, lost_s, {}, (lost_s,) * len(analysis.layers), 4)
    return replace(analysis, estimate=estimate)


def test_differences_have_a_sign_and_a_unit() -> None:
    first, second = some_analysis().analysis, some_analysis(micro_steps=8).analysis
    report = report_of(with_seconds(first, 0.5), with_seconds(second, 0.25, 1.6))
    rows = {row.name: row.cells for row in figures_table(report.comparison).rows}
    assert rows["cost of imbalance, of a step"] == ("25.0%", "15.6%", "-9.4 points")
    assert rows["cost of imbalance, seconds"] == ("500 ms", "250 ms", "-250 ms")
    assert rows["step with contiguous homes"] == ("2.00 s", "1.60 s", "-0.40 s")
    assert rows["max_vio, mean"][0] == f"{first.total.max_vio.mean:.3f}"
    assert rows["micro-steps"] == ("12", "8", "-4")
    assert rows["tokens"] == ("24,576", "16,384", "-8,192")
    assert report.answer.startswith("Imbalance costs 25.0% of a step in A and 15.6% in B (-9.4 points).")


def test_without_seconds_of_both_the_answer_is_about_expert_time() -> None:
    first, second = some_analysis().analysis, some_analysis(micro_steps=8).analysis
    report = report_of(with_seconds(first, 0.5), second)
    lost = f"{first.total.lost:.1%} of expert time in A and {second.total.lost:.1%} in B"
    assert report.answer.startswith(f"On average a rank is idle for {lost}")
    assert "Seconds are of different models or clusters, or of one trace alone." in comparison_notes(report.comparison)
    rows = {row.name: row.cells for row in figures_table(report.comparison).rows}
    assert rows["cost of imbalance, seconds"] == ("500 ms", "–", "–")


def test_what_makes_two_traces_less_comparable_is_said() -> None:
    analysis, other = some_analysis().analysis, some_analysis(layers=4, seed=1).analysis
    model = replace(other, counts=replace(other.counts, model="another", top_k=4))
    texts = comparison_notes(report_of(analysis, model).comparison)
    assert texts[0].startswith("The models differ (some model and another)")
    assert texts[1] == "A token has 2 experts in A and 4 in B."


def test_names_below_a_chart_of_many_layers_do_not_overlap() -> None:
    chart = line_chart(LineChart("t", "layer", [str(layer) for layer in range(94)], [Line("a", [0.5] * 94)]))
    names = [(float(x), text) for x, text in re.findall(r'<text x="([\d.]+)"[^>]*middle">(\d+)</text>', chart)]
    assert names[0][1] == "0"
    assert len(names) > 5
    # Digits of a font of 12px are about 7 wide.
    assert all(right - left > 7 * (len(a) + len(b)) / 2 for (left, a), (right, b) in pairwise(names))
    few = line_chart(LineChart("t", "layer", ["3", "5", "7"], [Line("a", [0.5] * 3)]))
    assert re.findall(r'middle">(\d+)</text>', few) == ["3", "5", "7"]


@pytest.mark.parametrize("odd", [{"ranks": 1}, {"micro_steps": 1, "steps": 1, "layers": 1}, {"experts": 1, "ranks": 1}])
def test_pages_of_small_traces_are_complete(odd: dict[str, Any]) -> None:
    analysis = some_analysis(**odd).analysis
    page = page_of(report_of(analysis, analysis))
    assert not re.search(r"\bnan\b|\binf\b|\bNone\b", page.split("<script>")[0].split("application/json")[0])


def test_the_json_is_in_the_page_once() -> None:
    report = some_comparison("</script><img src=x onerror=alert(1)>")
    content = figures(report.comparison) | {"traces": report.sources}
    page = page_of(report, content)
    assert page.count('id="result"') == 1
    element = page.split('id="result">')[1].split("</script>")[0]
    assert json.loads(element) == json.loads(json.dumps(content))
    assert 'id="result"' not in page_of(report)
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
