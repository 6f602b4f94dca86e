"""HTML of parts of a page: facts, heat maps, legends. All texts are escaped with `escape`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from trimtab.report.model import LoadMap
from trimtab.report.page_data import ColourScale, load_scale
from trimtab.report.tables import Facts

POINT_AT_CELL = "Point at a cell, or use Tab and the arrow keys."


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


def heat_map(maps: Sequence[LoadMap], layer_names: Sequence[str], worst: int) -> str:
    """Load of every rank in every micro-step, one map or two side by side, one layer at a time; `worst` is shown
    first."""
    layers = enumerate(
        f"layer {name}{', the worst' if index == worst else ''}" for index, name in enumerate(layer_names)
    )
    layer_options = options([(-1, "all layers (mean)"), *layers], worst)
    figures = "".join(
        f"<figure><figcaption><b>{escape(part.title)}</b><span data-map-caption></span></figcaption>"
        f'<div><canvas data-map tabindex="0" role="application" aria-roledescription="heat map" '
        f'aria-describedby="heat-readout" aria-label="{escape(part.title)}: load of every rank in every micro-step. '
        'Arrow keys move, Page Up and Page Down change the layer."></canvas></div></figure>'
        for part in maps
    )
    text = "Tokens that each rank computes, divided by the mean over ranks: blue is below the mean, orange above."
    return f"""{lead(text)}
<div class="controls">
<span class="field"><label for="layer">Layer</label><select id="layer">{layer_options}</select></span>
<button type="button" id="layer-previous" aria-label="Previous layer">←</button>
<button type="button" id="layer-next" aria-label="Next layer">→</button>
<input type="range" id="layer-slider" min="-1" max="{len(layer_names) - 1}" value="{worst}" aria-label="Layer">
</div>
<div class="pair">{figures}</div>
<output class="readout" id="heat-readout" aria-live="polite">{POINT_AT_CELL}</output>
{colour_legend(load_scale(maps), times, "load / mean load of the ranks", middle=1.0)}"""


def times(value: float) -> str:
    """A ratio, such as 2.4×."""
    return f"{round(value, 2):g}×"


def colour_legend(
    scale: ColourScale, text_of: Callable[[float], str], caption: str, *, middle: float | None = None
) -> str:
    """Colours of a scale with the values of its ends. An end beyond which there are values is an arrow, marked ≤ or ≥.

    Args:
        text_of: text of a value.
        caption: what the values are.
        middle: value of the neutral colour, between blue and orange; None: the colours begin with the neutral one.
    """
    marks = [
        (0.0, ("≤ " if scale.clips_below else "") + text_of(scale.low)),
        (100.0, ("≥ " if scale.clips_above else "") + text_of(scale.high)),
    ]
    style, kinds = "", ["scale"]
    if middle is None:
        kinds.append("from-mean")
    else:
        span = scale.high - scale.low
        at = 100 * (middle - scale.low) / span
        # On a wide scale it would cover the text of the low end.
        if at > 14:
            marks.insert(1, (at, text_of(middle)))
        # The colours are symmetric around the middle; those below the lowest value are cut off.
        style = f' style="background-size:{100 * 2 * (scale.high - middle) / span:.1f}% 100%"'
    kinds += ["clips-below"] * scale.clips_below + ["clips-above"] * scale.clips_above
    texts = "".join(f'<span style="left:{at:.1f}%">{text}</span>' for at, text in marks)
    most = f"; at most {text_of(scale.most)}" if scale.clips_above else ""
    return f'<div class="{" ".join(kinds)}"><i{style}></i><div>{texts}</div><span>{escape(caption)}{most}</span></div>'


def facts(facts: Facts) -> str:
    """A list of names and values."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts) + "</dl>"


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """The main figures, side by side: what each is, its value, and a remark."""
    parts = (
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b> {escape(remark)}</dd></div>"
        for name, value, remark in facts
    )
    return f'<dl class="tiles">{"".join(parts)}</dl>'


def notes_section(notes: Sequence[str]) -> Section:
    """The notes on assumptions and limits."""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return Section("notes", "Notes", "Assumptions and limits", f'<ul class="notes">{items}</ul>')


def lead(text: str) -> str:
    """The introduction of a section."""
    return f'<p class="lead">{escape(text)}</p>'


def summary(text: str) -> str:
    """A sentence with a result; "" without text."""
    return f'<p class="summary">{escape(text)}</p>' if text else ""


def grid(name: str, title: str, legend: str, planes: Sequence[str] = (), shown: int = 0) -> str:
    """A colour grid, drawn by `grid.js` from the data of this name.

    Args:
        legend: see `colour_legend`.
        planes: names of layers to choose from; with less than two there is no choice.
        shown: the plane that is shown first.
    """
    picker = ""
    if len(planes) > 1:
        picker = (
            f'<div class="controls"><span class="field"><label for="grid-{name}">Layer</label>'
            f'<select id="grid-{name}">{options(enumerate(planes), shown)}</select></span></div>'
        )
    keys = " Page Up and Page Down change the layer." if picker else ""
    return (
        f'<figure data-grid="{name}"><figcaption><b>{escape(title)}</b></figcaption>{picker}'
        f'<div><canvas tabindex="0" role="application" aria-roledescription="heat map" '
        f'aria-describedby="grid-{name}-readout" aria-label="{escape(title)}. Arrow keys move.{keys}"></canvas></div>'
        f'<output class="readout" id="grid-{name}-readout" aria-live="polite">{POINT_AT_CELL}</output>'
        f"{legend}</figure>"
    )


def options(names: Iterable[tuple[int, str]], shown: int) -> str:
    """Options of a list: value and name of each."""
    return "".join(
        f'<option value="{value}"{" selected" if value == shown else ""}>{escape(name)}</option>'
        for value, name in names
    )
