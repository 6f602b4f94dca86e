"""Predicted time of a step under a plan, by part: the planner's objective.

Rows, experts, dense parts and transfers of replicas are those that the simulator charges, on the same timeline. Each
micro-step runs forward and backward once; its forward counts as often as a step has it. A test compares predictions
with simulated steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import StepCosts
from trimtab.kernels import kernel
from trimtab.planner.plan.rank_work import rank_work
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.step_times import dense_seconds, moving_seconds, refresh_seconds
from trimtab.planner.plan.workload import Workload
from trimtab.planner.replicas.paths import HOST, layers_of_replicas
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.planner.schedule.schedule import Schedule
from trimtab.timeline import MIGRATION, OPTIMIZER, PARTS, PLANNING, TRANSFERS
from trimtab.timeline.clocks import synchronise
from trimtab.timeline.layer_passes import AT_MICRO_STEP, SHARED, RankWork, Recipe, Run, run_pass
from trimtab.timeline.replica_transfers import Copies, returned_by


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predicted time of a step.

    Attributes:
        parts_s: seconds by part, with the names of `PARTS`.
    """

    parts_s: dict[str, float]

    @classmethod
    def of(cls, parts_P: Array) -> Prediction:
        """From seconds in the order of `PARTS`."""
        return cls(dict(zip(PARTS, parts_P.tolist(), strict=True)))

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts_s.values())


def group_parts(
    work: RankWork,
    replicas: ReplicaTable,
    paths_P: Array,
    home_LE: Array,
    dense: tuple[Array, Array],
    closes_M: Array,
    ranks_per_node: int,
    costs: StepCosts,
) -> Array:
    """Seconds by part `[P]` of the passes of a group's M micro-steps with L layers.

    Args:
        work: of every rank and instance.
        replicas: of M * L instances, those of a micro-step next to each other.
        paths_P: `[P]` uint8.
        home_LE: `[L, E]` int16.
        dense: `[M, R]` float64 each, see `dense_seconds`.
        closes_M: `[M]` bool, the last micro-steps of mini-batches.
    """
    layer_P = layers_of_replicas(replicas.replica_starts, len(home_LE))
    home_P = home_LE[layer_P, replicas.experts]
    copies = Copies.of(replicas.replica_starts, home_P, replicas.ranks, paths_P == HOST, ranks_per_node)
    recipe = Recipe(SHARED, AT_MICRO_STEP, costs.ring_layers)
    run = Run.at_zero(dense, work, costs.operations, recipe, copies)
    parts_MBP = np.zeros((len(closes_M), 2, len(PARTS)))
    _run_passes(run, closes_M, parts_MBP)
    forward_P, backward_P = parts_MBP.sum(axis=0)
    parts_P = costs.forwards * forward_P + backward_P
    # Sums of dense gradients overlap with the last backward of a mini-batch.
    last_s = parts_MBP[closes_M, 1].sum(axis=1)
    operations = costs.operations
    parts_P[OPTIMIZER] += (operations.optimizer_s + np.maximum(0.0, operations.reduce_s - last_s)).sum()
    return np.asarray(parts_P)


@kernel
def _run_passes(run, closes_M, parts_MBP):  # type: ignore[no-untyped-def]
    """Fill `parts_MBP` `[M, 2, P]` with the seconds by part of each micro-step's forward and backward.

    The ranks wait for each other at the end of each, and after the last of a mini-batch for all gradients.
    """
    clocks, order_G, no_G = run.clocks, np.zeros(1, np.int64), np.zeros(1, np.bool_)
    for m in range(len(closes_M)):
        order_G[0] = m
        for backward in range(2):
            for part in range(parts_MBP.shape[2]):
                parts_MBP[m, backward, part] -= clocks.parts_DP[0, part]
            run_pass(run, order_G, no_G, backward == 1)
            synchronise(clocks, np.int64(0), len(clocks.time_D))
            for part in range(parts_MBP.shape[2]):
                parts_MBP[m, backward, part] += clocks.parts_DP[0, part]
        if closes_M[m]:
            late = max(0.0, returned_by(run.transfers).max() - clocks.time_D[0])
            parts_MBP[m, 1, TRANSFERS] += late
            for d in range(len(clocks.time_D)):
                clocks.time_D[d] += late


