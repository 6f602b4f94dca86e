"""The ring on one process, with copies that run only when they are waited for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.ring_harness import Harness
from trimtab.runtime.transfer import ring


def one_each(num_micro_steps: int, num_layers: int) -> list[list[list[int]]]:
    """One replica in every instance."""
    return [[[(m + layer) % 5] for layer in range(num_layers)] for m in range(num_micro_steps)]


def test_weights_are_prefetched_and_not_transferred_needlessly() -> None:
    harness = Harness(one_each(1, 5), places=3)
    ahead = {0: [0, 1, 2], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3, 4]}
    harness.ring.begin(0)
    for layer in range(5):
        harness.visit(0, layer)
        assert harness.fetched == [(0, there) for there in ahead.get(layer, [0, 1, 2, 3, 4])]
    # Three layers are still held when backward begins.
    again = {4: [], 3: [1]}
    for layer in (4, 3, 2, 1, 0):
        harness.visit(0, layer)
        assert harness.fetched[5:] == [(0, there) for there in again.get(layer, [1, 0])]


def test_predicted_weights_are_asked_for_several_at_once() -> None:
    harness = Harness(one_each(1, 12), places=5)
    for _ in range(2):
        harness.step()
        harness.late.clear()
        harness.ring.begin(0)
        asked = []
        for layer in range(12):
            before = len(harness.fetched)
            harness.visit(0, layer)
            asked.append(len(harness.fetched) - before)
    assert asked == [0, 0, 2, 0, 2, 0, 2, 0, 1, 0, 0, 0]
    assert harness.late == []


def test_start_of_a_micro_step_is_predicted_from_the_last_one() -> None:
    harness = Harness(one_each(2, 4), places=2)
    harness.ring.begin(0)
    for layer in (3, 1, 2, 0):
        harness.visit(0, layer)
    harness.step()
    harness.fetched.clear()
    harness.ring.begin(1)
    assert harness.fetched == [(1, 3), (1, 1)]


def one_forward_one_backward(harness: Harness, num_micro_steps: int, warm_up: int) -> None:
    """The order of a pipeline stage: `warm_up` forwards, then one forward and one backward at a time."""
    for m in range(num_micro_steps + warm_up):
        if m < num_micro_steps:
            harness.forward(m)
        if m >= warm_up:
            harness.backward(m - warm_up)


@pytest.mark.parametrize("warm_up", [0, 1, 3])
@pytest.mark.parametrize("kept", [ring.KEPT_EVENTS, 150])
def test_order_of_a_schedule_is_predicted(warm_up: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, replicas are prefetched for all layers except the step's first. The log is shortened."""
    monkeypatch.setattr(ring, "KEPT_EVENTS", kept)
    harness = Harness(one_each(6, 4), places=3)
    one_forward_one_backward(harness, 6, warm_up)
    harness.late.clear()
    # After a log of up to 300 events is cut to 150, a repeated refresh is not what was predicted.
    for step in range(6):
        harness.step()
        if step == 5:
            harness.step()
        one_forward_one_backward(harness, 6, warm_up)
    assert harness.late == []


def test_another_number_of_micro_steps_is_soon_predicted() -> None:
    harness = Harness(one_each(9, 4), places=3)
    one_forward_one_backward(harness, 4, warm_up=1)
    harness.step()
    harness.fetched.clear()
    one_forward_one_backward(harness, 9, warm_up=1)
    # Each instance twice, except those still held when their backward begins, and a few wrong predictions.
    assert len(harness.fetched) <= 2 * 9 * 4 + 3


def test_nothing_is_prefetched_across_the_optimizer_step() -> None:
    harness = Harness(one_each(2, 3), places=3)
    for _ in range(2):
        harness.forward(0)
        harness.backward(0)
        harness.step()
    harness.fetched.clear()
    harness.forward(0)
    harness.backward(0)
    assert {micro_step for micro_step, _ in harness.fetched} == {0}


def test_autograd_detects_a_reused_slot() -> None:
    harness = Harness(one_each(1, 3), places=2)
    weights = harness.visit(0, 0)
    assert weights is not None
    rows = torch.rand(1, 3, requires_grad=True)
    kept = rows @ weights.detach()[0]
    harness.visit(0, 1)
    harness.visit(0, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_a_wait_that_failed_is_not_repeated() -> None:
    """A second wait for a message of gloo may never end."""
    harness, calls = Harness(one_each(1, 4), places=2), list[int]()

    def fail() -> None:
        calls.append(len(calls))
        raise RuntimeError("connection closed")

    harness.ring.host_copies = SimpleNamespace(start=lambda _: fail)  # type: ignore[assignment]
    harness.ring.begin(0)
    # The layer's own transfer, that of all layers, and that of a buffer which is used again.
    for use, layer, message in (
        (harness.visit, 0, "closed"), (lambda *_: harness.ring.complete(), 0, "an earlier wait"),
        (harness.visit, 1, "an earlier wait"), (harness.visit, 1, "closed"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            use(0, layer)
    assert len(calls) == 2


@pytest.mark.parametrize(("layers", "most"), [(1, 1), (1, 4), (1, 6), (3, 5), (3, 18)])
def test_as_many_instances_are_predicted_as_may_be_prefetched(layers: int, most: int) -> None:
    """Also if every second event is the start of a micro-step. Steps of six micro-steps."""
    visits = ring.Visits()
    for micro_step in range(13):
        if micro_step % 6 == 0:
            visits.refresh()
        visits.enter(micro_step)
        for layer in range(layers if micro_step < 12 else 0):
            visits.visit(micro_step, layer)
    coming = [*visits.coming(most, layers)][:most]
    assert coming == [(12 + n // layers, n % layers) for n in range(most)]
