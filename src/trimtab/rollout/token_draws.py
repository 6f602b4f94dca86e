"""Sampling of tokens with a random stream per sequence: its tokens don't depend on the batch it is in."""

from __future__ import annotations

import numpy as np
import torch

from trimtab.array_type import Array


def stream(*seed: int, tokens: int) -> Array:
    """Uniform draws `[tokens]` float64 in [0, 1) of one sequence, one for each token.

    Args:
        seed: what identifies the sequence, such as seed, step, problem and sample.
        tokens: most tokens of the sequence.
    """
    return np.random.default_rng(seed).random(tokens)


def draw_tokens(log_probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Tokens `[B]` int64 of the distributions: the first whose cumulated probability exceeds the draw."""
    cumulated_BV = log_probs_BV.double().exp().cumsum(-1)
    targets = uniform_B.to(cumulated_BV)[:, None] * cumulated_BV[:, -1:]
    return torch.searchsorted(cumulated_BV, targets, right=True)[:, 0].clamp(max=log_probs_BV.shape[1] - 1)
