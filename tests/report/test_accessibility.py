"""axe-core finds no violation on any kind of page, on wide and narrow screens, in both colour schemes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trimtab
from helpers.examples import examples
from helpers.reports import some_analysis, some_comparison, some_report
from trimtab.cluster import ModelSpec
from trimtab.report.advice import Advice
from trimtab.report.html import Page
from trimtab.report.model import Report
from trimtab.trace import synthesize

# Also the rules of level AAA and the experimental ones, which do not run by default.
ALL_RULES = "axe.run(document, {rules: Object.fromEntries(axe.getRules().map(rule => [rule.ruleId, {enabled: true}]))})"


def measured_report() -> Report:
    """Figures that the page of a training run has: no ideal run, and a policy without parts."""
    report = some_report()
    static, trimtab = report.policies[0], report.policies[6]
    policies = (replace(static, fraction_of_balanced=None, parts_s={}), replace(trimtab, fraction_of_balanced=None))
    return replace(report, policies=policies)


def some_advice() -> Advice:
    model = ModelSpec("m", num_experts=8, top_k=2, hidden_size=64, expert_width=32, moe_layers=2, vocab_size=100)
    trace = synthesize(num_sequences=16, sequence_length=64, num_layers=2, num_experts=8, top_k=2, zipf=1.5)
    return trimtab.advise(trace, trimtab.Run(model=model, ranks=4, micro_steps=2), gpu_hour=2.0).advice


PAGES: dict[str, Callable[[], Page]] = {
    "simulation": some_report,
    "training": measured_report,
    "analysis": some_analysis,
    "advice": some_advice,
    "comparison": some_comparison,
}


@pytest.fixture(scope="module")
def axe_script() -> str:
    bundled = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    return (Path(bundled.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def violations(page: Any, axe_script: str) -> list[tuple[str, str]]:
    """Rule and first element of each violation."""
    page.evaluate(axe_script)
    found = page.evaluate(ALL_RULES)
    assert len(found["passes"]) > 10
    return [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]]


@pytest.mark.longer
@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    examples(
        short=[
            ("simulation", "light", 1280),
            pytest.param("simulation", "dark", 390, marks=pytest.mark.nightly),
            pytest.param("training", "dark", 1280, marks=pytest.mark.nightly),
            ("analysis", "light", 390),
            ("advice", "dark", 390),
            pytest.param("comparison", "light", 1280, marks=pytest.mark.nightly),
            pytest.param("comparison", "dark", 390, marks=pytest.mark.nightly),
        ],
        long=list(itertools.product(PAGES, ["light", "dark"], [1280, 390])),
    ),
)
def test_no_violations(show: Any, axe_script: str, name: str, scheme: str, width: int) -> None:
    with show(PAGES[name](), width=width, scheme=scheme) as opened:
        opened.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        assert violations(opened.page, axe_script) == []
