"""Rows of a timeline: every operation is there, and operations of a row do not overlap."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from trimtab.report.model import Timeline
from trimtab.report.timelines import rows_of

OPERATIONS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 40), st.integers(0, 15)), min_size=0, max_size=40
)


def timeline_of(operations: list[tuple[int, int, int, int]]) -> Timeline:
    """From rank, lane, start and length in microseconds."""
    table = np.array(operations, np.int64).reshape(-1, 4)
    count = len(table)
    start = table[:, 2] * 1e-6
    return Timeline(
        "t", ("work",), np.zeros(count, np.uint8), table[:, 1].astype(np.uint8), table[:, 0].astype(np.int16),
        np.full(count, -1, np.int16), start, start + table[:, 3] * 1e-6,
    )  # fmt: skip


@given(OPERATIONS)
def test_every_operation_has_one_place_and_rows_do_not_overlap(operations: list[tuple[int, int, int, int]]) -> None:
    rows = rows_of(timeline_of(operations), 1e-9)
    assert sorted(rows.order_N.tolist()) == list(range(len(operations)))
    seen = set()
    for w in range(len(rows.rank_W)):
        first, last = int(rows.starts_W1[w]), int(rows.starts_W1[w + 1])
        assert first < last
        key = (int(rows.rank_W[w]), int(rows.lane_W[w]), int(rows.row_W[w]))
        assert key not in seen
        seen.add(key)
        for place in range(first, last):
            rank, lane, start, length = operations[int(rows.order_N[place])]
            assert (rank, lane) == key[:2]
            assert rows.start_N[place] == start * 1000
            assert rows.end_N[place] == (start + length) * 1000
            if place > first:
                assert rows.start_N[place] >= rows.end_N[place - 1]


@given(OPERATIONS)
@example([(0, 0, 1, 2), (0, 0, 3, 1)])
def test_rows_are_as_few_as_concurrent_operations(operations: list[tuple[int, int, int, int]]) -> None:
    operations = [operation for operation in operations if operation[3] > 0]
    rows = rows_of(timeline_of(operations), 1e-9)
    for rank in range(3):
        for lane in range(3):
            mine = [(start, start + length) for r, ln, start, length in operations if (r, ln) == (rank, lane)]
            busiest = max((sum(start <= time < end for start, end in mine) for time, _ in mine), default=0)
            assert int(((rows.rank_W == rank) & (rows.lane_W == lane)).sum()) == busiest
