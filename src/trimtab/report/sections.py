"""How a simulated or measured step is shown: the sections of its page, and tables in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import cycle

from rich.console import RenderableType
from rich.markup import escape as shown_text

from trimtab.planner.plan.workload import max_over_mean
from trimtab.report.model import PolicyResult, Report, Timeline
from trimtab.report.number_text import NONE, bytes_text, seconds
from trimtab.report.page_data import load_maps, uneven_layers
from trimtab.report.policies_table import (
    ABOVE_EVEN,
    EPLB_COLUMN,
    FAR_COLUMN,
    FITS_COLUMN,
    IDEAL_COLUMN,
    MOVES_COLUMN,
    OURS,
    above_even,
    balance_and_replicas,
    by_time,
    policies_table,
    sensitivity_table,
    sweep_table,
)
from trimtab.report.simulation import answers, assumed, notes, policy_results, setting_facts, table_title
from trimtab.report.tables import Row, TableData, first_lines, html_table, terminal_facts, terminal_table
from trimtab.report.widgets import Section, facts, heat_map, lead, notes_section, options
from trimtab.simulator.pipeline import BUBBLE
from trimtab.simulator.simulated_case import SimulatedCase
from trimtab.timeline import PARTS
from trimtab.trace import RoutingTrace

SHOWN_LAYERS = 10
NEW_LINE = "\n"
# Short names of `PARTS`, so a line fits a terminal.
SHORT_PARTS = ("dense", "dispatch", "experts", "imbal.", "copies", "plan", "moves", "optim.")
SHORT_PURPOSES = {
    "parameters": "params", "gradients": "grads", "optimizer state": "optim.", "gathered layers": "gathered",
    "activations": "activ.", "output head": "head", "dispatch buffers": "buffers", "replica pool": "copies",
}  # fmt: skip
# With more cases, a sweep prints only the table of all cases.
MOST_DETAILED_CASES = 4
# Colours of parts that are not in PARTS.
SPARE_COLOURS = ("spare", "attention", "dispatch", "experts", "imbalance", "transfers", "planning", "migration")
# Words in an operation's name, and the part with its colour; the first match is used.
COLOUR_WORDS = (
    ("wait", "imbalance"), ("expert", "experts"), ("dispatch", "dispatch"), ("combine", "dispatch"),
    ("attention", "attention"), ("dense", "attention"), ("router", "attention"), ("replica", "transfers"),
    ("weight", "transfers"), ("gradient", "transfers"), ("push", "transfers"), ("transfer", "transfers"),
    ("plan", "planning"), ("mirror", "migration"), ("migrat", "migration"), ("move", "migration"),
    ("optim", "optimizer"),
)  # fmt: skip
# Mixed into the family's colour to distinguish operations of one family; None: unmixed.
SHADES = (None, "var(--ink) 28%", "var(--ground) 40%", "var(--ink) 50%", "var(--ground) 62%")


def sections(report: Report) -> list[Section]:
    """The sections for which the report has data, in order."""
    has_maps = bool(load_maps(report))
    parts: list[tuple[object, str, str, str, Callable[[Report], str]]] = [
        (report.cases, "cases", "Cases", "All cases", _cases),
        (report.policies, "policies", "Policies", "Policies compared", _policies),
        (report.sensitivity, "sensitivity", "Sensitivity", "Under other assumptions", _sensitivity),
        (any(policy.parts_s for policy in report.policies), "time", "Time", "Where the time goes", _times),
        (has_maps, "load", "Load", "Load of every rank", _loads),
        (report.timelines, "step-timeline", "Timeline", "One micro-step, operation by operation", _timeline),
        (has_maps, "layers", "Layers", "Worst layers", _worst_layers),
        (any(policy.memory_bytes for policy in report.policies), "memory", "Memory", "Memory of a rank", _memory),
        (report.facts, "setting", "Setting", "Setting", lambda report: facts(report.facts)),
    ]
    found = [Section(name, word, heading, body(report)) for has_data, name, word, heading, body in parts if has_data]
    return [*found, notes_section(report.notes)] if report.notes else found


def _cases(report: Report) -> str:
    assert report.cases is not None
    return lead(
        f"{report.cases.title}: recompute and update. The fastest is the fastest policy of all that fit the device. "
        "Fits: whether the policies below fit. The other sections show the first case that fits, or the "
        "first if none does."
    ) + html_table(report.cases)


def _policies(report: Report) -> str:
    times = policies_table(report.policies, report.table_title, marks_fastest=report.marks_fastest)
    balance = balance_and_replicas(report.policies)
    texts = ["Speed-up is over static."]
    if EPLB_COLUMN in times.columns:
        texts.append("Over eplb: speed-up over EPLB with past loads, at its best settings.")
    if IDEAL_COLUMN in times.columns:
        above = _above(report.policies)
        texts.append(f"Of ideal: step time with perfectly even routing, divided by this policy's step time{above}.")
    if MOVES_COLUMN in times.columns:
        texts.append("First moves: of the first placement of experts, paid once and in no step time (see the notes).")
    if FITS_COLUMN in times.columns and report.device_bytes:
        texts.append(f"Memory is that of the rank that needs most; a rank has {bytes_text(report.device_bytes)}.")
    more = [
        "max/mean is the busiest rank's load divided by the mean load, averaged over instances (an instance is one "
        "layer of one micro-step). Replicas are per instance.",
    ]
    if FAR_COLUMN in balance.columns:
        more.append("Far rows: rows computed on another node than the one that holds the token.")
    explained = [f'<p class="below lead">{escape(" ".join(each))}</p>' for each in (texts, more)]
    return lead(f"{times.title}.") + html_table(times) + explained[0] + html_table(balance) + explained[1]


def _sensitivity(report: Report) -> str:
    assert report.sensitivity is not None
    text = "Each row is the step on a cluster with other rates. All balancers plan for it, with their best settings."
    return lead(text) + html_table(report.sensitivity)


def _above(policies: Sequence[PolicyResult]) -> str:
    """Why a figure of the column "of ideal" is above 100%; "" if none is."""
    return f"; {ABOVE_EVEN}" if any(above_even(policy.fraction_of_balanced or 0.0) for policy in policies) else ""


def _times(report: Report) -> str:
    rows = [(policy.name, policy.parts_s, policy.step_time_s) for policy in by_time(report.policies)]
    parts = dict(PARTS) | {BUBBLE: "bubble of the pipeline"}
    return (
        '<p class="lead">Time on the critical path, all policies on one scale. <span class="screen">Point at a part, '
        "or use <kbd>Tab</kbd> and the arrow keys.</span></p>" + _bars(rows, parts, "time by part", seconds)
    )


def _memory(report: Report) -> str:
    policies = by_time(report.policies)
    rows = [(policy.name, policy.memory_bytes, sum(policy.memory_bytes.values())) for policy in policies]
    text = "Bytes of the rank that needs most."
    if report.device_bytes:
        over = ", ".join(policy.name for policy in policies if policy.fits is False)
        has = bytes_text(report.device_bytes)
        text += f" A rank has {has}; does not fit: {over}." if over else f" A rank has {has}; all policies fit."
    shown = [row for row in rows if row[1]]
    return lead(text) + _bars(shown, {}, "memory by use", lambda value, _: bytes_text(value))


def _bars(
    rows: Sequence[tuple[str, dict[str, float], float]],
    titles: dict[str, str],
    what: str,
    text_of: Callable[[float, float], str],
) -> str:
    """Stacked bars on one scale, with their figures as a table.

    Args:
        rows: name, amounts by part, and their total; a row without parts is one bar.
        titles: of parts, in the order in which they are stacked; others follow under their own names.
        text_of: text of an amount, given the largest total.
    """
    used = {part: title for part, title in titles.items() if any(amounts.get(part) for _, amounts, _ in rows)}
    used |= {part: part for _, amounts, _ in rows for part in amounts if part not in titles}
    spare = cycle(SPARE_COLOURS)
    colours = {part: part if part in PARTS else next(spare) for part in used}
    longest = max([max(total, sum(amounts.values())) for _, amounts, total in rows], default=0.0) or 1.0

    def show(value: float) -> str:
        return text_of(value, longest)

    lines = []
    for name, amounts, total in rows:
        whole = sum(amounts.values())
        pieces = [
            (f'style="--c:var(--{colours[part]});', amounts[part], title, f"{amounts[part] / whole:.1%}")
            for part, title in used.items()
            if amounts.get(part, 0.0) > 0
        ]
        if not pieces:
            pieces = [('class="unknown" style="', total, "all parts", "not broken down")]
        spans = "".join(
            f'<span {style}width:{100 * amount / longest:.3f}%" '
            f'data-figures="{escape(NEW_LINE.join((f"{name}, {title}", show(amount), share)))}"></span>'
            for style, amount, title, share in pieces
        )
        spoken = "; ".join(f"{title} {show(amount)}, {share}" for _, amount, title, share in pieces)
        lines.append(
            f'<div class="bar-row{" ours" if name == OURS else ""}"><span class="bar-name">{escape(name)}</span>'
            f'<div class="bar" tabindex="0" role="application" aria-roledescription="stacked bar" '
            f'aria-label="{escape(f"{name}: {show(total)}. {spoken}")}">{spans}</div>'
            f'<span class="bar-total">{show(total)}</span></div>'
        )
    legend = "".join(f'<li><i style="--c:var(--{colours[p]})"></i>{escape(title)}</li>' for p, title in used.items())
    cells = tuple(
        Row(name, (*(show(amounts[part]) if part in amounts else NONE for part in used), show(total)))
        for name, amounts, total in rows
    )
    data = TableData(what, ("policy", *used.values(), "total"), cells)
    return (
        f'<figure data-bars aria-label="{escape(what)}"><ul class="legend">{legend}</ul>{"".join(lines)}'
        '<output class="readout" aria-live="polite"></output>'
        f"<details><summary>As a table</summary>{html_table(data)}</details></figure>"
    )


def _loads(report: Report) -> str:
    return heat_map(load_maps(report), report.layer_names, int(uneven_layers(report.before)[0]))


def _timeline(report: Report) -> str:
    picker = ""
    if len(report.timelines) > 1:
        titles = options(enumerate(timeline.title for timeline in report.timelines), 0)
        picker = f'<span class="field"><label for="timeline">Run</label><select id="timeline">{titles}</select></span>'
    legends = "".join(
        f'<ul class="legend" data-legend{"" if index == 0 else " hidden"}>{_kinds(timeline)}</ul>'
        for index, timeline in enumerate(report.timelines)
    )
    title = "" if picker else f" Shown: {escape(report.timelines[0].title)}."
    return f"""<p class="lead">Operations of every rank, lane by lane. In each layer all ranks synchronise twice: to
