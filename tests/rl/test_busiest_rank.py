"""How much of a step follows the busiest rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.rl.busiest_rank import busiest_part, possible_speedup
from trimtab.runtime.ranks.recorder import BACKWARD, COMBINE, DISPATCH, EXPERTS, OTHER, WAITING, Recording

# A layer's forward, and its backward.
FORWARD = (OTHER, DISPATCH, EXPERTS, COMBINE)
BACKWARDS = (OTHER + BACKWARD, COMBINE + BACKWARD, EXPERTS + BACKWARD, DISPATCH + BACKWARD)
SECONDS = st.floats(0.01, 2.0)


def recording(kinds: list[int], seconds: list[float]) -> Recording:
    ends = np.cumsum(seconds)
    return Recording(
        np.array(kinds, np.uint8), np.zeros(len(kinds), np.int16), ends - np.array(seconds), ends, ((0, 0.0, ends[-1]),)
    )


@given(
    expert_s=st.lists(st.tuples(SECONDS, SECONDS, st.booleans()), min_size=1, max_size=5),
    other_s=SECONDS,
    stops=st.integers(0, 3),
)
def test_the_slowest_rank_counts_between_two_collectives(
    expert_s: list[tuple[float, float, bool]], other_s: float, stops: int
) -> None:
    """Of two ranks, whose experts are interrupted `stops` times; a rank's other activities fill the step."""
    recordings = []
    length = sum(first + second for first, second, _ in expert_s) + 10 * other_s * len(expert_s) + 1.0
    for rank in range(2):
        kinds, seconds = [], []
        for *both_s, is_backward in expert_s:
            for kind in BACKWARDS if is_backward else FORWARD:
                is_expert = kind in (EXPERTS, EXPERTS + BACKWARD)
                for stop in range(stops + 1 if is_expert else 1):
                    kinds += [WAITING, kind] if stop else [kind]
                    seconds += [0.0] * (stop > 0) + [both_s[rank] / (stops + 1) if is_expert else other_s]
        recordings.append(recording([*kinds, OTHER], [*seconds, length - sum(seconds)]))
    expected = sum(max(first, second) for first, second, _ in expert_s) / length
    assert busiest_part(recordings) == pytest.approx(expected)


def test_ranks_without_recordings_have_no_part() -> None:
    assert busiest_part([]) == 0.0


@given(experts_s=st.lists(SECONDS, min_size=2, max_size=8), rest_s=SECONDS)
def test_even_loads_give_what_is_possible(experts_s: list[float], rest_s: float) -> None:
    """Experts take their rank's time; with even loads they take the mean."""
    busiest_s, mean_s = max(experts_s), float(np.mean(experts_s))
    found = possible_speedup(busiest_s / (rest_s + busiest_s), busiest_s / mean_s - 1)
    assert found == pytest.approx((rest_s + busiest_s) / (rest_s + mean_s))
