"""The clipped loss compared with its definition, and micro-batches with their sequences."""

from __future__ import annotations

import numpy as np
import torch

from trimtab.rl.batches import collate
from trimtab.rl.losses import clipped_policy_loss, token_log_probs
from trimtab.rl.sequences import Sequence


def test_the_clipped_loss_equals_ppos_definition() -> None:
    ratio = torch.tensor([[0.5, 0.9, 1.0, 1.1, 2.0]], dtype=torch.float64)
    gain = clipped_policy_loss(ratio.log(), torch.tensor([[2.0]], dtype=torch.float64))
    assert torch.allclose(gain, -torch.tensor([[1.0, 1.8, 2.0, 2.2, 2.4]], dtype=torch.float64))
    penalty = clipped_policy_loss(ratio.log(), torch.tensor([[-2.0]], dtype=torch.float64))
    assert torch.allclose(penalty, torch.tensor([[1.6, 1.8, 2.0, 2.2, 4.0]], dtype=torch.float64))


def test_log_probs_are_those_of_the_targets() -> None:
    logits = torch.randn(2, 3, 5)
    targets = torch.randint(0, 5, (2, 3))
    expected = logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    assert torch.allclose(token_log_probs(logits, targets), expected)


def test_micro_batches_mark_responses_and_positions() -> None:
    def sequence(tokens: list[int], prompt: int, advantage: float) -> Sequence:
        log_probs = -np.array(tokens[prompt:], np.float32)
        return Sequence(np.array(tokens), prompt, np.zeros((len(tokens) - 1, 1, 1)), 0.0, advantage, log_probs)

    sequences = [sequence([1, 2, 3, 4], 2, 0.5), sequence([5, 6], 1, -2.0)]
    batch = collate(sequences, pad_token_id=0, device=torch.device("cpu"))
    assert batch.input_ids.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert batch.targets.tolist() == [[2, 3, 4], [6, 0, 0]]
    assert batch.response_mask.tolist() == [[0, 1, 1], [1, 0, 0]]
    # The log-probability of each token here is minus its id.
    assert batch.rollout_log_probs.tolist() == [[0, -3, -4], [-6, 0, 0]]
    assert batch.advantages.tolist() == [[0.5], [-2.0]]
    assert batch.positions.tolist() == [0, 1, 2, 3]
    empty = collate([], pad_token_id=0, device=torch.device("cpu"))
    assert empty.input_ids.shape == (1, 1)
    assert empty.positions.tolist() == []
    assert empty.response_mask.sum() == 0
