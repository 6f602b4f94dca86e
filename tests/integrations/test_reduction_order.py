"""Reductions start in the order of buckets, whatever the order in which their gradients are ready."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from trimtab.integrations.megatron.reduction_order import ReductionOrder


class FakeGroup:
    """Megatron's `_ParamAndGradBucketGroup`, as far as it is used."""

    def __init__(self, number: int, started: list[tuple[int, bool | None]]) -> None:
        self._number, self._started = number, started
        self.resets = 0

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self._started.append((self._number, force_all_reduce))

    def reset(self) -> None:
        self.resets += 1


@example([3, 0, 1, 2, 4], 1, [[0, 1, 2, 3, 4]])
@given(st.permutations(range(5)), st.integers(0, 5), st.lists(st.permutations(range(5)), min_size=1, max_size=4))
def test_all_start_in_order_and_none_is_early(failed: list[int], lost: int, steps: list[list[int]]) -> None:
    started: list[tuple[int, bool | None]] = []
    groups = [FakeGroup(number, started) for number in range(5)]
    order = ReductionOrder(groups)
    # A step that fails in backward; the next one begins with a reset.
    for number in failed[:lost]:
        groups[number].start_grad_sync()
    for group in groups:
        group.reset()
    for step in steps:
        started.clear()
        for done, number in enumerate(step, 1):
            groups[number].start_grad_sync(number == 3)
            ready = set(step[:done])
            expected = next((first for first in range(5) if first not in ready), 5)
            assert started == [(first, first == 3) for first in range(expected)]
    order.remove()
    started.clear()
    groups[4].start_grad_sync()
    assert started == [(4, False)]
    assert [group.resets for group in groups] == [1] * 5
