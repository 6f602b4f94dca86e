"""`TPPO`: PPO on windows of responses that are generated over several steps."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import replace

import torch

from trimtab.rl.advantages import extended_advantages
from trimtab.rl.algorithm import TokenLoss, TokenOutputs, TrainedTokens
from trimtab.rl.batches import MicroBatch
from trimtab.rl.losses import clipped_policy_loss, clipped_tokens
from trimtab.rl.ppo import GAE_LAMBDA
from trimtab.rl.sequences import Sequence
from trimtab.rl.value_model import ValueModel, clipped_value_loss
from trimtab.rl.windows import Windows

# Ages of tokens with metrics of their own: sampled in this step, in the step before, earlier.
AGES = ("0", "1", "2_or_more")


class TPPO:
    """Truncated proximal policy optimization (arXiv 2506.15050), our reimplementation. An `Algorithm`.

    The policy is trained on the tokens of this step's window, apart from the last token of an incomplete response,
    which is trained in the next step. The value model is trained on finished responses, with their reward as return.

    Args:
        value_model: this rank's part of it.
        windows: this rank's responses.
    """

    title = "T-PPO"
    figures: tuple[str, ...] = (
        "clipped", "policy_tokens", "value_loss", "value_tokens",
        *(f"{figure}_age_{age}" for figure in ("clipped", "kl", "tokens") for age in AGES),
    )  # fmt: skip

    def __init__(self, value_model: ValueModel, windows: Windows) -> None:
        self.value_model = value_model
        self.windows = windows

    def trained(self, sequences: Sequence_[Sequence]) -> list[Sequence]:
        """Sequences with a token for the policy or the value model."""
        return [sequence for sequence in sequences if sequence.policy_tokens or sequence.value_tokens]

    def with_targets(self, batch: MicroBatch, outputs: TokenOutputs) -> MicroBatch:
        """The micro-batch with advantages, and values and returns of the value model."""
        values = self.value_model.values(batch, outputs.hidden, batch.response_mask)
        advantages = extended_advantages(values, batch.rewards, batch.finished, batch.response_mask, GAE_LAMBDA)
        returns = batch.rewards[:, None].expand_as(values)
        return replace(batch, advantages=advantages, old_values=values, returns=returns)

    def loss(
        self, batch: MicroBatch, outputs: TokenOutputs, old_log_probs: torch.Tensor, tokens: TrainedTokens
    ) -> TokenLoss:
        """The clipped losses of policy and value model, each the mean over its own tokens.

        The ratio of a token is relative to the version of the policy that sampled it: the recompute for tokens of this
        step, the recorded log-probability for older ones. Figures by age are of the policy before the step, relative to
        the rollout's log-probabilities.
        """
        assert batch.old_values is not None
        assert batch.returns is not None
        version_log_probs = torch.where(batch.ages == 0, old_log_probs, batch.rollout_log_probs)
        # Targets without a policy loss have no log-probability.
        log_ratio = (outputs.log_probs - version_log_probs) * batch.policy_mask
        policy = clipped_policy_loss(log_ratio, batch.advantages) * batch.policy_mask
        value_mask = batch.response_mask * batch.finished[:, None]
        values = self.value_model.values(batch, outputs.hidden, value_mask)
        value = clipped_value_loss(values, batch.old_values, batch.returns) * value_mask
        sums = {
            "clipped": clipped_tokens(log_ratio, batch.policy_mask),
            "policy_tokens": float(batch.policy_mask.sum()),
            "value_loss": float(value.detach().sum()),
            "value_tokens": float(value_mask.sum()),
        }
        drift = (old_log_probs - batch.rollout_log_probs) * batch.response_mask
        # An unbiased estimate of the divergence that is never negative.
        divergence = drift.exp() - 1 - drift
        for age, name in enumerate(AGES):
            of_age = batch.ages >= age if age == len(AGES) - 1 else batch.ages == age
            mask = batch.response_mask * of_age
            sums[f"clipped_age_{name}"] = clipped_tokens(drift, mask)
            sums[f"kl_age_{name}"] = float((divergence * mask).sum())
            sums[f"tokens_age_{name}"] = float(mask.sum())
        return TokenLoss(policy.sum() / max(1, tokens.policy) + value.sum() / max(1, tokens.value), sums)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Clip fraction and value loss of trained tokens, and figures of response tokens by age in steps.

        KL and clip fraction by age say how far the policy before the step is from the version that sampled the tokens:
        the clip fraction is the part of the tokens whose ratio is outside of the clip range. An age without tokens has
        the figure 0.
        """
        found = {
            "ppo/clip_fraction": totals["clipped"] / max(1, totals["policy_tokens"]),
            "value/loss": totals["value_loss"] / max(1, totals["value_tokens"]),
        }
        for name in AGES:
            tokens = max(1, totals[f"tokens_age_{name}"])
            found[f"ppo/clip_fraction_age_{name}"] = totals[f"clipped_age_{name}"] / tokens
            found[f"ppo/kl_age_{name}"] = totals[f"kl_age_{name}"] / tokens
        return found
