"""`Algorithm`: what an RL algorithm decides. The trainer does everything else, and knows no algorithm by name."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from typing import Protocol

import torch

from trimtab.rl.batches import MicroBatch
from trimtab.rl.sequences import Sequence


@dataclass(frozen=True, eq=False)
class TokenOutputs:
    """What the model computes of a micro-batch.

    Attributes:
        log_probs: `[B, T]` float32, of the targets.
        hidden: `[B, T, H]`, the last hidden states, from which the logits follow.
    """

    log_probs: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """The loss of a micro-batch.

    Attributes:
        loss: a number to run the backward of: this rank's part of the loss of the mini-batch.
        sums: figures by name of metric, summed over this rank's response tokens. The metric is their mean.
    """

    loss: torch.Tensor
    sums: dict[str, float]


class Algorithm(Protocol):
    """Decisions of an RL algorithm on one rank.

    A loss must be a sum over tokens divided by a constant that is known before the step, so that every grouping of
    sequences into micro-batches gives the same gradients.

    Attributes:
        title: its name for people.
        figures: names of the metrics that its loss sums up.
        parameters: its own, beside the model's. They are equal on all ranks; the trainer sums their gradients.
    """

    title: str
    figures: tuple[str, ...]
    parameters: list[torch.nn.Parameter]

    def trained(self, sequences: Sequence_[Sequence]) -> list[Sequence]:
        """Those that have a gradient. Others are left out of the step."""

    def with_targets(self, batch: MicroBatch, outputs: TokenOutputs) -> MicroBatch:
        """The micro-batch with all that the loss needs from the recompute, apart from the log-probabilities.

        Args:
            batch: as collated.
            outputs: under the weights before the step, without gradients.
        """

    def loss(
        self, batch: MicroBatch, outputs: TokenOutputs, old_log_probs: torch.Tensor, response_tokens: int
    ) -> TokenLoss:
        """The loss of a micro-batch.

        Args:
            batch: from `with_targets`.
            outputs: under the weights now.
            old_log_probs: `[B, T]`, under the weights before the step.
            response_tokens: of the mini-batch over all ranks.
        """

    def apply_gradients(self) -> None:
        """Run an optimizer step of its own parameters and zero their gradients, which are summed over all ranks."""

    def state(self) -> dict[str, torch.Tensor]:
        """Its parameters and optimizer state by name, for checkpoints; the same on all ranks."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned."""
