"""The sections of the page as HTML. All texts of a report are escaped with `escape`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trimtab.planner.plan.workload import max_over_mean
from trimtab.report.model import PolicyResult, Report, Timeline
from trimtab.report.payload import load_maps, worst_layers
from trimtab.report.widgets import NONE, Section, bytes_text, facts, heat_map, notes_section, number, seconds, table
from trimtab.simulator.clocks import PARTS

OURS = "trimtab"
SHOWN_LAYERS = 10
SPARE_COLOURS = ("spare", "attention", "dispatch", "experts", "imbalance", "transfers", "planning", "migration")
# Words in an operation's name, and the part with its colour; the first match is used.
COLOUR_WORDS = (
    ("wait", "imbalance"), ("expert", "experts"), ("dispatch", "dispatch"), ("combine", "dispatch"),
    ("attention", "attention"), ("dense", "attention"), ("router", "attention"), ("replica", "transfers"),
    ("weight", "transfers"), ("gradient", "transfers"), ("push", "transfers"), ("transfer", "transfers"),
    ("plan", "planning"), ("mirror", "migration"), ("migrat", "migration"), ("move", "migration"),
    ("optim", "optimizer"),
)  # fmt: skip
SHADES = (None, "var(--ink) 28%", "var(--ground) 40%", "var(--ink) 50%", "var(--ground) 62%")


def sections(report: Report) -> list[Section]:
    """Returns the sections for which the report has data, in order."""
    found = []
    if report.policies:
        found.append(Section("policies", "Policies", "Policies compared", _policies(report.policies)))
    if any(policy.parts_s for policy in report.policies):
        found.append(Section("time", "Time", "Where the time goes", _times(report.policies)))
    if load_maps(report):
        found.append(Section("load", "Load", "Load of every rank", _loads(report)))
    if report.timelines:
        found.append(Section("step-timeline", "Timeline", "One micro-step, operation by operation", _timeline(report)))
    if load_maps(report):
        found.append(Section("layers", "Layers", "Worst layers", _worst_layers(report)))
    if any(policy.memory_bytes for policy in report.policies):
        found.append(Section("memory", "Memory", "Memory of a rank", _memory(report.policies)))
    if report.facts:
        found.append(Section("setting", "Setting", "Setting", facts(report.facts)))
    if report.notes:
        found.append(notes_section(report.notes))
    return found


def _row_class(name: str) -> str:
    return " ours" if name == OURS else ""


def _policies(policies: Sequence[PolicyResult]) -> str:
    longest = max(policy.step_time_s for policy in policies)
    has_fraction = any(policy.fraction_of_balanced is not None for policy in policies)
    rows = []
    for policy in policies:
        width = 100 * policy.step_time_s / longest if longest > 0 else 0.0
        time = f'<i style="width:{width:.2f}%"></i><span>{seconds(policy.step_time_s, longest)}</span>'
        about = f'<span class="about">{escape(policy.about)}</span>' if policy.about else ""
        cells = [
            f'<td class="with-bar"><span class="amount">{time}</span></td>',
            f"<td>{number(policy.speedup, '.2f')}×</td>",
            f"<td>{number(policy.fraction_of_balanced, '.1%')}</td>" if has_fraction else "",
            f"<td>{number(policy.max_over_mean, '.3f')}</td>",
            f"<td>{number(policy.replicas_per_instance, '.1f')}</td>",
        ]
        head = f'<th scope="row">{escape(policy.name)}{about}</th>'
        rows.append(f'<tr class="{_row_class(policy.name).strip()}">{head}{"".join(cells)}</tr>')
    columns = ["policy", "step time", "speed-up", "of balanced" if has_fraction else "", "max/mean", "replicas"]
    return (
        '<p class="lead">Recompute and update of one step. Speed-up is over <b>static</b>; max/mean is the busiest '
        "rank's load over the mean, averaged over instances (one layer of one micro-step); replicas are per instance."
        f"{' “Of balanced” is the time of an ideally even run over this one.' if has_fraction else ''}</p>"
        f"{table(columns, rows, 'Policies compared')}"
    )


def _times(policies: Sequence[PolicyResult]) -> str:
    rows = [(policy.name, policy.parts_s, policy.step_time_s) for policy in policies]
    names = dict(PARTS)
    return (
        '<p class="lead">Seconds on the critical path, all policies on one scale. Point at a part, or use '
        "<kbd>Tab</kbd> and the arrow keys.</p>" + _bars(rows, names, "time by part", is_time=True)
    )


def _memory(policies: Sequence[PolicyResult]) -> str:
    rows = [(policy.name, policy.memory_bytes, sum(policy.memory_bytes.values())) for policy in policies]
    return '<p class="lead">Bytes of the busiest rank.</p>' + _bars(
        [row for row in rows if row[1]], {}, "memory by use", is_time=False
    )


def _bars(
    rows: Sequence[tuple[str, dict[str, float], float]], titles: dict[str, str], what: str, *, is_time: bool
) -> str:
    """Stacked bars on one scale, with their figures as a table.

    Args:
        rows: name, amounts by part, and their total; a row without parts is one bar.
        titles: of parts, in the order in which they are stacked; others follow under their own names.
    """
    used = [part for part in titles if any(amounts.get(part) for _, amounts, _ in rows)]
    used += list(dict.fromkeys(part for _, amounts, _ in rows for part in amounts if part not in titles))
    spare = iter(range(len(used)))
    colours = {part: part if part in PARTS else SPARE_COLOURS[next(spare) % len(SPARE_COLOURS)] for part in used}
    longest = max([max(total, sum(amounts.values())) for _, amounts, total in rows], default=0.0) or 1.0

    def show(value: float) -> str:
        return seconds(value, longest) if is_time else bytes_text(value)

    lines = []
    for name, amounts, total in rows:
        whole = sum(amounts.values())
        parts, spoken = [], []
        for part in used:
            amount = amounts.get(part, 0.0)
            if amount <= 0:
                continue
            share = f"{amount / whole:.1%}"
            spoken.append(f"{titles.get(part, part)} {show(amount)}, {share}")
            said = escape(f"{name}, {titles.get(part, part)}\n{show(amount)}\n{share}")
            width = 100 * amount / longest
            parts.append(f'<span style="width:{width:.3f}%;--c:var(--{colours[part]})" data-say="{said}"></span>')
        if not parts and total > 0:
            spoken.append("not broken down")
            said = escape(f"{name}\n{show(total)}\nnot broken down")
            parts.append(f'<span class="unknown" style="width:{100 * total / longest:.3f}%" data-say="{said}"></span>')
        label = escape(f"{name}: {show(total)}. {'; '.join(spoken)}")
        lines.append(
            f'<div class="bar-row{_row_class(name)}"><span class="bar-name">{escape(name)}</span>'
            f'<div class="bar" tabindex="0" role="img" aria-label="{label}">{"".join(parts)}</div>'
            f'<span class="bar-total">{show(total)}</span></div>'
        )
    legend = "".join(f'<li><i style="--c:var(--{colours[p]})"></i>{escape(titles.get(p, p))}</li>' for p in used)
    cells = [
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{show(amounts[part]) if part in amounts else NONE}</td>" for part in used)
        + f"<td>{show(total)}</td></tr>"
        for name, amounts, total in rows
    ]
    columns = ["policy", *(titles.get(part, part) for part in used), "total"]
    return (
        f'<figure data-bars aria-label="{escape(what)}"><ul class="legend">{legend}</ul>{"".join(lines)}'
        '<output class="readout" aria-live="polite"></output>'
        f"<details><summary>As a table</summary>{table(columns, cells, what)}</details></figure>"
    )


def _loads(report: Report) -> str:
    return heat_map(load_maps(report), report.layer_names, int(worst_layers(report.before)[0]))


def _timeline(report: Report) -> str:
    picker = ""
    if len(report.timelines) > 1:
        options = "".join(f'<option value="{i}">{escape(t.title)}</option>' for i, t in enumerate(report.timelines))
        picker = f'<span class="field"><label for="timeline">Run</label><select id="timeline">{options}</select></span>'
    legends = "".join(
        f'<ul class="legend" data-legend{"" if index == 0 else " hidden"}>{_kinds(timeline)}</ul>'
        for index, timeline in enumerate(report.timelines)
    )
    title = "" if picker else f" Shown: {escape(report.timelines[0].title)}."
    return f"""<p class="lead">What every rank does, lane by lane. In each layer ranks meet twice: to send tokens to
their experts, and to bring the results back.{title}</p>
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
<kbd>−</kbd>, to zoom, <kbd>0</kbd> for all of it; <kbd>↑</kbd> <kbd>↓</kbd> choose a lane, <kbd>n</kbd> <kbd>p</kbd>
the next and previous operation in it.</p>"""


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
    rows = [
        f'<tr><th scope="row"><button type="button" class="link" data-layer="{layer}">layer '
        f"{escape(report.layer_names[layer])}</button></th><td>{before_L[layer]:.3f}</td><td>{after_L[layer]:.3f}</td>"
        f"<td>{before_L[layer] / after_L[layer]:.2f}×</td></tr>"
        for layer in worst_layers(report.before)[:SHOWN_LAYERS].tolist()
    ]
    columns = ["layer", f"{report.before.title}, max/mean", f"{report.after.title}, max/mean", "gain"]
    return (
        '<p class="lead">By max/mean before, averaged over micro-steps. A layer takes as long as its busiest rank. '
        f"Choose one to see it above.</p>{table(columns, rows, 'Worst layers')}"
    )
