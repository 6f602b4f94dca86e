"""Any valid plan gives the loss, logits and gradients of the unbalanced model on one process.

Random plans for random small models on 2 to 4 ranks, in the long form more than 1,000: other homes in every step,
replicas on both paths, several nodes, rings of other lengths, one and two expert-parallel groups.
"""

from __future__ import annotations

import pytest
import torch

from helpers.equality import CHECKPOINTING, Case, compare_cases
from helpers.examples import examples
from helpers.rank_pool import on_ranks


@pytest.mark.longer
@pytest.mark.parametrize(
    ("ranks", "groups", "dtype", "short", "long", "listed"),
    [
        (2, 1, torch.float64, 16, 128, False),
        (3, 1, torch.float64, 4, 32, False),
        (4, 1, torch.float64, 4, 40, False),
        (4, 2, torch.float64, 4, 40, False),
        (2, 1, torch.float32, 4, 16, False),
        (2, 1, torch.float64, 8, 64, True),
        (3, 1, torch.float64, 4, 24, True),
        (4, 2, torch.float64, 4, 24, True),
        (2, 1, torch.float32, 4, 16, True),
    ],
)
def test_random_plans_equal_the_single_process(
    ranks: int, groups: int, dtype: torch.dtype, short: int, long: int, listed: bool
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
        for seed in range(examples(short=short, long=long))
    ]
    on_ranks(compare_cases, (cases,), ranks=ranks)
