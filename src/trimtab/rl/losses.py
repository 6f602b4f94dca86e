"""Log-probabilities and the clipped policy loss, per token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

CLIP = 0.2


def token_log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probability of each target, float32: `[..., V]` logits, `[...]` targets."""
    flat = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return -flat.view_as(targets)


def clipped_policy_loss(log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """PPO's loss of every token, `[B, T]`: minus the smaller of ratio * advantage and clipped ratio * advantage.

    Args:
        log_ratio: `[B, T]`, log-probability now minus log-probability before the step.
        advantages: `[B, 1]` or `[B, T]`.
    """
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def clipped_tokens(log_ratio: torch.Tensor, mask: torch.Tensor) -> float:
    """Number of tokens in the mask whose ratio is outside of the clip range."""
    error = (log_ratio.detach().exp() - 1).abs() * mask
    return float((error > CLIP).sum())
