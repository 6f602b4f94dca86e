"""`ValueModel`: predicts a response's reward, with an optimizer of its own; and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from trimtab.rl.batches import MicroBatch

MAX_NORM = 1.0
# A value that moves further in a step than this has no gradient.
VALUE_CLIP = 0.2


class ValueModel(Protocol):
    """A value model on one rank."""

    @property
    def network(self) -> nn.Module:
        """The rank's part of it. No parameter of it is the policy's."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of its parameters."""

    def start_from(self, policy: Mapping[str, torch.Tensor]) -> None:
        """Take first values from the policy, where the value model is like it.

        Args:
            policy: weights of the policy, in logical expert order.
        """

    def values(self, batch: MicroBatch, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Value `[B, T]` float32 of the state after each fed token. Collective.

        Args:
            batch: the micro-batch.
            hidden: `[B, T, H]`, the policy's last hidden states, which get no gradient from it.
            wanted: `[B, T]`, not 0 where the value is needed. Others may be any finite number.
        """

    def finish_gradients(self) -> None:
        """Complete the gradients of a mini-batch over all ranks. Collective."""

    def step(self) -> None:
        """Clip the gradients by their norm, run an optimizer step, and zero them. Collective."""

    def metrics(self) -> dict[str, float]:
        """Figures of its own since the last call, equal on all ranks. Not a collective."""

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and optimizer state, as `key/parameter`, for checkpoints. Rank 0's is written. Collective."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned. There may be other names."""

    def close(self) -> None:
        """Release threads and shared memory."""


def clipped_value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """Half the squared error of every value, `[B, T]`: the larger of those of the value and of the clipped value.

    Args:
        values: `[B, T]`, now.
        old_values: `[B, T]`, before the step. The clipped value differs from it by at most `VALUE_CLIP`.
        returns: `[B, T]`, targets.
    """
    clipped = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
