"""Any valid plan gives the loss, logits and gradients of the unbalanced model on one process.

Random plans for random small models on 2 to 4 ranks, in the long form more than 1,000: other homes in every step,
replicas on both paths, several nodes, rings of other lengths, one and two expert-parallel groups.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.equality import Case, compare_cases
from helpers.examples import examples
from helpers.rank_pool import on_ranks


@pytest.mark.longer
@pytest.mark.parametrize(
    ("ranks", "groups", "dtype", "short", "long", "options"),
    [
        pytest.param(2, 1, torch.float64, 8, 128, {}, marks=pytest.mark.nightly),
        (3, 1, torch.float64, 2, 32, {}),
        (4, 1, torch.float64, 2, 40, {}),
        (4, 2, torch.float64, 2, 40, {}),
        (2, 1, torch.float32, 2, 16, {}),
        pytest.param(2, 1, torch.float64, 4, 64, {"listed": True}, marks=pytest.mark.nightly),
        (3, 1, torch.float64, 2, 24, {"listed": True}),
        pytest.param(4, 2, torch.float64, 2, 24, {"listed": True}, marks=pytest.mark.nightly),
        (2, 1, torch.float32, 2, 16, {"listed": True}),
        # Nodes of random sizes: replicas from other nodes are sent as messages.
        pytest.param(2, 1, torch.float64, 4, 12, {"one_sided": True}, marks=pytest.mark.nightly),
        pytest.param(4, 1, torch.float64, 4, 12, {"one_sided": True, "listed": True}, marks=pytest.mark.nightly),
    ],
)
def test_random_plans_equal_the_single_process(
    ranks: int, groups: int, dtype: torch.dtype, short: int, long: int, options: dict[str, Any]
) -> None:
    """In recompute and update, accumulated over micro-steps and optimizer steps, with clipping and checkpointing."""
    seeds = range(examples(short=short, long=long))
    cases = [Case(seed, dtype, groups=groups, **options) for seed in seeds]
    for copied in on_ranks(compare_cases, (cases,), ranks=ranks):
        assert copied > len(cases) if "one_sided" in options else copied == 0
