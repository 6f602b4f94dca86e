"""Tables that compare balancers: step times with memory, balance with replicas, cases of a sweep, a waterfall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.report.model import PolicyResult
from trimtab.report.number_text import NONE, bytes_text, digits, number, seconds
from trimtab.report.tables import Row, TableData, without_empty_columns
from trimtab.simulator.comparison import fits
from trimtab.simulator.pipeline import BUBBLE
from trimtab.simulator.sensitivity import Sensitivity
from trimtab.simulator.simulated_case import SimulatedCase
from trimtab.simulator.step import SEQUENCES, WAITING, SimulatedStep

OURS = "trimtab"
EPLB_COLUMN, IDEAL_COLUMN, FITS_COLUMN, FAR_COLUMN = "over eplb", "of ideal", "fits", "far rows"
MOVES_COLUMN = "first moves"
TIME_COLUMNS = ("step time", "speed-up", FITS_COLUMN, EPLB_COLUMN, IDEAL_COLUMN, MOVES_COLUMN, "memory")
BALANCE_COLUMNS = ("max/mean", "p99", "replicas", FAR_COLUMN)


# The reason, wherever a table shows it.
ABOVE_EVEN = "above 100% where a plan also balances sequences, or sends fewer rows to other ranks than even routing"


def above_even(part: float) -> bool:
    """Whether a step time with even routing, divided by another one, is shown as more than 100%."""
    return round(part, 3) > 1


def by_time(policies: Sequence[PolicyResult]) -> list[PolicyResult]:
    """Balancers by step time, the ideal run last."""
    return sorted(policies, key=lambda policy: (policy.is_ideal, policy.step_time_s))


def policies_table(
    policies: Sequence[PolicyResult], title: str = "Recompute and update of one step", *, marks_fastest: bool = True
) -> TableData:
    """Step time and memory of each balancer. Columns without any figure are left out.

    Args:
        marks_fastest: mark the fastest of those that fit the device, or of all if none fits.
    """
    longest = max(policy.step_time_s for policy in policies) or 1.0
    real = [policy for policy in by_time(policies) if not policy.is_ideal]
    fastest = next(iter([policy for policy in real if policy.fits is not False] or real), None)
    rows = tuple(
        Row(
            _marked(policy, is_fastest=marks_fastest and policy is fastest and len(real) > 1),
            (
                _step_time(policy.step_time_s, longest),
                f"{number(policy.speedup, '.2f')}x",
                NONE if policy.fits is None else "yes" if policy.fits else "no",
                NONE if policy.speedup_over_eplb is None else f"{number(policy.speedup_over_eplb, '.2f')}x",
                number(policy.fraction_of_balanced, ".1%"),
                _step_time(policy.first_moves_s, longest) if policy.first_moves_s else NONE,
                NONE if policy.fits is None else bytes_text(sum(policy.memory_bytes.values())),
            ),
            about=policy.about,
            bar=policy.step_time_s / longest,
            is_ours=policy.name == OURS,
        )
        for policy in by_time(policies)
    )
    return without_empty_columns(TableData(title, ("policy", *TIME_COLUMNS), rows))


def _step_time(step_time_s: float, longest_s: float) -> str:
    """One unit for all rows, with enough digits to tell balancers apart."""
    return f"{step_time_s:.3f} s" if longest_s >= 1 else f"{step_time_s * 1e3:.2f} ms"


def balance_and_replicas(policies: Sequence[PolicyResult]) -> TableData:
    """Balance, replicas and rows between nodes of each balancer. Columns without any figure are left out."""
    rows = tuple(
        Row(
            policy.name,
            (
                number(policy.max_over_mean, ".3f"),
                number(policy.max_over_mean_p99, ".3f"),
                number(policy.replicas_per_instance, ".1f"),
                number(policy.cross_node_fraction, ".1%"),
            ),
            is_ours=policy.name == OURS,
        )
        for policy in by_time(policies)
    )
    return without_empty_columns(TableData("Balance and replicas", ("policy", *BALANCE_COLUMNS), rows))


def _marked(policy: PolicyResult, *, is_fastest: bool) -> str:
    """The name, with what a reader must know about the row."""
    marks = [policy.mark, "fastest" if is_fastest else "", "ideal" if policy.is_ideal else ""]
    text = ", ".join(filter(None, marks))
    return f"{policy.name} ({text})" if text else policy.name


def sweep_table(cases: Sequence[SimulatedCase]) -> TableData:
    """Ranks, slots, micro-steps and dispatcher of every case, and seconds of a step.

    The column `fits` counts the balancers that fit the device, if not all or none do.
    """
    unit, factor = ("Seconds", 1.0) if max(case.seconds("static") for case in cases) >= 1 else ("Milliseconds", 1e3)

    def time(case: SimulatedCase, name: str) -> str:
        return digits(factor * case.seconds(name)) if name in case.outcomes else NONE

    rows = tuple(
        Row(
            str(case.ranks),
            (
                str(case.slots),
                str(case.micro_steps or case.outcomes["static"].plan.num_micro_steps),
                case.dispatcher or NONE,
                f"{case.fastest} {time(case, case.fastest)}",
                _fits_text(case),
                *(time(case, name) for name in ("trimtab", "eplb", "static", "balanced")),
            ),
        )
        for case in cases
    )
    columns = (
        "ranks", "slots", "micro-steps", "sent", "fastest", "fits", "trimtab", "eplb", "static", "ideal",
    )  # fmt: skip
    return without_empty_columns(TableData(f"{unit} of a step in every case", columns, rows))


def sensitivity_table(rows: Sequence[Sensitivity]) -> TableData:
    """Seconds of balancers after each change of the cluster, and what `trimtab` is ahead of the best other one."""
    names = [*rows[0].step_time_s]
    longest = max(max(row.step_time_s.values()) for row in rows)
    shown = []
    for row in rows:
        cells = [_step_time(row.step_time_s[name], longest) for name in names]
        others = [seconds for name, seconds in row.step_time_s.items() if name != OURS]
        ahead = min(others) / row.step_time_s[OURS] - 1 if OURS in row.step_time_s and others else None
        shown.append(Row(row.name, (*cells, NONE if ahead is None else f"{ahead:+.1%}"), about=row.about))
    columns = ("what the price may lack", *names, f"{OURS} ahead")
    return without_empty_columns(TableData("Step time under other assumptions", columns, tuple(shown)))


def _fits_text(case: SimulatedCase) -> str:
    found = [fits(case.case, outcome) for outcome in case.real.values()]
    return "yes" if all(found) else f"{sum(found)} of {len(found)}" if any(found) else "no"


# Causes of a change, and the causes of `SimulatedStep.causes_s` that it has.
CHANGES = {
    "waiting": (WAITING,),
    "sequences": (SEQUENCES,),
    "moves": ("migration",),
    "copies": ("transfers",),
    "planning": ("planning",),
    "rows": ("dispatch",),
    "bubble": (BUBBLE,),
    "other": ("attention", "experts", "optimizer"),
}
ABOUT_CHANGE = {
    "waiting": "for the busiest rank's experts",
    "sequences": "uneven sequences",
    "moves": "homes and mirrors",
    "copies": "weights and gradients of replicas",
    "planning": "that ranks wait for",
    "rows": "dispatch and combine",
    "bubble": "of the pipeline",
    "other": "experts, dense parts, optimizer",
}


@dataclass(frozen=True)
class WaterfallRow:
    """A total, or a change from the row before.

    Attributes:
        seconds: of the total, or the change.
        after: seconds of the step with this and all earlier changes.
        is_total: whether it is a total.
    """

    name: str
    seconds: float
    after: float
    is_total: bool = False


def waterfall_rows(before: SimulatedStep, after: SimulatedStep, name: str) -> list[WaterfallRow]:
    """From a step of `static` to one of the strategy `name`. The changes add up to the difference.

    `bubble` is one only with a pipeline.
    """
    rows = [WaterfallRow("static", before.step_time_s, before.step_time_s, is_total=True)]
    now = before.step_time_s
    for change, causes in CHANGES.items():
        if not set(causes) <= before.causes_s.keys():
            continue
        difference = sum(after.causes_s[cause] - before.causes_s[cause] for cause in causes)
        now += difference
        rows.append(WaterfallRow(change, difference, now))
    return [*rows, WaterfallRow(name, after.step_time_s, after.step_time_s, is_total=True)]


def waterfall_table(rows: Sequence[WaterfallRow], span: float) -> TableData:
    """The rows as a table; changes have a sign."""

    def text(row: WaterfallRow) -> str:
        sign = "" if row.is_total or row.seconds < 0 else "+"
        return f"{sign}{seconds(row.seconds, span)}"

    largest = max(row.after for row in rows) or 1.0
    return TableData(
        f"From static to {rows[-1].name}",
        ("cause", "change", "step"),
        tuple(
            Row(row.name, (text(row), seconds(row.after, span)), about=ABOUT_CHANGE.get(row.name, ""),
                bar=row.seconds / largest if row.is_total else None, is_ours=row is rows[-1])
            for row in rows
        ),
    )  # fmt: skip
