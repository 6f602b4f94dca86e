"""`PlanSettings`: thresholds of replicas and split, limits of a plan, and what moves of homes have to pay.

Limits of rows are a guarantee: every instance of a plan keeps to them, or the step is refused before it runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, StepCosts
from trimtab.errors import InputError
from trimtab.planner.replicas.kernel_values import PARTS_PER_WHOLE, Limits, Prices
from trimtab.planner.replicas.layer_plan import NO_LIMIT

# Most of the gain of 1.0, with fewer replicas. With the most, products of loads are below 2**63.
THRESHOLD, MOST_THRESHOLD = 1.005, 1000
FEMTOSECONDS = 1e15
BALANCE_ALONE = Prices(1, 0, 0, 0, 0)


@dataclass(frozen=True)
class PlanSettings:
    """Settings of replicas and split, and of moves.

    Attributes:
        threshold: max/mean load up to which an instance is not changed.
        smallest_share: fewest tokens that a copy computes, for efficient matrix products.
        move_life: steps that new homes are expected to stay good, over which the time of a move is spread; None: for as
            many as homes for past loads would have stayed good, and for 100 if none of these would have become bad.
        least_gain: a step is planned only if that is predicted to save this part of its time; below 0 also where it
            costs time.
        max_rows_per_rank: rows that no rank may exceed in any instance. A step that can't keep to it is refused.
        exact: whether no rank may have more rows than the mean, rounded up, as static shapes need. A step that can't be
            spread so evenly is refused.

    Raises:
        InputError: if a value is out of range.
    """

    threshold: float = THRESHOLD
    smallest_share: int = 128
    move_life: float | None = None
    least_gain: float = 0.0
    max_rows_per_rank: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= MOST_THRESHOLD:
            raise InputError(
                f"the threshold is {self.threshold}; it should be a max/mean load from 1 to {MOST_THRESHOLD}"
            )
        if self.smallest_share < 1:
            raise InputError(f"the smallest share is {self.smallest_share}; it should be 1 token or more")
        if self.move_life is not None and not 1 <= self.move_life < math.inf:
            raise InputError(f"the life of a move is {self.move_life}; it should be 1 step or more")
        if not math.isfinite(self.least_gain):
            raise InputError(f"the least gain is {self.least_gain}; it should be a part of a step's time")
        if self.max_rows_per_rank is not None and self.max_rows_per_rank < 1:
            raise InputError(f"max_rows_per_rank is {self.max_rows_per_rank}; it should be 1 row or more")

    def limits(
        self,
        cluster: ClusterSpec,
        prices: Prices = BALANCE_ALONE,
        *,
        reach: int | None = None,
        sends: int = 0,
        forwards: bool = True,
    ) -> Limits:
        """These settings on a cluster, as the kernels take them.

        Args:
            prices: what replicas reduce; by default the busiest rank's rows alone.
            reach: neighbouring ranks that take each other's replicas; all by default.
            sends, forwards: as in `Limits`; 0: any number is sent.
        """
        parts = round(self.threshold * PARTS_PER_WHOLE)
        return Limits(
            cluster.ranks_per_node,
            reach or cluster.ranks,
            cluster.slots_per_rank,
            parts,
            int(self.smallest_share),
            int(NO_LIMIT if self.max_rows_per_rank is None else self.max_rows_per_rank),
            bool(self.exact),
            prices,
            int(sends or NO_LIMIT),
            bool(forwards),
        )

    @property
    def limits_rows(self) -> bool:
        """Whether rows of a rank are limited."""
        return self.exact or self.max_rows_per_rank is not None

    def to_json(self, costs: StepCosts | None = None, **others: Any) -> str:
        """The settings of a plan as one JSON object: these, the costs if known, and others."""
        values = asdict(self) | others
        if costs is not None:
            # Nine digits: the text is part of the plan's hash.
            operations = {name: float(f"{value:.9g}") for name, value in costs.operations._asdict().items()}
            values["costs"] = {
                "forwards": costs.forwards,
                "ring_layers": costs.ring_layers,
                "operations": operations,
            }
        # Also numpy's numbers.
        return json.dumps(values, default=lambda value: value.item())


def prices_of(costs: StepCosts, cluster: ClusterSpec, exposed: float) -> Prices:
    """Prices of rows and replicas in an instance.

    Args:
        exposed: the part of a replica's transfers that is assumed not to overlap with compute.
    """
    operations = costs.operations
    near_s, far_s = (
        (costs.forwards + 1) * weights_s + gradient_s
        for weights_s, gradient_s in (
            (operations.near_weights_s or operations.host_weights_s, operations.near_gradient_s),
            (operations.far_weights_s or operations.host_weights_s, operations.far_gradient_s),
        )
    )
    # Of a row more between nodes, if the token's other rows are anywhere: others may share its transfer.
    far_row_s = 0.0
    if cluster.nodes > 1:
        alone = (1 - 1 / cluster.nodes) ** (operations.top_k - 1)
        if operations.expert_groups > 1 and operations.top_k > 1:
            used = operations.far_share * operations.top_k / cluster.nodes
            alone = (1 - used) ** (1 - 1 / operations.top_k)
        far_row_s = alone * operations.far_row_s / cluster.ranks_per_node
    seconds = (
        costs.computed_row_s,
        costs.crossings * operations.even_near_row_s,
        costs.crossings * far_row_s,
        exposed * near_s / cluster.ranks,
        exposed * far_s / cluster.ranks,
    )
    return Prices(*(round(value * FEMTOSECONDS) for value in seconds))


def require_known_routes(settings: PlanSettings, mixed_GML: Sequence[Array]) -> None:
    """Raises InputError if the settings limit rows and routes are unknown, since such rows may go to any rank.

    Args:
        mixed_GML: of each group, `[M, L]` bool, instances with unknown routes.
    """
    if not settings.limits_rows:
        return
    for mixed_ML in mixed_GML:
        if mixed_ML.any():
            micro_step, layer = np.argwhere(mixed_ML)[0].tolist()
            raise InputError(
                f"rows of a rank can't be limited: micro-step {micro_step}, MoE layer {layer} has tokens of unknown "
                "route; record all routes, mark tokens that nothing reads as unread, or plan without max_rows_per_rank "
                "and exact"
            )


def keeps_to(settings: PlanSettings, loads_GMLR: Sequence[Array]) -> bool:
    """Whether no rank has more rows than the settings allow.

    Args:
        loads_GMLR: of each group, `[M, L, R]` int64 rows.
    """
    return not settings.limits_rows or not any(_excess(settings, loads_MLR).any() for loads_MLR in loads_GMLR)


def refuse(settings: PlanSettings, slots: int, plan_loads: Callable[[PlanSettings], list[Array]]) -> InputError:
    """The error for a step that can't keep to its limits. Names an instance, and what would be possible.

    Args:
        slots: of a rank.
        plan_loads: plans the step with other limits, with replicas wherever they may be; returns the loads.
    """
    loads_MLR = next(loads_MLR for loads_MLR in plan_loads(settings) if _excess(settings, loads_MLR).any())
    micro_step, layer = np.argwhere(_excess(settings, loads_MLR).any(axis=2))[0].tolist()
    loads_R = loads_MLR[micro_step, layer]
    where = f"in micro-step {micro_step}, MoE layer {layer}, the busiest rank would have {loads_R.max():,} rows"
    if settings.exact and (loads_R > _even(loads_MLR)[micro_step, layer]).any():
        return InputError(
            f"exact=True can't be kept: {where}, the mean is {loads_R.mean():,.1f}; use more than {slots} slots per "
            "rank, or exact=False"
        )
    return InputError(
        f"max_rows_per_rank={settings.max_rows_per_rank:,} can't be kept: {where}; "
        f"{_possible_limit(settings, plan_loads):,} can be kept with {slots} slots per rank; raise the limit or the "
        "slots, or lower the token budget"
    )


def _possible_limit(settings: PlanSettings, plan_loads: Callable[[PlanSettings], list[Array]]) -> int:
    """A `max_rows_per_rank` that the step can keep, near the smallest: by bisection between planned ones."""

    def limited(rows: int) -> PlanSettings:
        return replace(settings, exact=False, max_rows_per_rank=rows)

    loads_GMLR = plan_loads(replace(settings, exact=True, max_rows_per_rank=None))
    possible = max(int(loads_MLR.max(initial=0)) for loads_MLR in loads_GMLR)
    impossible = max(int(_even(loads_MLR).max(initial=0)) for loads_MLR in loads_GMLR) - 1
    # With this limit other homes may be chosen than for exact loads.
    while not keeps_to(limited(possible), loads_GMLR := plan_loads(limited(possible))):
        possible = max(int(loads_MLR.max()) for loads_MLR in loads_GMLR)
    while possible - impossible > 1:
        middle = (possible + impossible) // 2
        if keeps_to(limited(middle), plan_loads(limited(middle))):
            possible = middle
        else:
            impossible = middle
    return possible


def _excess(settings: PlanSettings, loads_MLR: Array) -> Array:
    """`[M, L, R]` bool, ranks with more rows than allowed."""
    excess_MLR = np.zeros(loads_MLR.shape, bool)
    if settings.max_rows_per_rank is not None:
        excess_MLR |= loads_MLR > settings.max_rows_per_rank
    if settings.exact:
        excess_MLR |= loads_MLR > _even(loads_MLR)
    return excess_MLR


def _even(loads_MLR: Array) -> Array:
    """`[M, L, 1]` mean rows of a rank, rounded up."""
    return np.asarray(-(-loads_MLR.sum(axis=2, keepdims=True) // loads_MLR.shape[2]))
