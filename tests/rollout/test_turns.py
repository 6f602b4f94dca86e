"""Micro-batches that take turns on threads of a rank."""

from __future__ import annotations

import time

import pytest
import torch

from trimtab.cores import usable_cores
from trimtab.rollout.turns import Turns


@pytest.mark.skipif(usable_cores() < 2, reason="one core")
def test_micro_batches_compute_on_as_many_cores_as_their_rank() -> None:
    """Ranks share cores: those of another rank would compute for this one, and both would wait."""
    before, seconds = torch.get_num_threads(), []

    def work(_: int) -> None:
        matrix, start = torch.randn(1500, 1500), (time.process_time(), time.thread_time())
        for _ in range(4):
            matrix @ matrix
        seconds.append((time.process_time() - start[0], time.thread_time() - start[1]))

    torch.set_num_threads(1)
    try:
        Turns(2).run(work)
    finally:
        torch.set_num_threads(before)
    assert len(seconds) == 2
    for of_process, of_thread in seconds:
        assert of_thread > 0.8 * of_process


def test_the_first_error_ends_the_others() -> None:
    turns, done = Turns(3), []

    def work(index: int) -> None:
        for step in range(3):
            if (index, step) == (1, 1):
                raise ValueError("no such expert")
            done.append((step, index))
            turns.give_way()

    with pytest.raises(ValueError, match="no such expert"):
        turns.run(work)
    assert done == [(0, 0), (0, 1), (0, 2), (1, 0)]
