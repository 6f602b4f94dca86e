"""The token budget with which steps have a number of micro-steps."""

from __future__ import annotations

import math
from collections.abc import Iterable

from trimtab.array_type import Array
from trimtab.messages import note_once
from trimtab.planner.schedule.schedule import pack_by_length

# Headroom above the mean tokens of a micro-step, so that packing needs no more micro-steps than requested.
SLACK = 0.1


def budget_for(steps: Iterable[Array], ranks: int, micro_steps: int) -> int:
    """Token budget with which steps have about `micro_steps` micro-steps on `ranks` ranks.

    A line is logged if a sequence is too long for that.

    Args:
        steps: `[S]` tokens of the sequences of each step. The step with most tokens decides.
    """
    steps = list(steps)
    largest = max(steps, key=lambda lengths: int(lengths.sum()))
    longest = max(int(lengths.max(initial=1)) for lengths in steps)
    budget = math.ceil(int(largest.sum()) / (ranks * micro_steps) * (1 + SLACK))
    if longest > budget:
        count = pack_by_length(largest, num_ranks=ranks, token_budget=longest).num_micro_steps
        if count < micro_steps:
            note_once(
                f"--micro-steps {micro_steps}: about {count} are made, since the longest sequence has {longest} tokens"
            )
    return max(longest, budget)
