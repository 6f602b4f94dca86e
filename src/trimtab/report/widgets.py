"""Elements of page sections: tables, facts, the heat map of rank loads. Texts are escaped with `escape`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from trimtab.report.model import LoadMap
from trimtab.report.payload import load_spread

NONE = "–"


@dataclass(frozen=True)
class Section:
    """One section: its id, navigation label, heading and content."""

    name: str
    word: str
    heading: str
    body: str

    @property
    def html(self) -> str:
        return (
            f'<section id="{self.name}" aria-labelledby="{self.name}-heading">'
            f'<h2 id="{self.name}-heading">{self.heading}</h2>\n{self.body}\n</section>'
        )


def seconds(value: float, span: float | None = None) -> str:
    """About three digits, in a unit that suits `span` or the value."""
    size = abs(value if span is None else span)
    factor, unit = (1.0, "s") if size >= 1 or size == 0 else (1e3, "ms") if size >= 1e-3 else (1e6, "µs")
    return f"{digits(value * factor)} {unit}"


def bytes_text(value: float) -> str:
    """About three digits, in decimal units."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def digits(value: float) -> str:
    """About three digits."""
    if not math.isfinite(value):
        return NONE
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def number(value: float | None, shape: str) -> str:
    """Formatted number, or a dash if it is not a number."""
    return NONE if value is None or not math.isfinite(value) else format(value, shape)


def table(columns: Sequence[str], rows: Sequence[str], label: str) -> str:
    """A table in its own box, which scrolls on a narrow page. Columns without a name are left out."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns if column)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def heat_map(maps: Sequence[LoadMap], layer_names: Sequence[str], worst: int) -> str:
    """Load of every rank in every micro-step, one map or two side by side, one layer at a time; `worst` is shown
    first."""
    options = ['<option value="-1">all layers (mean)</option>']
    for index, name in enumerate(layer_names):
        note = ", the worst" if index == worst else ""
        chosen = " selected" if index == worst else ""
        options.append(f'<option value="{index}"{chosen}>layer {escape(name)}{note}</option>')
    figures = "".join(
        f"<figure><figcaption><b>{escape(part.title)}</b><span data-map-caption></span></figcaption>"
        f'<div><canvas data-map tabindex="0" role="application" aria-roledescription="heat map" '
        f'aria-describedby="heat-readout" aria-label="{escape(part.title)}: load of every rank in every micro-step. '
        'Arrow keys move, Page Up and Page Down change the layer."></canvas></div></figure>'
        for part in maps
    )
    spread = load_spread(maps)
    low, high = max(0.0, 1 - spread), 1 + spread
    # The scale is symmetric around 1; values below no load are cut off.
    whole, one = 100 * 2 * spread / (high - low), 100 * (1 - low) / (high - low)
    marks = "".join(
        f'<span style="left:{at:.1f}%">{text}</span>'
        for at, text in ((0.0, f"{low:.2f}×"), (one, "1×"), (100.0, f"{high:.2f}×"))
    )
    return f"""<p class="lead">Tokens that a rank computes, over the mean of its instance: blue is less than
the mean, orange more.</p>
<div class="controls">
<span class="field"><label for="layer">Layer</label><select id="layer">{"".join(options)}</select></span>
<button type="button" id="layer-previous" aria-label="Previous layer">←</button>
<input type="range" id="layer-slider" min="-1" max="{len(layer_names) - 1}" value="{worst}" aria-label="Layer">
<button type="button" id="layer-next" aria-label="Next layer">→</button>
</div>
<div class="pair">{figures}</div>
<output class="readout" id="heat-readout" aria-live="polite">Point at a cell, or use Tab and the arrow keys.</output>
<div class="scale"><i style="background-size:{whole:.1f}% 100%"></i><div>{marks}</div>
<span>load over the mean of the ranks</span></div>"""


def facts(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts) + "</dl>"


def notes_section(notes: Sequence[str]) -> Section:
    """The notes on assumptions and limits."""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return Section("notes", "Notes", "Assumptions and limits", f'<ul class="notes">{items}</ul>')