def plan_parts(plan: StepPlan, work: RankWork, dense: tuple[Array, Array], costs: StepCosts) -> Array:
    """Seconds by part `[P]` of the passes of a group under its plan; see `group_parts`."""
    closes_M = closing_micro_steps(plan.mini_batch_of_micro_step)
    return group_parts(work, plan.replicas, plan.replica_paths, plan.home, dense, closes_M, plan.ranks_per_node, costs)


def closing_micro_steps(mini_batch_of_micro_step: Array) -> Array:
    """`[M]` bool, micro-steps that are the last of their mini-batch."""
    return np.append(np.diff(mini_batch_of_micro_step) != 0, True)[: len(mini_batch_of_micro_step)]


def slowest(parts_GP: Sequence[Array]) -> Array:
    """Parts `[P]` of the group that takes longest."""
    return max(parts_GP, key=lambda parts_P: float(parts_P.sum()))


def predict(
    plans: Sequence[StepPlan],
    workloads: Sequence[Workload],
    costs: StepCosts,
    *,
    lengths: Sequence[Array] | None = None,
    before_LE: Array | None = None,
    planning_s: float = 0.0,
) -> Prediction:
    """Predicted time of a step under the plans of its expert-parallel groups.

    Rows of unknown route are counted at their estimated experts.

    Args:
        lengths: `[S]` tokens of each group's sequences; without them dense parts take no time.
        before_LE: `[L, E]` homes when the step begins; those of the plans by default.
        planning_s: seconds of planning before the step.
    """
    parts_GP = []
    for group, (plan, workload) in enumerate(zip(plans, workloads, strict=True)):
        counts_MLRE = workload.estimated_MLRE
        work = rank_work(plan.replicas, plan.home, counts_MLRE, plan.ranks_per_node, costs.operations)
        dense = dense_times(plan.schedule, None if lengths is None else lengths[group], costs)
        parts_GP.append(plan_parts(plan, work, dense, costs))
    parts_P = slowest(parts_GP).copy()
    parts_P[PLANNING] += planning_s
    parts_P[MIGRATION] += refreshing_seconds(plans, costs)
    if before_LE is not None:
        parts_P[MIGRATION] += moving_seconds(before_LE, plans[0].home, plans[0].ranks_per_node, costs.operations)
    return Prediction.of(parts_P)


def refreshing_seconds(plans: Sequence[StepPlan], costs: StepCosts) -> float:
    """Seconds of refreshing mirrors after every optimizer step, of the group that takes longest."""
    each_s = (
        refresh_seconds(
            plan.home, plan.replicas, plan.replica_paths, plan.num_ranks, plan.ranks_per_node, costs.operations
        )
        for plan in plans
    )
    return max(each_s) * int(closing_micro_steps(plans[0].mini_batch_of_micro_step).sum())


def dense_times(schedule: Schedule, lengths: Array | None, costs: StepCosts) -> tuple[Array, Array]:
    """`dense_seconds`; zeros if the lengths are not known."""
    if lengths is None:
        nothing_MR = np.zeros((schedule.num_micro_steps, schedule.num_ranks))
        return nothing_MR, nothing_MR
    return dense_seconds(schedule, lengths, costs.operations)


def cross_node_rows(plan: StepPlan, workload: Workload) -> Array:
    """Rows `[M, L]` int64 that are computed on another node than their source rank's; includes estimates."""
    between_MLNN = plan.rows(workload).between_MLNN
    return np.asarray(between_MLNN.sum(axis=(2, 3)) - np.trace(between_MLNN, axis1=2, axis2=3))
