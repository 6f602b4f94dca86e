"""Metrics of an RL step: those of its rollout, of its plan or its live choices, and seconds of its parts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Sequence_

import torch
import torch.distributed as dist

from trimtab.rl.collectives import reduce
from trimtab.rl.sequences import Sequence


def live_metrics(counted: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step in mode `live`, by the names that they have in other modes.

    Args:
        counted: of `Session.take_metrics`.
    """
    return {
        "moe/max_vio_before": counted["live/max_vio_before"],
        "moe/max_vio_after": counted["live/max_vio_after"],
        "moe/replicas": counted["live/replicas"],
    }


def rollout_metrics(sequences: Sequence_[Sequence], device: torch.device) -> dict[str, float]:
    """Metrics of a step's rollout over all ranks. Collective.

    A decode step samples one token of every response that has not ended, on every rank. Ranks decode side by side and
    wait for the one with most decode steps. The occupancy is sampled tokens / (places x decode steps).

    Args:
        sequences: of this rank, each of which had a place.
        device: of the communication.
    """
    mine = [s.new_tokens for s in sequences]
    finished = [s for s in sequences if s.is_finished]
    places, new, read, ended, rewards, lengths = (
        reduce(value, device)
        for value in (
            len(mine), sum(mine), sum(len(s.token_ids) for s in sequences) - sum(mine), len(finished),
            sum(s.reward for s in finished), sum(s.response_length for s in finished),
        )
    )  # fmt: skip
    steps, longest = (
        reduce(max(values, default=0), device, dist.ReduceOp.MAX)
        for values in (mine, [s.response_length for s in sequences])
    )
    return {
        "reward": rewards / max(1, ended),
        "response_length": lengths / max(1, ended),
        "rollout/longest_response": longest,
        "rollout/finished": ended,
        "rollout/tokens": new,
        "rollout/prefix_tokens": read,
        "rollout/decode_steps": steps,
        "rollout/occupancy": new / max(1, places * steps),
    }


class StepClock:
    """Measures consecutive parts of a step.

    Attributes:
        laps: seconds of each part, by name.
    """

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End the current part, give it a name, and start the next one."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
