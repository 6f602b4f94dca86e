"""`PlanSettings`: thresholds of replicas and split."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.cluster import ClusterSpec, CostModel
from trimtab.errors import InputError
from trimtab.planner.replicas.kernel_values import PARTS_PER_WHOLE, Limits

# Where planning is free and transfers are hidden: most of the gain of 1.0, with fewer replicas.
THRESHOLD = 1.005
# In a training session. Every replica costs the ranks CPU time or links, so it has to save more than the last half
# percent of balance.
SESSION_THRESHOLD = 1.02


@dataclass(frozen=True)
class PlanSettings:
    """Settings of replicas and split.

    Attributes:
        threshold: max/mean load up to which an instance is not changed.
        smallest_share: fewest tokens that a copy computes, for efficient matrix products.

    Raises:
        InputError: if either is below 1.
    """

    threshold: float = THRESHOLD
    smallest_share: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.threshold < math.inf:
            raise InputError(f"the threshold is {self.threshold}; it should be a max/mean load of 1 or more")
        if self.smallest_share < 1:
            raise InputError(f"the smallest share is {self.smallest_share}; it should be 1 token or more")

    def limits(self, cluster: ClusterSpec) -> Limits:
        """These settings on a cluster, as the kernels take them."""
        parts = round(self.threshold * PARTS_PER_WHOLE)
        return Limits(cluster.ranks_per_node, cluster.slots_per_rank, parts, int(self.smallest_share))

    def to_json(self, cost: CostModel | None = None, **others: int) -> str:
        """The settings of a plan as one JSON object: these, the costs if known, and others."""
        values: dict[str, Any] = {"threshold": float(self.threshold), "smallest_share": int(self.smallest_share)}
        values |= {name: int(value) for name, value in others.items()}
        if cost is not None:
            # Nine digits: the text is part of the plan's hash.
            values["cost"] = {name: float(f"{value:.9g}") for name, value in asdict(cost).items()}
        return json.dumps(values)
