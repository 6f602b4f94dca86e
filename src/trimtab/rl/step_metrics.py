"""Metrics of an RL step: those of its plan or of its live choices, and seconds of its parts."""

from __future__ import annotations

import time
from collections.abc import Mapping

from trimtab.runtime import PlanReport


def plan_metrics(report: PlanReport) -> dict[str, float]:
    """Metrics of a plan, by their names in `metrics.jsonl`."""
    return {
        "moe/max_vio_before": report.max_vio_before,
        "moe/max_vio_after": report.max_vio_after,
        "moe/replicas": report.replicas,
        "moe/homes_moved": report.homes_moved,
        "moe/predicted_gain": report.predicted_gain,
        "moe/peak_rows_before": report.peak_rows_before,
        "moe/peak_rows_after": report.peak_rows_after,
        "memory/pool_bytes": report.pool_bytes,
        "memory/mirror_bytes": report.mirror_bytes,
        "memory/peer_bytes": report.peer_memory_bytes,
        "memory/free_bytes": report.free_bytes,
        "moving_s": report.moving_s,
        "planning_s": report.planning_s,
        "waited_s": report.waited_s,
        "ahead_s": report.ahead_s,
        "known_ahead": report.known_ahead,
    }


def live_metrics(counted: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step in mode `live`, by the names that they have in other modes.

    Args:
        counted: of `Session.take_metrics`.
    """
    return {
        "moe/max_vio_before": counted["live/max_vio_before"],
        "moe/max_vio_after": counted["live/max_vio_after"],
        "moe/replicas": counted["live/replicas"],
    }


class StepClock:
    """Measures consecutive parts of a step.

    Attributes:
        laps: seconds of each part, by name.
    """

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End the current part, give it a name, and start the next one."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
