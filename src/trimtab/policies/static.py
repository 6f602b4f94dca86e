"""`static`: plain expert parallelism, the baseline of every speed-up; `scheduled`; and `balanced`, the ideal run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.planner import StepPlan
from trimtab.policies.policy import Traits, View


@dataclass(frozen=True)
class Static:
    """Every expert at its home, no replicas."""

    traits: ClassVar[Traits] = Traits(known_at="nothing", transfers_start="never", copies="none", packs_by_length=True)

    def plan(self, view: View) -> StepPlan:
        nothing = np.empty((0, 2), np.int64), np.empty((0, view.cluster.ranks), np.int64)
        return view.plan_instances(lambda *_: nothing, placement=view.placement, slots=0)


@dataclass(frozen=True)
class Scheduled(Static):
    """The same with sequences packed by their predicted time: what a schedule alone gains."""

    traits: ClassVar[Traits] = Traits(known_at="nothing", transfers_start="never", copies="none")


@dataclass(frozen=True)
class Balanced:
    """The upper bound for balancers. Its plan is that of `static`; its trait `ideal` makes the load count as even."""

    traits: ClassVar[Traits] = Traits(known_at="nothing", transfers_start="never", copies="none", ideal=True)

    def plan(self, view: View) -> StepPlan:
        return Static().plan(view)
