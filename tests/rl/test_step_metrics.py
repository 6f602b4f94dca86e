"""Metrics of a rollout over all ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.rank_pool import on_ranks
from trimtab.rl.sequences import Sequence
from trimtab.rl.step_metrics import rollout_metrics


def response(prompt: int, known: int, new: int, *, is_finished: bool) -> Sequence:
    """A response whose first tokens are of step 3, and the others of step 4."""
    length = prompt + known + new
    versions = np.repeat(np.array([3, 4], np.int32), [prompt - 1 + known, new]) if known else None
    arrays = np.ones(length, np.int64), prompt, np.zeros((length - 1, 1, 1), np.uint8)
    log_probs = np.zeros(known + new, np.float32)
    return Sequence(*arrays, float(is_finished), 0.0, log_probs, is_finished=is_finished, row_versions=versions)


def measure() -> dict[str, float]:
    of_ranks = [
        [response(3, 5, 2, is_finished=True), response(4, 0, 3, is_finished=False)],
        [response(2, 0, 4, is_finished=True), response(6, 9, 1, is_finished=False)],
    ]
    return rollout_metrics(of_ranks[dist.get_rank()], torch.device("cpu"))


def test_ranks_wait_for_the_longest_response() -> None:
    first, second = on_ranks(measure, ranks=2)
    assert first == second
    assert first["rollout/decode_steps"] == 4
    assert first["rollout/tokens"] == 2 + 3 + 4 + 1
    assert first["rollout/occupancy"] == pytest.approx(10 / 16)
    assert first["rollout/prefix_tokens"] == 8 + 4 + 2 + 15
    assert first["rollout/longest_response"] == 10
    assert first["rollout/finished"] == 2
    assert first["response_length"] == pytest.approx((7 + 4) / 2)
    assert first["reward"] == 1.0
