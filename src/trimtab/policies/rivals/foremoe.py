"""`foremoe`: homes for the step and replicas for every micro-step, from the routing that the rollout recorded.

Source: ForeMoE (arXiv 2606.11867); our reimplementation from the paper's abstract and introduction, as it has no public
code. Routing known from the rollout is used to balance every micro-step of recompute and update. A hierarchical planner
splits the NP-hard problem into tractable parts. Experts travel on two paths, through host memory and from GPU to GPU,
both overlapped with compute, so that a replica may go to any node. Up to 1.45x on 64 GPUs.

Not specified by the source, and our choices:

* the parts of the planner: homes of the step, from the step's loads, longest first over nodes and then over their ranks
  (`lpt_homes.py`); and for every micro-step and layer an incremental greedy that adds replicas on any rank, near ones
  first, and splits tokens over them (`greedy.py`);
* a layer keeps its homes if new ones gain little;
* sources send to their own rank first, then to their own node.

On equal terms, homes are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.planner import Placement, StepPlan
from trimtab.policies.planning_time import PlanningTime
from trimtab.policies.policy import Choices, Traits, View
from trimtab.policies.rivals.greedy import plan_greedily
from trimtab.policies.rivals.lpt_homes import level_homes


@dataclass(frozen=True)
class ForeMoe:
    """Homes for the step by LPT, replicas on any rank for every instance.

    Attributes:
        threshold: target max/mean load of every instance.
        smallest_share: fewest tokens of a replica.
        smallest_gain: fall of max/mean (over nodes plus over ranks) for which a layer's homes are moved;
            None: they never are.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="step",
        planning=PlanningTime.measured("foremoe"),
        transfers_start="micro-step",
        host_path=True,
        relocates=True,
    )
    choices: ClassVar[Choices] = (
        {"smallest_gain": 0.1, "threshold": 1.003, "smallest_share": 128},
        {"smallest_gain": 0.3, "threshold": 1.003, "smallest_share": 512},
        {"smallest_gain": 0.3, "threshold": 1.003, "smallest_share": 2048},
        {"smallest_gain": None, "threshold": 1.003, "smallest_share": 512},
    )
    threshold: float = 1.01
    smallest_share: int = 128
    smallest_gain: float | None = 0.02

    def plan(self, view: View) -> StepPlan:
        placement, cluster = view.placement, view.cluster
        if not view.equal_terms and self.smallest_gain is not None:
            loads_LE = view.workload.token_counts_MLRE.sum(axis=(0, 2), dtype=np.int64)
            placement = Placement(
                level_homes(loads_LE, placement.home, cluster.ranks, cluster.ranks_per_node, self.smallest_gain)
            )
        return plan_greedily(
            view, placement, within_node=False, threshold=self.threshold, smallest_share=self.smallest_share
        )
