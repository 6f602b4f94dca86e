"""Parts and timelines of recordings, compared with figures computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.reports import training_page
from trimtab.report.html import page_of
from trimtab.rl.report import CHART_PLACES, NAMES, parts_of, rollout_charts, timeline_of, with_waiting
from trimtab.runtime.ranks.recorder import BACKWARD, COMBINE, DISPATCH, EXPERTS, OTHER, SUMMING, WAITING, Recording
from trimtab.simulator.recorded_operations import LANES


def recording(*done: tuple[int, int, float], micro_steps: tuple[tuple[int, float, float], ...] = ()) -> Recording:
    """A recording of consecutive activities: kind, layer and seconds of each."""
    kinds, layers, seconds = zip(*done, strict=True)
    ends = np.cumsum(seconds)
    starts = ends - seconds
    return Recording(np.array(kinds, np.uint8), np.array(layers, np.int16), starts, ends, micro_steps)


def two_ranks() -> list[Recording]:
    fast = recording((OTHER, -1, 1), (DISPATCH, 0, 3), (EXPERTS, 0, 2), (COMBINE, 0, 5), (SUMMING, -1, 1))
    slow = recording(
        (OTHER, -1, 3), (DISPATCH, 0, 1), (EXPERTS, 0, 5), (WAITING, 0, 1), (COMBINE, 0, 1), (SUMMING, -1, 1)
    )
    return [fast, slow]


def as_rows(done: Recording) -> list[tuple[str, float, float]]:
    columns = (done.kind_N.tolist(), done.start_N.tolist(), done.end_N.tolist())
    return [(NAMES[kind], start, end) for kind, start, end in zip(*columns, strict=True) if end > start]


def test_a_collective_starts_when_the_last_rank_reaches_it() -> None:
    fast, slow = with_waiting(two_ranks())
    assert as_rows(fast) == [
        ("attention and other", 0, 1), ("waiting for other ranks", 1, 3), ("dispatch", 3, 4), ("experts", 4, 6),
        ("waiting for other ranks", 6, 10), ("combine", 10, 11), ("gradient sums", 11, 12),
    ]  # fmt: skip
    assert as_rows(slow) == as_rows(two_ranks()[1])


def test_recordings_with_different_collectives_stay_unchanged() -> None:
    odd = [recording((OTHER, -1, 1), (DISPATCH, 0, 1)), recording((OTHER, -1, 1), (COMBINE, 0, 1))]
    assert [as_rows(r) for r in with_waiting(odd)] == [as_rows(r) for r in odd]


def test_parts_are_means_over_ranks_and_add_up_to_the_step() -> None:
    parts = parts_of(with_waiting(two_ranks()), 36.0, {"planning": 0.5, "migration": 0.25})
    assert sum(parts.values()) == pytest.approx(36.0)
    # Means scaled by 3: 12 seconds were recorded.
    assert parts == pytest.approx({
        "attention": 3.75, "planning": 1.5, "migration": 0.75, "dispatch": 6, "experts": 10.5, "imbalance": 9,
        "transfers": 1.5, "optimizer": 3,
    })  # fmt: skip


def test_replicas_are_those_of_one_layer_of_a_micro_step() -> None:
    assert [policy.replicas_per_instance for policy in training_page("a run", replicas=6).policies] == [2, 2]


@pytest.mark.parametrize(
    ("static_s", "marked"), [([1.2, 1.3] * 8, "trimtab"), ([0.8, 0.9] * 8, "static"), ([0.5, 0.5, 2.0] * 5, "")]
)
def test_the_fastest_is_marked_if_the_steps_tell_which_it_is(static_s: list[float], marked: str) -> None:
    page = page_of(training_page("a run", static_s=static_s))
    assert [name for name in ("static", "trimtab") if f"{name} (fastest)" in page] == [marked] * bool(marked)


def test_the_timeline_is_the_update_of_the_median_micro_step() -> None:
    passes = ((0, 0.0, 1.0), (1, 1.0, 2.0), (2, 2.0, 3.0), (0, 3.0, 8.0), (1, 8.0, 9.0), (2, 9.0, 12.0))
    done = [(OTHER, -1, 9.0), (EXPERTS, 1, 1.0), (COMBINE, 1, 0.5), (WAITING, 1, 0.5), (EXPERTS + BACKWARD, 1, 1.0)]
    other = [(OTHER, -1, 9.0), (EXPERTS, 1, 2.5), (COMBINE, 1, 0.5)]
    ranks = [recording(*done, micro_steps=passes), recording(*other, micro_steps=passes)]
    timeline = timeline_of("trimtab", ranks, LANES.index("network"))
    assert timeline.title == "trimtab, update of micro-step 2"
    columns = (getattr(timeline, f"{name}_N").tolist() for name in ("rank", "lane", "kind", "layer", "start", "end"))
    assert [(rank, LANES[lane], NAMES[kind], *others) for rank, lane, kind, *others in zip(*columns, strict=True)] == [
        (0, "compute", "experts", 1, 0.0, 1.0),
        (0, "network", "combine", 1, 1.0, 1.5),
        (0, "compute", "waiting for replicas or their gradients", 1, 1.5, 2.0),
        (0, "compute", "experts, backward", 1, 2.0, 3.0),
        (1, "compute", "experts", 1, 0.0, 2.5),
        (1, "network", "combine", 1, 2.5, 3.0),
    ]


@pytest.mark.parametrize(("ranks_per_node", "lane"), [(2, "node link"), (1, "network")])
def test_exchanges_are_shown_on_the_link_that_they_use(ranks_per_node: int, lane: str) -> None:
    for timeline in training_page("a run", ranks_per_node=ranks_per_node).timelines:
        assert {LANES[number] for number in timeline.lane_N} == {"compute", lane}


def test_charts_of_rollouts_average_consecutive_steps() -> None:
    assert rollout_charts([]) == ()
    assert rollout_charts([{"step": 0, "response_length": 3.0}]) == ()
    steps = [
        {"step": step, "rollout/longest_response": 2 * step, "response_length": step, "rollout/occupancy": step / 100}
        for step in range(3, 3 + 2 * CHART_PLACES)
    ]
    lengths, occupancy = rollout_charts(steps)
    first = range(3, 3 + 2 * CHART_PLACES, 2)
    assert list(lengths.places) == [str(step) for step in first]
    assert lengths.lines[0].values == [2 * step + 1 for step in first]
    assert lengths.lines[1].values == [step + 0.5 for step in first]
    assert occupancy.lines[0].values == pytest.approx([(step + 0.5) / 100 for step in first])
    assert [len(chart.places) for chart in rollout_charts(steps[:4])] == [4, 4]
    separate = [metrics | {"rollout/expert_max_vio": metrics["step"] / 10} for metrics in steps]
    assert rollout_charts(separate)[2].lines[0].values == pytest.approx([(step + 0.5) / 10 for step in first])
