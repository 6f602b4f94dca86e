"""Any valid plan gives the loss, logits and gradients of the unbalanced model on one process.

Together more than 1,000 random plans for random small models on 2 to 4 ranks: other homes in every step, replicas on
both paths, several nodes, rings of other lengths, one and two expert-parallel groups.
"""

from __future__ import annotations

import pytest
import torch

from helpers.equality import CHECKPOINTING, Case, compare_cases
from trimtab.launch import launch


@pytest.mark.parametrize(
    ("ranks", "groups", "dtype", "count", "listed"),
    [
        (2, 1, torch.float64, 128, False),
        (3, 1, torch.float64, 32, False),
        (4, 1, torch.float64, 40, False),
        (4, 2, torch.float64, 40, False),
        (2, 1, torch.float32, 16, False),
        (2, 1, torch.float64, 64, True),
        (3, 1, torch.float64, 24, True),
        (4, 2, torch.float64, 24, True),
        (2, 1, torch.float32, 16, True),
    ],
)
def test_random_plans_equal_the_single_process(
    ranks: int, groups: int, dtype: torch.dtype, count: int, listed: bool
) -> None:
    """In recompute and update, accumulated over micro-steps and optimizer steps, with clipping and checkpointing."""
    cases = [
        Case(
            seed,
            dtype,
            max_norm=0.05 if seed // 4 % 2 else None,
            run_block=CHECKPOINTING[seed % 4],
            steps=3,
            padded=seed // 8 % 2 == 1,
            groups=groups,
            listed=listed,
        )
        for seed in range(count)
    ]
    launch(compare_cases, (cases,), ranks=ranks)
