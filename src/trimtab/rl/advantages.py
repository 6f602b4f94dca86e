"""Advantages of tokens from a value model: GAE with a reward at the end of the response."""

from __future__ import annotations

import torch


def generalized_advantages(
    values_BT: torch.Tensor, rewards_B: torch.Tensor, mask_BT: torch.Tensor, gae_lambda: float
) -> torch.Tensor:
    """GAE (arXiv 1506.02438) of finished responses, `[B, T]`; 0 outside of the mask.

    The state before token t of a response of l tokens is s_t. Only the last token has a reward, R, and there is no
    discount, so that

        A_t = sum over k >= t of lambda^(k - t) * delta_k
        delta_k = V(s_{k+1}) - V(s_k) for k < l - 1, and delta_{l-1} = R - V(s_{l-1}).

    With lambda 1 this is R - V(s_t).

    Args:
        values_BT: value of the state before each target.
        rewards_B: of the responses.
        mask_BT: 1 for targets that belong to the response, which are contiguous.
        gae_lambda: weight of a later difference, from 0 to 1.
    """
    advantages_BT = torch.zeros_like(values_BT)
    following_B, advantage_B = rewards_B.to(values_BT.dtype), torch.zeros_like(values_BT[:, 0])
    for at in reversed(range(values_BT.shape[1])):
        inside_B, value_B = mask_BT[:, at] > 0, values_BT[:, at]
        advantage_B = torch.where(inside_B, following_B - value_B + gae_lambda * advantage_B, 0.0)
        following_B = torch.where(inside_B, value_B, following_B)
        advantages_BT[:, at] = advantage_B
    return advantages_BT
