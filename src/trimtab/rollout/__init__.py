"""Rollouts whose attention and experts are on different ranks."""

from trimtab.rollout.disaggregated_rollout import DisaggregatedRollout
from trimtab.rollout.micro_batches import Generated

disaggregate = DisaggregatedRollout

__all__ = ["DisaggregatedRollout", "Generated", "disaggregate"]
