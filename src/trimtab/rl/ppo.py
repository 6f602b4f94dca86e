"""`PPO`: advantages come from a value model, by GAE."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import replace

import torch

from trimtab.rl.advantages import generalized_advantages
from trimtab.rl.algorithm import TokenLoss, TokenOutputs, TrainedTokens
from trimtab.rl.batches import MicroBatch
from trimtab.rl.losses import clipped_policy_loss, clipped_tokens
from trimtab.rl.sequences import Sequence
from trimtab.rl.value_model import ValueModel, clipped_value_loss

GAE_LAMBDA = 0.95


class PPO:
    """Proximal policy optimization (arXiv 1707.06347) with a value model. An `Algorithm`.

    Args:
        value_model: this rank's part of it.
    """

    title = "PPO"
    figures: tuple[str, ...] = ("clipped", "tokens", "value_loss", "values")
    windows = None

    def __init__(self, value_model: ValueModel) -> None:
        self.value_model = value_model

    def trained(self, sequences: Sequence_[Sequence]) -> list[Sequence]:
        """All sequences: the value model learns from each."""
        return list(sequences)

    def with_targets(self, batch: MicroBatch, outputs: TokenOutputs) -> MicroBatch:
        """The micro-batch with advantages, and with values and returns as targets of the value model.

        A return is the value plus the advantage, thus a mean of later values and the reward.
        """
        values = self.value_model.values(batch, outputs.hidden, batch.response_mask)
        advantages = generalized_advantages(values, batch.rewards, batch.response_mask, GAE_LAMBDA)
        return replace(batch, advantages=advantages, old_values=values, returns=values + advantages)

    def loss(
        self, batch: MicroBatch, outputs: TokenOutputs, old_log_probs: torch.Tensor, tokens: TrainedTokens
    ) -> TokenLoss:
        """The clipped losses of policy and value model, mean over response tokens. No parameter is in both."""
        assert batch.old_values is not None
        assert batch.returns is not None
        log_ratio = outputs.log_probs - old_log_probs
        values = self.value_model.values(batch, outputs.hidden, batch.response_mask)
        policy = clipped_policy_loss(log_ratio, batch.advantages) * batch.response_mask
        value = clipped_value_loss(values, batch.old_values, batch.returns) * batch.response_mask
        sums = {
            "clipped": clipped_tokens(log_ratio, batch.response_mask),
            "tokens": float(batch.response_mask.sum()),
            "value_loss": float(value.detach().sum()),
            "values": float((values.detach() * batch.response_mask).sum()),
        }
        return TokenLoss(policy.sum() / max(1, tokens.policy) + value.sum() / max(1, tokens.value), sums)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Means over response tokens."""
        names = {"ppo/clip_fraction": "clipped", "value/loss": "value_loss", "value/mean": "values"}
        return {metric: totals[name] / max(1, totals["tokens"]) for metric, name in names.items()}
