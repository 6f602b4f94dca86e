"""Any valid plan gives the loss, logits and gradients of the unbalanced model on one process."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers.equality import CHECKPOINTING, Case, compare_cases
from trimtab.runtime.launch import launch


@pytest.mark.parametrize(
    ("ranks", "dtype", "cases_each"),
    [(2, torch.float64, 8), (4, torch.float64, 4), (2, torch.float32, 4), (4, torch.float32, 2)],
)
def test_random_plans_equal_the_single_process(ranks: int, dtype: torch.dtype, cases_each: int) -> None:
    """In recompute and update, accumulated over micro-steps and optimizer steps, with clipping and checkpointing."""
    variants = itertools.product(CHECKPOINTING, (None, 0.05), range(cases_each))
    cases = [
        Case(seed, dtype, max_norm, run_block, steps=3 if dtype is torch.float64 else 1, padded=number % 2 == 1)
        for seed, (run_block, max_norm, number) in enumerate(variants)
    ]
    launch(compare_cases, (cases,), ranks=ranks)


def test_experts_of_several_groups_stay_alike() -> None:
    """Two expert-parallel groups of two ranks, each with its own replicas and micro-steps."""
    cases = [
        Case(seed, torch.float64, max_norm, run_block, steps=2, padded=seed % 2 == 1, groups=2)
        for seed, (run_block, max_norm) in enumerate(itertools.product(CHECKPOINTING[:2], (None, 0.05)))
    ]
    launch(compare_cases, (cases,), ranks=4)
