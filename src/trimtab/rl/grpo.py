"""`GRPO`: advantages are relative to the group of responses to one problem; there is no value model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_

import torch

from trimtab.array_type import Array
from trimtab.rl.algorithm import TokenLoss, TokenOutputs
from trimtab.rl.batches import MicroBatch
from trimtab.rl.losses import clipped_policy_loss, clipped_tokens
from trimtab.rl.sequences import Sequence


def group_advantages(rewards_PS: Array) -> Array:
    """Reward minus the mean of its group, `[P, S]`, of S responses to each of P problems (arXiv 2402.03300).

    It is not divided by the group's standard deviation, which would weigh problems by their difficulty.
    """
    return rewards_PS - rewards_PS.mean(axis=1, keepdims=True)


class GRPO:
    """Group-relative policy optimization, with the mean over response tokens. An `Algorithm`."""

    title = "GRPO"
    figures: tuple[str, ...] = ("ppo/clip_fraction",)

    def __init__(self) -> None:
        self.parameters: list[torch.nn.Parameter] = []

    def trained(self, sequences: Sequence_[Sequence]) -> list[Sequence]:
        """Sequences with an advantage. A group whose responses all have the same reward has no gradient."""
        return [sequence for sequence in sequences if sequence.advantage != 0]

    def with_targets(self, batch: MicroBatch, outputs: TokenOutputs) -> MicroBatch:
        """The micro-batch; its advantages are known since the rollout."""
        return batch

    def loss(
        self, batch: MicroBatch, outputs: TokenOutputs, old_log_probs: torch.Tensor, response_tokens: int
    ) -> TokenLoss:
        """The clipped loss, mean over response tokens."""
        log_ratio = outputs.log_probs - old_log_probs
        loss = clipped_policy_loss(log_ratio, batch.advantages) * batch.response_mask
        return TokenLoss(
            loss.sum() / max(1, response_tokens), {"ppo/clip_fraction": clipped_tokens(log_ratio, batch.response_mask)}
        )

    def apply_gradients(self) -> None:
        """Nothing: it has no parameters."""

    def state(self) -> dict[str, torch.Tensor]:
        """Nothing: it has no parameters."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing: it has no parameters."""
