"""`GRPO`: advantages are relative to the group of responses to one problem; there is no value model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_

import torch

from trimtab.rl.algorithm import TokenLoss, TokenOutputs, TrainedTokens
from trimtab.rl.batches import MicroBatch
from trimtab.rl.losses import clipped_policy_loss, clipped_tokens
from trimtab.rl.sequences import Sequence


class GRPO:
    """Group-relative policy optimization, with the mean over response tokens. An `Algorithm`."""

    title = "GRPO"
    figures: tuple[str, ...] = ("clipped", "tokens")
    windows = None
    value_model = None

    def trained(self, sequences: Sequence_[Sequence]) -> list[Sequence]:
        """Sequences with an advantage. A group whose responses all have the same reward has no gradient."""
        return [sequence for sequence in sequences if sequence.advantage != 0]

    def with_targets(self, batch: MicroBatch, outputs: TokenOutputs) -> MicroBatch:
        """The micro-batch; its advantages are known since the rollout."""
        return batch

    def loss(
        self, batch: MicroBatch, outputs: TokenOutputs, old_log_probs: torch.Tensor, tokens: TrainedTokens
    ) -> TokenLoss:
        """The clipped loss, mean over response tokens."""
        log_ratio = outputs.log_probs - old_log_probs
        loss = clipped_policy_loss(log_ratio, batch.advantages) * batch.response_mask
        clipped = clipped_tokens(log_ratio, batch.response_mask)
        return TokenLoss(
            loss.sum() / max(1, tokens.policy), {"clipped": clipped, "tokens": float(batch.response_mask.sum())}
        )

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The fraction of response tokens whose ratio is clipped."""
        return {"ppo/clip_fraction": totals["clipped"] / max(1, totals["tokens"])}
