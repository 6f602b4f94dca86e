"""Micro-batches: right-padded tensors of a rank's sequences, and the positions of their tokens."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.rl.sequences import Sequence
from trimtab.trace import hash_tokens


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B sequences padded to T fed tokens. A rank without sequences has one row of padding, so that it runs every layer.

    Attributes:
        input_ids: `[B, T]` int64; the last token of a sequence is a target only.
        targets: `[B, T]` int64, the token after each.
        response_mask: `[B, T]` float32, 1 where the target belongs to the response.
        policy_mask: `[B, T]` float32, 1 where the policy is trained on the target; the response if it is complete.
        ages: `[B, T]` int64, steps since the target was sampled; 0 outside of responses.
        finished: `[B]` bool, whether the response is complete.
        rewards: `[B]` float32, of the responses.
        advantages: `[B, 1]` float32, of the rollout's groups, or `[B, T]` of tokens.
        rollout_log_probs: `[B, T]` float32, of the targets when the rollout sampled them; 0 outside of responses.
        positions: `[n]` int64, the rows of the sequences' tokens among all B * T rows.
        sequence_hashes: `[S]` uint64, of the sequences' tokens.
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


def collate(sequences: Sequence_[Sequence], *, pad_token_id: int, device: torch.device) -> MicroBatch:
    """A micro-batch of sequences, padded on the right.

    Under causal attention no token attends to the padding, so there is no mask.
    """
    rows, width = max(1, len(sequences)), max([1, *(s.num_fed for s in sequences)])
    tokens = np.full((rows, width + 1), pad_token_id, np.int64)
    response_mask, policy_mask, rollout_log_probs = np.zeros((3, rows, width), np.float32)
    ages = np.zeros((rows, width), np.int64)
    positions = [np.empty(0, np.int64)]
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.token_ids)] = sequence.token_ids
        first = sequence.prompt_length - 1
        response_mask[row, first : sequence.num_fed] = 1
        policy_mask[row, first + sequence.trained_tokens :][: sequence.policy_tokens] = 1
        rollout_log_probs[row, first : sequence.num_fed] = sequence.log_probs
        if sequence.row_versions is not None:
            versions = sequence.row_versions[first:]
            ages[row, first : sequence.num_fed] = versions.max() - versions
        positions.append(row * width + np.arange(sequence.num_fed))
    advantages = [[s.advantage] for s in sequences] or [[0.0]]
    whole = torch.from_numpy(tokens).to(device)
    return MicroBatch(
        input_ids=whole[:, :-1],
        targets=whole[:, 1:],
        response_mask=torch.from_numpy(response_mask).to(device),
        policy_mask=torch.from_numpy(policy_mask).to(device),
        ages=torch.from_numpy(ages).to(device),
        finished=torch.tensor([s.is_finished for s in sequences] or [True], device=device),
        rewards=torch.tensor([s.reward for s in sequences] or [0.0], dtype=torch.float32, device=device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
        rollout_log_probs=torch.from_numpy(rollout_log_probs).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        sequence_hashes=np.array([hash_tokens(s.token_ids) for s in sequences], np.uint64),
    )
