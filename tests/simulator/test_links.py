"""Lanes of links: completion times next to all-to-alls."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.simulator_reference import Lane
from trimtab.simulator.links import FAR_IN, FAR_OUT, GRADIENTS, HOST_IN, NEAR_IN, NEAR_OUT, idle_links, occupy, serve

SECONDS = st.one_of(st.just(0.0), st.floats(0.01, 20))
LANES = [int(n) for n in (NEAR_OUT, NEAR_IN, FAR_OUT, FAR_IN, HOST_IN, GRADIENTS + NEAR_OUT, GRADIENTS + FAR_IN)]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS), max_size=8),
    st.lists(st.tuples(st.sampled_from(LANES), st.floats(0, 60), SECONDS), max_size=8),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_completion_times_equal_those_of_a_fluid_lane(
    calls: list[tuple[float, float, float]], transfers: list[tuple[int, float, float]], spare: float
) -> None:
    links, time = idle_links(2, 2), 0.0
    near: list[tuple[float, float]] = []
    far: list[tuple[float, float]] = []
    for gap, near_s, far_s in calls:
        time += gap
        occupy(links, 1, time, near_s, far_s)
        near.append((time, time + near_s))
        far.append((time, time + far_s))
        time += max(near_s, far_s)
    lanes = {lane: Lane() for lane in LANES}
    for lane, release, work in transfers:
        busy = [] if lane == HOST_IN else far if lane in (FAR_OUT, FAR_IN, GRADIENTS + FAR_IN) else near
        expected = lanes[lane].serve(release, work, busy, spare)
        assert serve(links, lane, 1, release, work, spare) == pytest.approx(expected, rel=1e-9)
        assert links.free[lane, 1] == pytest.approx(expected, rel=1e-9)


def test_transfers_get_the_remaining_rate_during_an_all_to_all() -> None:
    links = idle_links(1, 2)
    occupy(links, 0, 10.0, 4.0, 1.0)
    # Three seconds before it, one of the four during it, and then the last.
    assert serve(links, NEAR_IN, 0, 7.0, 5.0, 0.25) == 15.0
    # Behind the first on its lane; nothing else is there.
    assert serve(links, NEAR_IN, 0, 0.0, 2.0, 0.25) == 17.0
    # Done within the all-to-all; after that between nodes; and beside it from host memory.
    assert serve(links, NEAR_OUT, 0, 10.0, 1.0, 0.5) == 12.0
    assert serve(links, FAR_OUT, 0, 11.0, 1.0, 0.0) == 12.0
    assert serve(links, HOST_IN, 0, 10.0, 2.0, 0.0) == 12.0
    # Another rank's lanes are idle.
    assert math.isclose(serve(idle_links(2, 1), NEAR_IN, 1, 3.0, 2.0, 0.0), 5.0)


def test_all_to_alls_of_two_passes_are_remembered() -> None:
    """As far back as any transfer may begin: two passes of two all-to-alls a layer."""
    layers = 3
    links = idle_links(1, layers)
    for call in range(2 * 2 * layers + 2):
        occupy(links, 0, 10.0 * call, 5.0, 5.0)
    # The first two are forgotten, all others not: 5 s of work take 5 s in the gaps up to each.
    assert serve(links, NEAR_IN, 0, 20.0, 10.0 * layers, 0.0) == 20.0 + 2 * 10.0 * layers
    assert np.isfinite(links.free).all()
