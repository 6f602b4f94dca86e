"""The sections of the page of `trimtab advise`."""

from __future__ import annotations

from html import escape

from trimtab.report.advice import (
    Advice,
    advice_facts,
    advice_notes,
    advice_table,
    advice_tiles,
    cost_table,
    limit_texts,
    settings_to_copy,
    waterfall,
)
from trimtab.report.policies_table import waterfall_table
from trimtab.report.tables import html_table
from trimtab.report.widgets import Section, facts, lead, notes_section, summary, tiles


def advice_sections(advice: Advice) -> list[Section]:
    """The sections, in order."""
    even = (
        "Speed-up is over doing nothing. Of even: step time with perfectly even routing, divided by this one; above "
        "100% where a strategy also balances sequences, or sends fewer rows. Memory is that of the rank that needs "
        "most; with an exclamation mark it does not fit."
    )
    causes = (
        "Waiting is what the step would be shorter if every expert phase took the ranks' mean time, with the same "
        "rows. The changes add up to the difference."
    )
    rows = waterfall(advice)
    found = [
        Section("figures", "Figures", "At a glance", tiles(advice_tiles(advice))),
        Section("strategies", "Strategies", "What a run can do", lead(even) + html_table(advice_table(advice))),
        Section("cost", "Cost", "What it saves, and what it needs", html_table(cost_table(advice))),
        Section("waterfall", "Waterfall", f"From static to {escape(rows[-1].name)}", lead(causes) + html_table(
            waterfall_table(rows, advice.static.simulated.step_time_s)
        )),
    ]  # fmt: skip
    if lines := settings_to_copy(advice):
        text = "".join(f"<pre>{escape(line)}</pre>" for line in lines)
        found.append(Section("settings", "Settings", "Settings to copy", text))
    if text := " ".join(limit_texts(advice)):
        found.append(Section("limits", "Limits", "When it fits and pays", summary(text)))
    found.append(Section("setting", "Setting", "Setting", facts(advice_facts(advice))))
    found.append(notes_section(advice_notes(advice)))
    return found
