"""Two traces side by side: the terminal output of `--compare`, and the page's sections."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import RenderableType
from rich.markup import escape

from trimtab.analysis import Analysis
from trimtab.analysis.summary import assumed, notes
from trimtab.analysis.trace_comparison import TraceComparison, TraceFigures
from trimtab.figures import described_figures, plural
from trimtab.report.analysis_tables import contents_text
from trimtab.report.number_text import NONE, seconds
from trimtab.report.tables import Facts, Row, TableData, first_lines, html_table, terminal_facts, terminal_table
from trimtab.report.widgets import Section, facts, notes_section

LABELS = ("A", "B")


@dataclass(frozen=True, eq=False)
class ComparisonReport:
    """A page on two traces.

    Attributes:
        sources: the files of A and of B, as text.
    """

    sources: tuple[str, str]
    comparison: TraceComparison

    @property
    def title(self) -> str:
        ranks = self.comparison.first.ranks
        models = dict.fromkeys(each.counts.model or "a trace" for each in _both(self.comparison))
        return f"Two traces compared: expert load of {' and '.join(models)} on {plural(ranks, 'rank')}"

    @property
    def assumed(self) -> str:
        """Returns what nobody stated; "" if nothing was assumed."""
        return assumed([self.comparison.first, self.comparison.second])

    @property
    def answer(self) -> str:
        """The difference in imbalance."""
        a, b, difference = self.comparison.a, self.comparison.b, self.comparison.difference
        if a.lost_part is not None and b.lost_part is not None:
            lost, change = (a.lost_part, b.lost_part), difference.lost_part
            cost = "Imbalance costs {:.1%} of a step in A and {:.1%} in B"
        else:
            lost, change = (a.expert_time_lost, b.expert_time_lost), difference.expert_time_lost
            cost = "On average a rank is idle for {:.1%} of expert time in A and {:.1%} in B"
        return f"{cost.format(*lost)} ({_difference(change, 'part', 1.0)})."


def _both(comparison: TraceComparison) -> tuple[Analysis, Analysis]:
    return comparison.first, comparison.second


def comparison_output(report: ComparisonReport) -> list[RenderableType]:
    """What `trimtab analyze --compare` prints."""
    return [
        *first_lines(report.assumed),
        f"[bold]{escape(report.answer)}[/bold]",
        "",
        terminal_facts(comparison_facts(report), "Compared"),
        terminal_table(figures_table(report.comparison)),
        "\n".join(map(escape, comparison_notes(report.comparison))),
    ]


def comparison_facts(report: ComparisonReport) -> Facts:
    """The two traces, and what is the same for both."""
    first = report.comparison.first
    layers = f"{plural(first.counts.num_layers, 'MoE layer')}, {plural(first.counts.num_experts, 'expert')}"
    return [
        *(
            (label, f"{source}: {each.counts.model or 'unknown model'}, {contents_text(each)}")
            for label, source, each in zip(LABELS, report.sources, _both(report.comparison), strict=True)
        ),
        ("layers", layers),
        ("ranks", f"{first.ranks}, {first.ranks_per_node} per node, contiguous homes"),
    ]


def figures_table(comparison: TraceComparison) -> TableData:
    """The figures of both and their difference, without those that neither has."""
    rows = []
    for name, (unit, text, _) in described_figures(TraceFigures).items():
        values = [getattr(each, name) for each in (comparison.a, comparison.b, comparison.difference)]
        known = [abs(value) for value in values[:2] if value is not None]
        if known:
            texts = [_text(value, unit, max(known)) for value in values[:2]]
            rows.append(Row(text, (*texts, _difference(values[2], unit, max(known)))))
    return TableData("A and B", ("figure", *LABELS, "B - A"), tuple(rows))


def _text(value: float | None, unit: str, span: float) -> str:
    """A figure as text; seconds in a unit that suits `span`."""
    if value is None:
        return NONE
    shapes = {"part": ".1%", "ratio": ".3f", "count": ",d"}
    return seconds(value, span) if unit == "s" else format(value, shapes[unit])


def _difference(value: float | None, unit: str, span: float) -> str:
    """A difference with its sign; one of percentages in percentage points."""
    if value is None:
        return NONE
    if unit == "part":
        return f"{round(100 * value, 1) + 0.0:+.1f} points"
    return ("+" if value > 0 else "") + _text(value, unit, span)


def comparison_notes(comparison: TraceComparison) -> list[str]:
    """What makes the two less comparable, then assumptions and limits: of both, and of one alone."""
    a, b = (each.counts for each in _both(comparison))
    texts = []
    if a.model != b.model:
        names = f"{a.model or 'unknown'} and {b.model or 'unknown'}"
        texts.append(f"The models differ ({names}): experts of the same number have nothing to do with each other.")
    if a.top_k != b.top_k:
        texts.append(f"A token has {plural(a.top_k, 'expert')} in A and {b.top_k} in B.")
    tokens = [each.num_tokens / each.num_micro_steps for each in (a, b)]
    if max(tokens) > 1.25 * min(tokens):
        texts.append(
            f"Micro-steps have {tokens[0]:,.0f} tokens in A and {tokens[1]:,.0f} in B: larger ones are more even. "
            "A smaller --token-budget makes them alike."
        )
    estimates = [each.estimate for each in _both(comparison)]
    settings = {(each.model, each.cluster) for each in estimates if each}
    if len(settings) > 1 or estimates.count(None) == 1:
        texts.append("Seconds are of different models or clusters, or of one trace alone.")
    found = [notes(each) for each in _both(comparison)]
    texts += [text for text in found[0] if text in found[1]]
    for label, mine, others in zip(LABELS, found, reversed(found), strict=True):
        texts += [f"{label}: {text}" for text in mine if text not in others]
    return texts


def comparison_sections(report: ComparisonReport) -> list[Section]:
    """The sections of the page, in order."""
    table = html_table(figures_table(report.comparison))
    return [
        Section("compared", "A and B", "A and B, and their difference", (
            facts(comparison_facts(report)) + f'<div class="below">{table}</div>'
        )),
        notes_section(comparison_notes(report.comparison)),
    ]  # fmt: skip
