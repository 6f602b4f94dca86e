"""Counters of transfers: their names, waiting times, clearing."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab.runtime.transfer import counters as counters_module
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.streams import BackgroundCopies


def test_every_metric_is_its_own_counter() -> None:
    counters = Counters(
        peer_bytes=1, host_bytes=2, mirror_bytes=3, gradient_bytes=4, moved_bytes=5, refresh_s=6.0, waited_s=7.0,
        unplanned_micro_steps=8, live_calls=9, mixed_instances=10, abandoned_backwards=11,
        late_micro_steps=12, planning_waited_s=13.0, deviating_rows=14, agreeing=15, compared=20,
    )  # fmt: skip
    expected = {
        "transfer/peer_bytes": 1, "transfer/host_bytes": 2, "transfer/mirror_bytes": 3, "transfer/gradient_bytes": 4,
        "transfer/moved_bytes": 5, "transfer/refresh_s": 6.0, "transfer/exposed_s": 7.0,
        "moe/unplanned_micro_steps": 8, "moe/live_layer_calls": 9, "moe/mixed_instances": 10,
        "moe/abandoned_backwards": 11, "moe/late_micro_steps": 12, "plan/waited_s": 13.0,
        "moe/deviating_rows": 14, "moe/replay_agreement": 0.75,
    }  # fmt: skip
    assert counters.metrics() == expected
    counters.clear()
    # It has a value only where rows were compared.
    expected.pop("moe/replay_agreement")
    assert counters.metrics() == dict.fromkeys(expected, 0)


def test_cpu_time_of_copies_is_counted_once() -> None:
    copies = BackgroundCopies(torch.device("cpu"))
    source = torch.ones(1 << 20)
    for _ in range(2):
        copies.start([(torch.zeros(1 << 20), source)])()
        assert copies.take_cpu_s() > 0 == copies.take_cpu_s()
    copies.close()


class Event:
    """An event of a device at a time in milliseconds, which is reached when the host waits for it."""

    now = 0.0

    def __init__(self, **_: Any) -> None:
        self.time, self.is_reached = 0.0, False

    def record(self) -> None:
        self.time = Event.now

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True

    def elapsed_time(self, end: Event) -> float:
        assert end.is_reached
        return end.time - self.time


def pass_time(milliseconds: float) -> None:
    Event.now += milliseconds


@pytest.mark.parametrize("on_device", [False, True])
def test_exposed_time_is_that_of_all_waits(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_device:
        monkeypatch.setattr(streams, "has_streams", lambda device: True)
        monkeypatch.setattr(counters_module, "torch", SimpleNamespace(cuda=SimpleNamespace(Event=Event)))
    else:
        monkeypatch.setattr(counters_module, "time", SimpleNamespace(perf_counter=lambda: Event.now / 1e3))
    # Waits of 128 ms, with work between them.
    counters = Counters()
    for milliseconds in (5.0, 20.0, 100.0):
        counters.wait([partial(pass_time, milliseconds), partial(pass_time, 1.0)], torch.device("cpu"))
        pass_time(1000.0)
    assert counters.metrics()["transfer/exposed_s"] == pytest.approx(0.128)
