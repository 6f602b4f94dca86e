"""`balanced`: the ideal run. The same sequences and micro-steps, with tokens spread evenly and no transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trimtab.planner import StepPlan
from trimtab.policies.policy import Traits, View
from trimtab.policies.static import Static


@dataclass(frozen=True)
class Balanced:
    """The upper bound for balancers. Its plan is that of `static`; its trait `ideal` makes the load count as even."""

    traits: ClassVar[Traits] = Traits(known_at="nothing", transfers_start="never", copies="none", ideal=True)

    def plan(self, view: View) -> StepPlan:
        return Static().plan(view)