dispatch tokens to their experts, and to combine the results. Operations that use one link at the same time are in lanes
of their own, such as node link (2).{title}</p>
<div class="controls">{picker}
<span class="field"><label for="timeline-ranks">Ranks</label><select id="timeline-ranks"></select></span>
<span class="gap"></span><button type="button" id="zoom-out" aria-label="Zoom out">−</button>
<button type="button" id="zoom-in" aria-label="Zoom in">+</button><button type="button" id="zoom-fit">Fit</button></div>
{legends}
<div class="lanes"><canvas id="lanes" tabindex="0" role="application" aria-roledescription="timeline"
aria-describedby="lane-readout lane-hint" aria-label="Timeline of one micro-step by rank and lane"></canvas>
<div id="lanes-filler"></div></div>
<output class="readout" id="lane-readout" aria-live="polite">Point at an operation.</output>
<p class="hint" id="lane-hint">Drag or <kbd>←</kbd> <kbd>→</kbd> to move, <kbd>Ctrl</kbd> and wheel, or <kbd>+</kbd>
<kbd>−</kbd>, to zoom, <kbd>0</kbd> to show all; <kbd>↑</kbd> <kbd>↓</kbd> choose a lane, <kbd>n</kbd> <kbd>p</kbd>
its next and previous operation.</p>"""


def _kinds(timeline: Timeline) -> str:
    """Legend of a timeline: kinds of one family are shades of one colour. Unused kinds are hidden."""
    seen: dict[str, int] = {}
    items = []
    used = set(timeline.kind_N.tolist())
    for kind, name in enumerate(timeline.names):
        if kind not in used:
            items.append("<li hidden><i></i></li>")
            continue
        colour = "transfers" if "replica" in name and "wait" in name else _colour(name)
        shade = SHADES[seen.get(colour, 0) % len(SHADES)]
        seen[colour] = seen.get(colour, 0) + 1
        value = f"var(--{colour})" if shade is None else f"color-mix(in oklab, var(--{colour}), {shade})"
        items.append(f'<li><i style="--c:{value}"></i>{escape(name)}</li>')
    return "".join(items)


def _colour(name: str) -> str:
    return next((colour for word, colour in COLOUR_WORDS if word in name.lower()), "spare")


def _worst_layers(report: Report) -> str:
    before_L = max_over_mean(report.before.loads_MLR).mean(axis=0)
    after_L = max_over_mean(report.after.loads_MLR).mean(axis=0)
    rows = tuple(
        Row(
            f"layer {report.layer_names[layer]}",
            (f"{before_L[layer]:.3f}", f"{after_L[layer]:.3f}", f"{before_L[layer] / after_L[layer]:.2f}×"),
            layer=layer,
        )
        for layer in uneven_layers(report.before)[:SHOWN_LAYERS].tolist()
    )
    columns = ("layer", f"{report.before.title}, max/mean", f"{report.after.title}, max/mean", "gain")
    return lead(
        f"By max/mean under {report.before.title}, averaged over micro-steps. A layer takes as long as its busiest "
        "rank. Choose a layer to show it in the heat map."
    ) + html_table(TableData("Worst layers", columns, rows))


def simulation_tables(source: str, trace: RoutingTrace, cases: Sequence[SimulatedCase]) -> tuple[RenderableType, ...]:
    """What `trimtab simulate` prints: the answer, all cases of a sweep, balancers by step time, memory, setting."""
    first, tables = cases[0], [sweep_table(cases)]
    if len(cases) == 1:
        policies = by_time(policy_results(first))
        tables = [
            policies_table(policies, table_title(first)), balance_and_replicas(policies), _parts_table(policies),
            _memory_table(policies),
        ]  # fmt: skip
    elif len(cases) <= MOST_DETAILED_CASES:
        tables += [policies_table(policy_results(case), f"{case.text}: {table_title(case)}") for case in cases]
    tables += [sensitivity_table(case.sensitivity) for case in cases if case.sensitivity]
    shown = first_lines(assumed(cases))
    shown += [f"[bold]{shown_text(answers(cases))}[/bold]\n", *map(terminal_table, tables)]
    shown.append(terminal_facts(setting_facts(source, trace, first), "Setting"))
    texts = [*notes(trace, cases)]
    if above := next(filter(None, (_above(policy_results(case)) for case in cases)), ""):
        texts.append(f"Of ideal is the step time with even routing, divided by this one{above}.")
    shown.append("\n".join(map(shown_text, texts)))
    return tuple(shown)


def _parts_table(policies: Sequence[PolicyResult]) -> TableData:
    bubbles = [BUBBLE] if any(BUBBLE in policy.parts_s for policy in policies) else []
    names = (*PARTS, *bubbles)
    rows = tuple(
        Row(policy.name, tuple(f"{policy.parts_s[name] * 1e3:z,.0f}" for name in names)) for policy in policies
    )
    return TableData("Where the milliseconds go", ("policy", *SHORT_PARTS, *bubbles), rows)


def _memory_table(policies: Sequence[PolicyResult]) -> TableData:
    """Gigabytes of the rank that needs most. Columns have short names, so a line fits a terminal."""
    purposes = dict.fromkeys(purpose for policy in policies for purpose in policy.memory_bytes)
    rows = tuple(
        Row(policy.name, tuple(f"{policy.memory_bytes[purpose] / 1e9:,.1f}" for purpose in purposes))
        for policy in policies
    )
    columns = (SHORT_PURPOSES.get(purpose, purpose) for purpose in purposes)
    return TableData("Gigabytes of the rank that needs most", ("policy", *columns), rows)
