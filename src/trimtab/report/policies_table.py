"""Tables that compare balancers: step times with memory, and balance with replicas. Sorted by step time."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.report.model import PolicyResult
from trimtab.report.number_text import NONE, bytes_text, number
from trimtab.report.table_data import Row, TableData

OURS = "trimtab"
EPLB_COLUMN, IDEAL_COLUMN, FITS_COLUMN, FAR_COLUMN = "over eplb", "of ideal", "fits", "far rows"
MOVES_COLUMN = "moves left out"
TIME_COLUMNS = ("step time", "speed-up", FITS_COLUMN, EPLB_COLUMN, IDEAL_COLUMN, MOVES_COLUMN, "memory")
BALANCE_COLUMNS = ("max/mean", "p99", "replicas", FAR_COLUMN)


def by_time(policies: Sequence[PolicyResult]) -> list[PolicyResult]:
    """Balancers by step time, the ideal run last."""
    return sorted(policies, key=lambda policy: (policy.is_ideal, policy.step_time_s))


def policies_table(policies: Sequence[PolicyResult], title: str = "Recompute and update of one step") -> TableData:
    """Step time and memory of each balancer. Columns without any figure are left out.

    The fastest of those that fit the device is marked, or of all if none fits.
    """
    longest = max(policy.step_time_s for policy in policies) or 1.0
    real = [policy for policy in by_time(policies) if not policy.is_ideal]
    fastest = next(iter([policy for policy in real if policy.fits is not False] or real), None)
    rows = tuple(
        Row(
            _marked(policy, is_fastest=policy is fastest and len(real) > 1),
            (
                _step_time(policy.step_time_s, longest),
                f"{number(policy.speedup, '.2f')}x",
                NONE if policy.fits is None else "yes" if policy.fits else "no",
                NONE if policy.speedup_over_eplb is None else f"{number(policy.speedup_over_eplb, '.2f')}x",
                number(policy.fraction_of_balanced, ".1%"),
                _step_time(policy.moves_left_out_s, longest) if policy.moves_left_out_s else NONE,
                NONE if policy.fits is None else bytes_text(sum(policy.memory_bytes.values())),
            ),
            about=policy.about,
            bar=policy.step_time_s / longest,
            is_ours=policy.name == OURS,
        )
        for policy in by_time(policies)
    )
    return _without_empty_columns(TableData(title, ("policy", *TIME_COLUMNS), rows))


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
    return _without_empty_columns(TableData("Balance and replicas", ("policy", *BALANCE_COLUMNS), rows))


def _marked(policy: PolicyResult, *, is_fastest: bool) -> str:
    """The name, with what a reader must know about the row."""
    marks = [policy.mark, "fastest" if is_fastest else "", "ideal" if policy.is_ideal else ""]
    text = ", ".join(filter(None, marks))
    return f"{policy.name} ({text})" if text else policy.name


def _without_empty_columns(table: TableData) -> TableData:
    kept = [index for index in range(len(table.columns) - 1) if any(row.cells[index] != NONE for row in table.rows)]
    rows = tuple(
        Row(row.name, tuple(row.cells[index] for index in kept), row.about, row.bar, row.layer, row.is_ours)
        for row in table.rows
    )
    return TableData(table.title, (table.columns[0], *(table.columns[index + 1] for index in kept)), rows)
