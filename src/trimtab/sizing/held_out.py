"""Placements of a rollout engine, judged on routing of later steps, which they were not made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.placement.serving_placement import count_parts, fill_slots, slot_loads
from trimtab.planner.plan.workload import max_over_mean
from trimtab.trace import TraceReader
from trimtab.trace.store import MemoryReader

# Steps after its own for which a placement is judged, and the rise of max/mean from which a refresh pays.
LATER_STEPS, LEAST_RISE = 4, 0.01


def steps_parts(trace: TraceReader) -> list[Array]:
    """`count_parts` of the last steps of a trace, of two halves of its sequences if it has one step."""
    whole = trace.read()
    steps = np.unique(whole.steps)[-LATER_STEPS - 1 :]
    chosen: Iterable[Array] = (np.flatnonzero(whole.steps == step) for step in steps)
    if len(steps) == 1:
        chosen = np.array_split(np.arange(whole.num_sequences), 2)
    return [count_parts(MemoryReader(whole.select(sequences), trace)) for sequences in chosen]


def later_max_over_mean(
    steps: Sequence[Array], num_slots: int, num_ranks: int, ranks_per_node: int
) -> tuple[list[float], float]:
    """Max/mean of rank loads of placements that are kept for later steps, and in the engine's own order.

    Args:
        steps: `[M, L, E]` counts of each step.

    Returns:
        By number of steps since the placement's own, from 0: the mean over layers, parts and pairs of steps. The
        engine's order: of all but the first step.
    """
    found: list[list[float]] = [[] for _ in steps]
    for number, counts_MLE in enumerate(steps):
        slots_LP = fill_slots(counts_MLE, num_slots, num_ranks, ranks_per_node)
        for age, later_MLE in enumerate(steps[number:]):
            found[age].append(_mean(later_MLE, slots_LP, num_ranks))
    usual_LP = np.tile(np.arange(num_slots) % steps[0].shape[2], (steps[0].shape[1], 1))
    usual = [_mean(counts_MLE, usual_LP, num_ranks) for counts_MLE in steps[1:] or steps]
    return [float(np.mean(values)) for values in found], float(np.mean(usual))


def refresh_after(by_age: Sequence[float]) -> int | None:
    """Steps after which a new placement has at least 1% less max/mean than the kept one; None if not seen."""
    return next((age - 1 for age in range(2, len(by_age)) if by_age[age] >= (1 + LEAST_RISE) * by_age[1]), None)


def _mean(counts_MLE: Array, slots_LP: Array, num_ranks: int) -> float:
    return float(max_over_mean(slot_loads(counts_MLE, slots_LP, num_ranks)).mean())
