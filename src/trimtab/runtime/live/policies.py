"""Policies of live micro-steps, and `Trials`: the fastest of several policies for one layer, by measured time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

from trimtab.array_type import Array

LivePolicy = Literal["auto", "quota", "feplb", "predict", "off"]
Predictor = Literal["last", "average", "same"]

# Forwards in which a policy is tried, the first of which is not counted; and after how many all are tried again.
TRIED = 3
AGAIN_AFTER = 256
# What a policy must save of the time of the simplest one.
LEAST_GAIN = 0.02


class Trials:
    """Tries each policy for some forwards, then uses the fastest one, and after a while tries all again.

    Args:
        policies: the simplest first, which is used where others are about as fast.

    Attributes:
        next: the policy of the next forward.
    """

    def __init__(self, policies: Sequence[LivePolicy]) -> None:
        self._policies = policies
        self._times: dict[LivePolicy, list[float]] = {policy: [] for policy in policies}
        self._used: list[LivePolicy] = []
        self.next: LivePolicy = policies[0]

    def learn(self, measured_RS: Array) -> None:
        """Learn what the last forward took.

        Args:
            measured_RS: `[R, 2]` int64, nanoseconds and rows of every rank; zeros for ranks that don't know.
        """
        rows = int(measured_RS[:, 1].sum())
        if self._used and rows:
            # The slowest rank, in proportion to the rows of all.
            self._times[self._used[-1]].append(float(measured_RS[:, 0].max()) / rows)

    def use(self, policy: LivePolicy) -> None:
        """Note the policy of a forward, and choose the next one."""
        self._used.append(policy)
        if len(self._used) == AGAIN_AFTER:
            self._used.clear()
            self._times = {policy: [] for policy in self._policies}
        tried = len(self._used) // TRIED
        self.next = self._policies[tried] if tried < len(self._policies) else self._fastest()

    def _fastest(self) -> LivePolicy:
        simplest, *others = self._policies
        medians = {policy: median(times[1:] or times) for policy, times in self._times.items() if times}
        fastest = min((policy for policy in others if policy in medians), key=medians.__getitem__, default=simplest)
        if simplest in medians and medians[fastest] > (1 - LEAST_GAIN) * medians[simplest]:
            return simplest
        return fastest
