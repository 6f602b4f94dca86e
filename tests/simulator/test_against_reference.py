"""The simulator equals a plain reference: work, step time, its parts and every operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.reference_flows import needs_of
from helpers.simulated_steps import Case, cases
from helpers.simulator_reference import Shown
from trimtab.planner.plan.rank_work import even_work, rank_work
from trimtab.timeline.recorded_operations import KINDS, LANES, Operations

EXACT = 1e-9


@settings(max_examples=60)
@given(cases(), st.sampled_from([1, 2]), st.booleans())
def test_work_equals_that_of_a_plain_count(case: Case, hops: int, even: bool) -> None:
    counts_MLRE, per_node = case.workload.estimated_MLRE, case.plan.ranks_per_node
    if even:
        work = even_work(counts_MLRE, per_node, case.costs)
    else:
        work = rank_work(case.plan.replicas, case.plan.home, counts_MLRE, per_node, case.costs, hops=hops)
    rows_MLRE = reference.estimated(case.workload)
    for m, layer in np.ndindex(case.plan.num_micro_steps, case.plan.num_layers):
        needs = needs_of(case.plan, rows_MLRE[m, layer], case.costs, m, layer, hops=hops, even=even)
        for name in ("experts", "moved", "near", "far", "hop"):
            found = getattr(work, f"{name}_MLR")[m, layer]
            np.testing.assert_allclose(found, [getattr(need, name) for need in needs], rtol=EXACT, atol=1e-12)
        assert work.loads_MLR[m, layer].tolist() == [need.load for need in needs]
    if not even:
        assert np.array_equal(work.loads_MLR, case.plan.rank_loads(case.workload))


@settings(max_examples=400)
@given(cases(), st.data())
def test_time_parts_and_operations_equal_those_of_the_reference(case: Case, data: st.DataObject) -> None:
    show = data.draw(st.integers(0, case.plan.num_micro_steps - 1))
    found, expected = case.run(show), case.reference(show)
    np.testing.assert_allclose(found.step_time_s, expected.seconds, rtol=EXACT)
    if not expected.ambiguous:
        np.testing.assert_allclose(found.hidden_planning_s, expected.hidden, rtol=EXACT, atol=EXACT * expected.seconds)
        assert list(found.parts_s) == list(expected.parts)
        parts = list(found.parts_s.values()), list(expected.parts.values())
        np.testing.assert_allclose(*parts, rtol=EXACT, atol=EXACT * expected.seconds)
    assert_same_operations(found.operations, expected.shown, EXACT * max(1e-3, expected.seconds))
    assert case.run().step_time_s == found.step_time_s, "showing a micro-step changes it"


def assert_same_operations(found: Operations, expected: Iterable[Shown], tolerance: float) -> None:
    """Of every kind on every lane of every rank in every layer, the same beginnings and ends."""
    places: list[dict[tuple[str, str, int, int], list[tuple[float, float]]]] = [defaultdict(list), defaultdict(list)]
    columns = found.kind_N, found.lane_N, found.rank_N, found.layer_N, found.spans_N2
    for kind, lane, rank, layer, (start, end) in zip(*map(np.ndarray.tolist, columns), strict=True):
        places[0][KINDS[kind], LANES[lane], rank, layer].append((start, end))
    for op in expected:
        places[1][op.kind, op.lane, op.rank, op.layer].append((op.start, op.end))
    for place in places:
        for key, every in place.items():
            # What takes no time but for rounding may be there or not.
            place[key] = sorted(span for span in every if span[1] - span[0] > 2 * tolerance)
    for key in places[0].keys() | places[1].keys():
        spans, meant = places[0].get(key, []), places[1].get(key, [])
        assert len(spans) == len(meant), f"{key}: {spans} instead of {meant}"
        for side in (0, 1):
            own, other = (sorted(span[side] for span in every) for every in (spans, meant))
            np.testing.assert_allclose(own, other, rtol=0, atol=tolerance)
