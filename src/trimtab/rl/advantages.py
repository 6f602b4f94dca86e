"""Advantages: of responses relative to their group, and of tokens from a value model (GAE)."""

from __future__ import annotations

import torch

from trimtab.array_type import Array


def group_advantages(rewards_PS: Array) -> Array:
    """Reward minus the mean of its group, `[P, S]`, of S responses to each of P problems (arXiv 2402.03300).

    It is not divided by the group's standard deviation, which would weigh problems by their difficulty.
    """
    return rewards_PS - rewards_PS.mean(axis=1, keepdims=True)


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


def extended_advantages(
    values_BT: torch.Tensor, rewards_B: torch.Tensor, finished_B: torch.Tensor, mask_BT: torch.Tensor, gae_lambda: float
) -> torch.Tensor:
    """GAE of responses that may be incomplete, `[B, T]`; 0 outside of the mask. Equal to GAE on finished responses.

    The purpose is that of EGAE (arXiv 2506.15050); the derivation is ours. A response that is truncated after l tokens
    has no reward. The expected reward from there on is V(s_l) by definition, so V(s_l) takes the place of R in
    `generalized_advantages`, and no reward is invented:

        delta_k = V(s_{k+1}) - V(s_k) for all k < l.

    The last token was sampled, but not fed, so the value of s_l is not known. No reward can come between s_{l-1} and
    s_l, so the expectation of V(s_l) given s_{l-1} is V(s_{l-1}), which takes its place. Then delta_{l-1} is 0: the
    last token has no advantage yet, and the advantages of the tokens before it are

        A_t = sum over t <= k < l - 1 of lambda^(k - t) * (V(s_{k+1}) - V(s_k)).

    With lambda 1 this is V(s_{l-1}) - V(s_t).

    Args:
        finished_B: bool; the rewards of other responses are not read.
        values_BT, rewards_B, mask_BT, gae_lambda: as for `generalized_advantages`.
    """
    width = mask_BT.shape[1]
    last_B = (mask_BT * torch.arange(1, width + 1, device=mask_BT.device)).argmax(dim=1)
    at_truncation_B = values_BT.gather(1, last_B[:, None]).squeeze(1)
    final_B = torch.where(finished_B, rewards_B.to(values_BT.dtype), at_truncation_B)
    return generalized_advantages(values_BT, final_B, mask_BT, gae_lambda)
