"""`Settings`: the checked arguments of a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args

import trimtab
from trimtab.cluster import ClusterSpec
from trimtab.planner import PlanSettings
from trimtab.runtime.argument_checks import at_least, finite, one_of
from trimtab.runtime.live.policies import LivePolicy, Predictor

Mode = Literal["plan", "rehome", "static", "live", "shadow", "off"]
Paths = Literal["both", "peer", "host", "message"]
# Environment variable: 1 turns on `verify_weights` unless the argument is given.
VERIFY_WEIGHTS = "TRIMTAB_VERIFY_WEIGHTS"

_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "num_experts": partial(at_least, least=1),
    "mode": partial(one_of, allowed=get_args(Mode)),
    "paths": partial(one_of, allowed=get_args(Paths)),
    "policy": partial(one_of, allowed=get_args(LivePolicy)),
    "predictor": partial(one_of, allowed=get_args(Predictor)),
    "slots_per_rank": partial(at_least, least=0),
    "ring_layers": partial(at_least, least=2),
    "mirror_bytes": partial(at_least, least=0),
    "least_gain": finite,
    "max_rows_per_rank": partial(at_least, least=1),
}
_OPTIONAL = ("mirror_bytes", "max_rows_per_rank")
# Settings that may differ between ranks.
_OF_ONE_RANK = ("verify_weights",)


@dataclass(eq=False)
class Settings:
    """The arguments of `Session` that are not process groups; see there. Assignments are checked.

    Args:
        verify: the argument `verify_weights`.

    Raises:
        InputError: if a value is out of its range.
    """

    num_experts: int
    mode: Mode
    slots_per_rank: int
    ring_layers: int
    paths: Paths
    mirror_bytes: int | None
    least_gain: float
    max_rows_per_rank: int | None
    exact: bool
    rates: ClusterSpec | None
    policy: LivePolicy
    predictor: Predictor
    verify: InitVar[bool | None]
    verify_weights: bool = field(init=False)

    def __post_init__(self, verify: bool | None) -> None:
        by_default = self.mode == "shadow" or os.environ.get(VERIFY_WEIGHTS) == "1"
        self.verify_weights = by_default if verify is None else verify

    def __setattr__(self, name: str, value: object) -> None:
        if name in _CHECKS and not (name in _OPTIONAL and value is None):
            _CHECKS[name](name, value)
        super().__setattr__(name, value)

    @property
    def executes_plans(self) -> bool:
        """Whether plans are executed, not only reported."""
        return self.mode in ("plan", "rehome", "static")

    @property
    def slices_plans(self) -> bool:
        """Whether replicas may be planned while the step runs."""
        return self.mode == "plan" and self.max_rows_per_rank is None and not self.exact

    @property
    def planned_slots(self) -> int:
        """Most replicas of one layer on a rank that plans may have."""
        return 0 if self.mode == "rehome" else self.slots_per_rank

    @property
    def plan_settings(self) -> PlanSettings:
        """The planner's settings."""
        return PlanSettings(least_gain=self.least_gain, max_rows_per_rank=self.max_rows_per_rank, exact=self.exact)

    @property
    def shared(self) -> dict[str, object]:
        """The version of Trimtab and the settings that must be equal on all ranks, by name."""
        compared = [setting.name for setting in fields(self) if setting.name not in _OF_ONE_RANK]
        return {"version of Trimtab": trimtab.__version__} | {name: getattr(self, name) for name in compared}
