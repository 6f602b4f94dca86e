"""Metrics of a rollout over all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.rank_pool import RankPool
from trimtab.rl.sequences import Sequence
from trimtab.rl.step_metrics import rollout_metrics

State = dict[str, Any]


def response(prompt: int, known: int, new: int, *, is_finished: bool) -> Sequence:
    """A response whose first tokens are of step 3, and the others of step 4."""
    length = prompt + known + new
    return Sequence(
        token_ids=np.ones(length, np.int64),
        prompt_length=prompt,
        expert_ids=np.zeros((length - 1, 1, 1), np.uint8),
        reward=float(is_finished),
        advantage=0.0,
        log_probs=np.zeros(known + new, np.float32),
        is_finished=is_finished,
        row_versions=np.repeat(np.array([3, 4], np.int32), [prompt - 1 + known, new]) if known else None,
    )


def measure(state: State) -> dict[str, float]:
    of_ranks = [
        [response(3, 5, 2, is_finished=True), response(4, 0, 3, is_finished=False)],
        [response(2, 0, 4, is_finished=True), response(6, 9, 1, is_finished=False)],
    ]
    return rollout_metrics(of_ranks[dist.get_rank()], torch.device("cpu"))


def test_ranks_wait_for_the_longest_response(pool: RankPool) -> None:
    first, second = pool.call(measure)
    assert first == second
    assert first["rollout/decode_steps"] == 4
    assert first["rollout/tokens"] == 2 + 3 + 4 + 1
    assert first["rollout/occupancy"] == pytest.approx(10 / 16)
    assert first["rollout/prefix_tokens"] == 8 + 4 + 2 + 15
    assert first["rollout/longest_response"] == 10
    assert first["rollout/finished"] == 2
    assert first["response_length"] == pytest.approx((7 + 4) / 2)
    assert first["reward"] == 1.0
