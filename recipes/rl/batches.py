"""Micro-batches of responses, what a model computes of them, and PPO's clipped loss of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from recipes.rl.responses import Response
from trimtab.array_type import Array
from trimtab.trace import hash_tokens

CLIP = 0.2
Loss = tuple[torch.Tensor, dict[str, tuple[float, float]]]
"""This rank's part of the loss of a mini-batch; and, by metric, a sum over its tokens and their number."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B responses padded to T fed tokens. A rank without any has one row of padding, so that it runs every layer.

    Attributes:
        input_ids: `[B, T]` int64; the last token of a response is a target only.
        targets: `[B, T]` int64, the token after each.
        response_mask: `[B, T]` float32, 1 where the target belongs to the response.
        policy_mask: `[B, T]` float32, 1 where the policy is trained on the target; the response if it is complete.
        ages: `[B, T]` int64, steps since the target was sampled; 0 outside of responses.
        finished: `[B]` bool, whether the response is complete.
        rewards: `[B]` float32, of the responses.
        advantages: `[B, 1]` float32, of the rollout's groups, or `[B, T]` of tokens.
        rollout_log_probs: `[B, T]` float32, of the targets when the rollout sampled them; 0 outside of responses.
        positions: `[n]` int64, the rows of the responses' tokens among all B * T rows.
        sequence_hashes: `[S]` uint64, of the responses' tokens.
        old_values: `[B, T]` float32, of the states before the targets by the value model before the step, if any.
        returns: `[B, T]` float32, targets of the value model, if any.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    response_mask: torch.Tensor
    policy_mask: torch.Tensor
    ages: torch.Tensor
    finished: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    rollout_log_probs: torch.Tensor
    positions: torch.Tensor
    sequence_hashes: Array
    old_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None


class Outputs(NamedTuple):
    """What the model computes of a micro-batch: log-probabilities `[B, T]` float32 of targets, and the last hidden
    states `[B, T, H]`, from which the logits follow."""

    log_probs: torch.Tensor
    hidden: torch.Tensor


class TrainedTokens(NamedTuple):
    """Tokens of a mini-batch over all ranks that policy and value model are trained on: the divisors of its losses."""

    policy: int
    value: int


def collate(responses: Sequence[Response], *, pad_token_id: int, device: torch.device) -> MicroBatch:
    """A micro-batch of responses, padded on the right.

    Under causal attention no token attends to the padding, so there is no mask.
    """
    rows, width = max(1, len(responses)), max([1, *(r.num_fed for r in responses)])
    tokens = np.full((rows, width + 1), pad_token_id, np.int64)
    response_mask, policy_mask, rollout_log_probs = np.zeros((3, rows, width), np.float32)
    ages, positions = np.zeros((rows, width), np.int64), [np.empty(0, np.int64)]
    for row, response in enumerate(responses):
        first, end = response.prompt_length - 1, response.num_fed
        tokens[row, : end + 1] = response.token_ids
        response_mask[row, first:end] = 1
        policy_mask[row, first + response.trained_tokens :][: response.policy_tokens] = 1
        rollout_log_probs[row, first:end] = response.log_probs
        if response.row_versions is not None:
            versions = response.row_versions[first:]
            ages[row, first:end] = versions.max() - versions
        positions.append(row * width + np.arange(end))
    whole = torch.from_numpy(tokens).to(device)
    return MicroBatch(
        input_ids=whole[:, :-1],
        targets=whole[:, 1:],
        response_mask=torch.from_numpy(response_mask).to(device),
        policy_mask=torch.from_numpy(policy_mask).to(device),
        ages=torch.from_numpy(ages).to(device),
        finished=torch.tensor([r.is_finished for r in responses] or [True], device=device),
        rewards=torch.tensor([r.reward for r in responses] or [0.0], dtype=torch.float32, device=device),
        advantages=torch.tensor([[r.advantage] for r in responses] or [[0.0]], dtype=torch.float32, device=device),
        rollout_log_probs=torch.from_numpy(rollout_log_probs).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        sequence_hashes=np.array([hash_tokens(r.token_ids) for r in responses], np.uint64),
    )


def token_log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probability of each target, float32: `[..., V]` logits, `[...]` targets."""
    flat = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return -flat.view_as(targets)


def policy_loss(log_ratio: torch.Tensor, batch: MicroBatch, tokens: TrainedTokens) -> Loss:
    """PPO's loss: minus the smaller of ratio * advantage and clipped ratio * advantage, mean over the policy's tokens.

    Args:
        log_ratio: `[B, T]`, log-probability now minus log-probability before the step.
    """
    # Targets without a policy loss have no log-probability.
    log_ratio = log_ratio * batch.policy_mask
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages) * batch.policy_mask
    figures = {"ppo/clip_fraction": of_tokens(is_clipped(log_ratio), batch.policy_mask)}
    return loss.sum() / max(1, tokens.policy), figures


def is_clipped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Where the ratio is outside of the clip range."""
    return (log_ratio.detach().exp() - 1).abs() > CLIP


def of_tokens(values: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
    """The sum of values of the tokens in the mask, and their number."""
    return float((values.detach() * mask).sum()), float(mask.sum())
