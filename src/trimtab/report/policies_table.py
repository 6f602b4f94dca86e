"""The table that compares balancers: step time, speed-up, balance, replicas."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.report.model import PolicyResult
from trimtab.report.number_text import NONE, number
from trimtab.report.table_data import Row, TableData

OURS = "trimtab"
IDEAL_COLUMN, FAR_COLUMN = "of ideal", "far rows"
COLUMNS = ("step time", "speed-up", IDEAL_COLUMN, "max/mean", "p99", "replicas", FAR_COLUMN)


def policies_table(policies: Sequence[PolicyResult], title: str = "Recompute and update of one step") -> TableData:
    """A row for each balancer. Columns without any figure are left out."""
    longest = max(policy.step_time_s for policy in policies) or 1.0
    figures = [
        (
            f"{policy.step_time_s:.3f} s",
            f"{number(policy.speedup, '.2f')}x",
            number(policy.fraction_of_balanced, ".1%"),
            number(policy.max_over_mean, ".3f"),
            number(policy.max_over_mean_p99, ".3f"),
            number(policy.replicas_per_instance, ".1f"),
            number(policy.cross_node_fraction, ".1%"),
        )
        for policy in policies
    ]
    kept = [index for index in range(len(COLUMNS)) if any(row[index] != NONE for row in figures)]
    rows = tuple(
        Row(
            policy.name,
            tuple(row[index] for index in kept),
            about=policy.about,
            bar=policy.step_time_s / longest,
            is_ours=policy.name == OURS,
        )
        for policy, row in zip(policies, figures, strict=True)
    )
    return TableData(title, ("policy", *(COLUMNS[index] for index in kept)), rows)
