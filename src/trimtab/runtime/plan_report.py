"""`PlanReport`: figures of a plan that was applied."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.figures import by_key, measured, with_documented_figures
from trimtab.planner import PlannedStep
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime.rank_memory import RankMemory


@with_documented_figures
@dataclass(frozen=True)
class PlanReport:
    """Figures of a planned step.

    Where replicas are planned while the step runs (`is_sliced`), their number, `max_vio_after` and `peak_rows_after`
    are expectations; `Session.take_metrics` has the figures of what was planned. `memory` is that of this rank when the
    plan was applied.
    """

    memory: RankMemory
    is_sliced: bool = measured("whether replicas and split follow while the step runs")
    planning_s: float = measured("from counting to the end of the plan's broadcast", "s", key="planning_s")
    waited_s: float = measured(
        "for which the step waited: `planning_s`, and applying the plan without moves", "s", key="waited_s"
    )
    ahead_s: float = measured(
        "of counting and planning ahead of the step, during the rollout, on the first rank", "s", key="ahead_s"
    )
    known_ahead: float = measured(
        "part of the step's tokens from which homes and strategy were chosen ahead of the step; if it is 0, they were "
        "chosen from all, or doing nothing was; the schedule always is of all",
        key="known_ahead",
    )
    moving_s: float = measured("of moving experts to new homes", "s", key="moving_s")
    strategy: str = measured("what the plan does, the strategy with the least predicted time")
    runner_up: str = measured('the second best strategy; "" if there is no other')
    predicted_s: float = measured("predicted time of the step", "s")
    predicted_gain: float = measured(
        "predicted saving of the best strategy over doing nothing, as a fraction of the step, also where it is too "
        "small for a plan to be executed",
        key="moe/predicted_gain",
    )
    max_vio_before: float = measured(
        "max/mean - 1 of rank loads, mean over instances, at the present homes", key="moe/max_vio_before"
    )
    max_vio_after: float = measured("the same under the plan", key="moe/max_vio_after")
    replicas: int = measured("replicas in all instances; expected ones if `is_sliced`", key="moe/replicas")
    homes_moved: int = measured("experts that change rank, over all layers", key="moe/homes_moved")
    micro_steps: int = measured("micro-steps of the step")
    unplanned_micro_steps: int = measured("micro-steps that run without a plan")
    mixed_instances: int = measured("instances with unknown routes, whose counts the ranks exchange")
    peak_rows_before: int = measured(
        "of the busiest rank in its busiest instance, at the present homes", "rows", key="moe/peak_rows_before"
    )
    peak_rows_after: int = measured("the same under the plan", "rows", key="moe/peak_rows_after")

    @classmethod
    def of(
        cls,
        planned: PlannedStep,
        loads: tuple[Array, Array],
        memory: RankMemory,
        *,
        is_executed: bool,
        homes_moved: int,
        moving_s: float,
        applying_s: float,
    ) -> PlanReport:
        """Figures of a plan that has just been applied.

        Args:
            loads: rows `[M, L, R]` of each rank at the homes before, and under the plan without replicas that follow.
            moving_s, applying_s: seconds of moving experts, and of the rest of applying the plan.
        """
        before, after = loads
        plan, slices = planned.plan, planned.slices if is_executed else None
        max_vio, replicas = float(max_over_mean(after).mean() - 1), plan.num_replicas
        peak_rows = int(after.max(initial=0))
        if slices is not None:
            peak_rows = min(peak_rows, math.ceil((1 + slices.max_vio) * after.mean(axis=2).max(initial=0.0)))
            max_vio, replicas = slices.max_vio, round(slices.replicas * plan.mixed_ML.size)
        return cls(
            is_sliced=slices is not None,
            planning_s=planned.planning_s,
            waited_s=planned.planning_s + applying_s,
            ahead_s=planned.ahead_s,
            known_ahead=planned.known_ahead,
            moving_s=moving_s,
            strategy=planned.strategy,
            runner_up=planned.runner_up,
            predicted_s=planned.predicted_s,
            predicted_gain=planned.predicted_gain,
            max_vio_before=planned.max_vio_before,
            max_vio_after=max_vio,
            replicas=replicas,
            homes_moved=homes_moved,
            micro_steps=plan.num_micro_steps,
            unplanned_micro_steps=0 if is_executed else plan.num_micro_steps,
            mixed_instances=int(np.count_nonzero(plan.mixed_ML)),
            peak_rows_before=int(before.max(initial=0)),
            peak_rows_after=peak_rows,
            memory=memory,
        )

    def __getattr__(self, name: str) -> int:
        """Figures of `memory` that stood in the report itself."""
        if name in ("pool_bytes", "mirror_bytes", "peer_memory_bytes", "free_bytes"):
            return int(getattr(self.memory, name))
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def metrics(self) -> dict[str, float]:
        """Its figures and those of `memory`, by their names in the metrics of a step."""
        return by_key(self) | self.memory.metrics()
