"""`Algorithm`: what an RL algorithm decides. The trainer does everything else, and knows no algorithm by name."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from typing import Protocol

import torch

from trimtab.rl.batches import MicroBatch
from trimtab.rl.sequences import Sequence
from trimtab.rl.value_model import ValueModel
from trimtab.rl.windows import Windows


@dataclass(frozen=True, eq=False)
class TokenOutputs:
    """What the model computes of a micro-batch.

    Attributes:
        log_probs: `[B, T]` float32, of the targets.
        hidden: `[B, T, H]`, the last hidden states, from which the logits follow.
    """

    log_probs: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class TrainedTokens:
    """Tokens of a mini-batch over all ranks: the divisors of its losses.

    Attributes:
        policy: that the policy is trained on.
        value: that a value model is trained on.
    """

    policy: int
    value: int


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """The loss of a micro-batch.

    Attributes:
        loss: a number to run the backward of: this rank's part of the loss of the mini-batch.
        sums: the algorithm's figures, by name, summed over this rank's tokens.
    """

    loss: torch.Tensor
    sums: dict[str, float]


class Algorithm(Protocol):
    """Decisions of an RL algorithm on one rank.

    A loss must be a sum over tokens divided by a constant that is known before the step, so that every grouping of
    sequences into micro-batches gives the same gradients.

    Attributes:
        title: its name for people.
        figures: names of what its loss sums up.
    """

    title: str
    figures: tuple[str, ...]

    @property
    def windows(self) -> Windows | None:
        """Responses that are generated over several steps; None to generate whole groups in each step."""

    @property
    def value_model(self) -> ValueModel | None:
        """Trained beside the policy by the same losses; None if there is none."""

    def trained(self, sequences: Sequence_[Sequence]) -> list[Sequence]:
        """Those that have a gradient. Others are left out of the step."""

    def with_targets(self, batch: MicroBatch, outputs: TokenOutputs) -> MicroBatch:
        """The micro-batch with all that the loss needs from the recompute, apart from the log-probabilities.

        Args:
            batch: as collated.
            outputs: under the weights before the step, without gradients.
        """

    def loss(
        self, batch: MicroBatch, outputs: TokenOutputs, old_log_probs: torch.Tensor, tokens: TrainedTokens
    ) -> TokenLoss:
        """The loss of a micro-batch.

        Args:
            batch: from `with_targets`.
            outputs: under the weights now.
            old_log_probs: `[B, T]`, under the weights before the step.
            tokens: of the mini-batch.
        """

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a step from its figures, summed over all ranks and mini-batches."""
