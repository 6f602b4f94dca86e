"""How much of a recorded step follows the busiest rank, and what even loads could gain there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.array_type import Array
from trimtab.runtime.ranks.recorder import BACKWARD, COMBINE, DISPATCH, EXPERTS, Recording

# Collectives: no rank continues before the last one has started.
COLLECTIVES = (DISPATCH, COMBINE, DISPATCH + BACKWARD, COMBINE + BACKWARD)


def busiest_part(recordings: Sequence[Recording]) -> float:
    """The part of a step that goes to the experts of the rank that takes longest, between two collectives each.

    Args:
        recordings: of all ranks, in one step. The n-th collective of a rank is the n-th of all ranks.

    Returns:
        0 to 1; 0 without recordings.
    """
    if not recordings:
        return 0.0
    most = max(int(np.isin(each.kind_N, COLLECTIVES).sum()) for each in recordings) + 1
    slowest_s = np.max([_expert_seconds(each, most) for each in recordings], axis=0).sum()
    return float(slowest_s / np.mean([each.end_N[-1] - each.start_N[0] for each in recordings]))


def possible_speedup(busiest: float, max_vio: float) -> float:
    """Step time divided by that with even loads, if the busiest rank's part shrinks with its load.

    Args:
        busiest: `busiest_part` of the step.
        max_vio: load of the busiest rank over the mean, minus 1.
    """
    return 1 / (1 - busiest * max_vio / (1 + max_vio))


def _expert_seconds(recording: Recording, count: int) -> Array:
    """`[count]`: seconds of expert products after each number of collectives."""
    number_N = np.cumsum(np.isin(recording.kind_N, COLLECTIVES))
    is_expert_N = np.isin(recording.kind_N, (EXPERTS, EXPERTS + BACKWARD))
    seconds_N = (recording.end_N - recording.start_N)[is_expert_N]
    return np.bincount(number_N[is_expert_N], seconds_N, minlength=count)
