"""The table of a sweep: step times of every case, a row each."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.report.number_text import NONE, digits
from trimtab.report.table_data import Row, TableData
from trimtab.simulator.comparison import fits
from trimtab.simulator.simulated_case import SimulatedCase

COLUMNS = ("slots", "micro-steps", "fastest", "fits", "trimtab", "eplb", "static", "ideal")


def sweep_table(cases: Sequence[SimulatedCase]) -> TableData:
    """Ranks, slots, micro-steps and dispatcher of every case, and seconds of a step.

    The column `fits` counts the balancers that fit the device, if not all or none do.
    """
    unit, factor = ("Seconds", 1.0) if max(case.seconds("static") for case in cases) >= 1 else ("Milliseconds", 1e3)

    def time(case: SimulatedCase, name: str) -> str:
        return digits(factor * case.seconds(name)) if name in case.outcomes else NONE

    is_named = any(case.dispatcher for case in cases)
    rows = tuple(
        Row(
            str(case.ranks),
            (
                str(case.slots),
                str(case.micro_steps or case.outcomes["static"].plan.num_micro_steps),
                *([str(case.dispatcher)] if is_named else []),
                f"{case.fastest} {time(case, case.fastest)}",
                _fits(case),
                *(time(case, name) for name in ("trimtab", "eplb", "static", "balanced")),
            ),
        )
        for case in cases
    )
    columns = (*COLUMNS[:2], *(["sent"] if is_named else []), *COLUMNS[2:])
    return TableData(f"{unit} of a step in every case", ("ranks", *columns), rows)


def _fits(case: SimulatedCase) -> str:
    found = [fits(case.case, outcome) for outcome in case.real.values()]
    return "yes" if all(found) else f"{sum(found)} of {len(found)}" if any(found) else "no"
