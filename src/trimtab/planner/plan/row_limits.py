"""Row limits as a guarantee: every instance of a plan keeps to them, or the step is refused before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner.plan.plan_settings import PlanSettings


def require_known_routes(settings: PlanSettings, mixed_GML: Sequence[Array]) -> None:
    """Raises InputError if the settings limit rows and routes are unknown, since such rows may go to any rank.

    Args:
        mixed_GML: of each group, `[M, L]` bool, instances with unknown routes.
    """
    if not settings.limits_rows:
        return
    for mixed_ML in mixed_GML:
        if mixed_ML.any():
            micro_step, layer = np.argwhere(mixed_ML)[0].tolist()
            raise InputError(
                f"rows of a rank can't be limited: micro-step {micro_step}, MoE layer {layer} has tokens of unknown "
                "route; record all routes, mark tokens that nothing reads as unread, or plan without max_rows_per_rank "
                "and exact"
            )


def keeps_to(settings: PlanSettings, loads_GMLR: Sequence[Array]) -> bool:
    """Whether no rank has more rows than the settings allow.

    Args:
        loads_GMLR: of each group, `[M, L, R]` int64 rows.
    """
    return not settings.limits_rows or not any(_excess(settings, loads_MLR).any() for loads_MLR in loads_GMLR)


def refuse(settings: PlanSettings, slots: int, plan_loads: Callable[[PlanSettings], list[Array]]) -> InputError:
    """The error for a step that can't keep to its limits. Names an instance, and what would be possible.

    Args:
        slots: of a rank.
        plan_loads: plans the step with other limits, with replicas wherever they may be; returns the loads.
    """
    loads_MLR = next(loads_MLR for loads_MLR in plan_loads(settings) if _excess(settings, loads_MLR).any())
    micro_step, layer = np.argwhere(_excess(settings, loads_MLR).any(axis=2))[0].tolist()
    loads_R = loads_MLR[micro_step, layer]
    where = f"in micro-step {micro_step}, MoE layer {layer}, the busiest rank would have {loads_R.max():,} rows"
    if settings.exact and (loads_R > _even(loads_MLR)[micro_step, layer]).any():
        return InputError(
            f"exact=True can't be kept: {where}, the mean is {loads_R.mean():,.1f}; use more than {slots} slots per "
            "rank, or exact=False"
        )
    return InputError(
        f"max_rows_per_rank={settings.max_rows_per_rank:,} can't be kept: {where}; the smallest that this step allows "
        f"with {slots} slots per rank is {_smallest_limit(settings, plan_loads):,}; raise the limit or the slots, or "
        "lower the token budget"
    )


def _smallest_limit(settings: PlanSettings, plan_loads: Callable[[PlanSettings], list[Array]]) -> int:
    """The smallest `max_rows_per_rank` that the step can keep, by bisection."""
    loads_GMLR = plan_loads(replace(settings, exact=True, max_rows_per_rank=None))
    possible = max(int(loads_MLR.max(initial=0)) for loads_MLR in loads_GMLR)
    impossible = max(int(_even(loads_MLR).max(initial=0)) for loads_MLR in loads_GMLR) - 1
    while possible - impossible > 1:
        limited = replace(settings, exact=False, max_rows_per_rank=(possible + impossible) // 2)
        if keeps_to(limited, plan_loads(limited)):
            possible = (possible + impossible) // 2
        else:
            impossible = (possible + impossible) // 2
    return possible


def _excess(settings: PlanSettings, loads_MLR: Array) -> Array:
    """`[M, L, R]` bool, ranks with more rows than allowed."""
    excess_MLR = np.zeros(loads_MLR.shape, bool)
    if settings.max_rows_per_rank is not None:
        excess_MLR |= loads_MLR > settings.max_rows_per_rank
    if settings.exact:
        excess_MLR |= loads_MLR > _even(loads_MLR)
    return excess_MLR


def _even(loads_MLR: Array) -> Array:
    """`[M, L, 1]` mean rows of a rank, rounded up."""
    return np.asarray(-(-loads_MLR.sum(axis=2, keepdims=True) // loads_MLR.shape[2]))
