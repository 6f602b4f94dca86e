"""`PreparedStep`: a step whose sequences are on their ranks, in micro-batches."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.planner import Schedule
from trimtab.rl.algorithm import TrainedTokens
from trimtab.rl.batches import MicroBatch, collate
from trimtab.rl.sequences import Sequence
from trimtab.runtime import PlannedStep
from trimtab.trace import RoutingTrace


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """A step with this rank's micro-batches.

    Attributes:
        schedule: of all ranks.
        planned: plan of the step over all ranks; None in mode `live`.
        trace: routing of this rank's sequences, in plan order.
        batches: this rank's micro-batches, one per micro-step. The recompute adds what the algorithm's loss needs.
        tokens: of each mini-batch over all ranks, the divisors of its losses.
        computed_tokens: that all ranks feed to the model.
    """

    schedule: Schedule
    planned: PlannedStep | None
    trace: RoutingTrace
    batches: list[MicroBatch]
    tokens: list[TrainedTokens]
    computed_tokens: int

    def rollout_differences(self, log_probs: SequenceOf[torch.Tensor]) -> tuple[float, float]:
        """The sum of absolute differences of log-probabilities to the rollout's, and the number of tokens: this rank's
        trained ones that the step sampled."""
        difference = tokens = 0.0
        for batch, found in zip(self.batches, log_probs, strict=True):
            mask = batch.policy_mask * (batch.ages == 0)
            difference += float(((found - batch.rollout_log_probs).abs() * mask).sum())
            tokens += float(mask.sum())
        return difference, tokens


def micro_batches(
    arrived: SequenceOf[Sequence], schedule: Schedule, rank: int, pad_token_id: int, device: torch.device
) -> tuple[list[Sequence], list[MicroBatch]]:
    """A rank's sequences in plan order, and its micro-batches, one per micro-step.

    Args:
        arrived: the rank's sequences, ordered by source rank, thus by index in the schedule.
    """
    # Plan order is by micro-step first.
    micro_step = schedule.micro_step[schedule.rank == rank]
    mine = [arrived[index] for index in np.argsort(micro_step, kind="stable")]
    parts = np.split(np.arange(len(mine)), np.cumsum(np.bincount(micro_step, minlength=schedule.num_micro_steps))[:-1])
    batches = [collate([mine[i] for i in part], pad_token_id=pad_token_id, device=device) for part in parts]
    return mine, batches


def trained_tokens(lengths: Array, mini_batch: Array, count: int) -> list[TrainedTokens]:
    """The divisors of the losses of each of `count` mini-batches.

    Args:
        lengths: `[S, 2]` tokens of each sequence in the loss of the policy, and of the value model.
        mini_batch: `[S]`.
    """
    policy, value = (np.bincount(mini_batch, weights=column, minlength=count) for column in lengths.T)
    return [TrainedTokens(int(of_policy), int(of_value)) for of_policy, of_value in zip(policy, value, strict=True)]
