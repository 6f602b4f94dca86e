"""`Planner`: all four levels of a step, from the routing of its sequences. Counts during the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import QWEN3_30B, ClusterSpec, CostModel
from trimtab.errors import InputError
from trimtab.planner.placement.home_swaps import place_experts
from trimtab.planner.placement.placement import Placement
from trimtab.planner.plan.home_choice import HomeChoice, choose_homes, drop_costly_replicas, split_again
from trimtab.planner.plan.instances import map_layers
from trimtab.planner.plan.plan_settings import PlanSettings
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.workload import Workload
from trimtab.planner.schedule.grouping import group_by_routing
from trimtab.planner.schedule.ordering import order_for_reuse, reordered
from trimtab.planner.schedule.rank_assignment import assign_ranks, rows_by_node
from trimtab.planner.schedule.schedule import Schedule, pack_by_length
from trimtab.planner.schedule.sequence_counts import SequenceCounts
from trimtab.trace.routing import RoutingTrace

# In parts of a layer's imbalance per expert; see `place_experts`.
MOVE_PENALTIES = (0.0, 0.25, 1.0)


class GroupPlans(NamedTuple):
    """Plans of one step for all expert-parallel groups.

    Attributes:
        schedule: on the data ranks of all groups.
        placement: the homes, the same in all groups.
        plans: one for each group.
    """

    schedule: Schedule
    placement: Placement
    plans: tuple[StepPlan, ...]


class Planner:
    """Plans one step after another for a cluster. Homes stay where the last step put them unless a move reduces the
    time.

    Args:
        cluster: the ranks of one expert-parallel group.
        placement: homes when the first step begins.
        groups: expert-parallel groups that share the homes; each has its own sequences.
        cost: costs of moves and bytes; of Qwen3-30B-A3B on this cluster by default.
        threads: layers counted or planned at the same time. Plans don't depend on it.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        placement: Placement,
        *,
        groups: int = 1,
        settings: PlanSettings | None = None,
        cost: CostModel | None = None,
        threads: int = 1,
    ) -> None:
        self.cluster = cluster
        self.placement = placement
        self.groups = groups
        self.settings = settings or PlanSettings()
        self.cost = cost or CostModel.of(cluster, QWEN3_30B)
        self.threads = threads
        self.schedule: Schedule | None = None
        self._counted: list[SequenceCounts] = []

    def add(self, trace: RoutingTrace) -> None:
        """Count finished sequences. Call it any number of times.

        Raises:
            InputError: if the trace has other layers or experts than the placement.
        """
        if (trace.num_layers, trace.num_experts) != self.placement.home.shape:
            layers, experts = self.placement.home.shape
            raise InputError(f"the trace has {trace.shape_text}; the planner is for {layers} layers, {experts} experts")
        self._counted.append(SequenceCounts.from_trace(trace))

    def finish(
        self, *, token_budget: int, mini_batch: Array | None = None, keep: Array | None = None
    ) -> tuple[StepPlan, ...]:
        """Plan the step of all sequences added since the last one, in the order of adding.

        Args:
            token_budget: most tokens that a rank may hold in one micro-step.
            mini_batch: `[N]` mini-batch of each kept sequence; all in one by default.
            keep: `[N]` indices of the sequences to train on; all by default.

        Returns:
            One plan for each expert-parallel group. Its sequences are those of `of_group` of the step's schedule, which
            is `schedule`.

        Raises:
            InputError: if nothing was added, or a sequence exceeds the budget.
        """
        if not self._counted:
            raise InputError("there is nothing to plan; add the step's sequences first")
        sequences = SequenceCounts.concatenate(self._counted)
        if keep is not None:
            sequences = sequences.select(keep)
        planned = plan_sequences(
            sequences,
            self.placement,
            self.cluster,
            token_budget=token_budget,
            mini_batch=mini_batch,
            groups=self.groups,
            settings=self.settings,
            cost=self.cost,
            threads=self.threads,
        )
        self.schedule, self.placement = planned.schedule, planned.placement
        self._counted.clear()
        return planned.plans


def plan_sequences(
    sequences: SequenceCounts,
    placement: Placement,
    cluster: ClusterSpec,
    *,
    token_budget: int,
    mini_batch: Array | None = None,
    groups: int = 1,
    settings: PlanSettings | None = None,
    cost: CostModel | None = None,
    may_move: bool = True,
    threads: int = 1,
) -> GroupPlans:
    """All four levels of one step; the arguments are those of `Planner`, and `may_move`: whether homes may change.

    Sequences are packed by length and homes placed for that; then sequences are grouped by routing on those homes,
    homes placed again, now including the cost of moves, micro-steps ordered, and sequences assigned to ranks near their
    experts. Replicas and split follow for every instance in which they reduce the predicted time.

    Raises:
        InputError: if the homes are not even or not for this step, a sequence exceeds the budget, or mini-batches don't
            fit the sequences.
    """
    placement.check(sequences.num_layers, sequences.num_experts, cluster.ranks)
    if groups < 1:
        raise InputError(f"there are {groups} expert-parallel groups; there should be 1 or more")
    chosen = settings or PlanSettings()
    weights = cost or CostModel.of(cluster, QWEN3_30B)
    packed = pack_by_length(
        sequences.lengths, num_ranks=cluster.ranks * groups, token_budget=token_budget, mini_batch=mini_batch
    )
    balanced = placement
    if may_move:
        balanced = _place(_workloads(sequences, packed, cluster.ranks, groups), placement, cluster, 0.0, threads)
    attention_S = np.rint(weights.attention_rows(sequences.lengths)).astype(np.int64)
    schedule = group_by_routing(
        sequences, packed, balanced, token_budget, num_groups=groups, attention_rows=attention_S
    )
    workloads = _workloads(sequences, schedule, cluster.ranks, groups)
    candidates = _candidates(workloads, placement, cluster, threads) if may_move else [placement]
    choice = choose_homes(workloads, candidates, cluster, chosen, weights, threads)
    order = order_for_reuse(choice.group(0), schedule.mini_batch_of_micro_step)
    choice = drop_costly_replicas(choice, workloads, cluster, weights, threads)
    # Replicas depend on counts by micro-step and expert, which the order and the ranks of sequences don't change.
    schedule = reordered(schedule, order)
    rows_SN = rows_by_node(sequences, choice.placement, cluster)
    schedule = assign_ranks(sequences.lengths, schedule, rows_SN, token_budget, num_groups=groups, work=attention_S)
    workloads = _workloads(sequences, schedule, cluster.ranks, groups)
    choice = split_again(choice, order, workloads, cluster, threads)
    text = chosen.to_json(weights, groups=groups, token_budget=token_budget)
    return _join(choice, workloads, schedule, cluster, text)


def plan_schedule(
    workloads: Sequence[Workload],
    schedule: Schedule,
    placement: Placement,
    cluster: ClusterSpec,
    *,
    settings: PlanSettings | None = None,
    cost: CostModel | None = None,
    may_move: bool = True,
    threads: int = 1,
) -> GroupPlans:
    """All levels below a given schedule. Other arguments are those of `Planner`.

    Args:
        workloads: of each expert-parallel group.
        schedule: on the data ranks of all groups.
        may_move: whether homes may change.
    """
    chosen, weights = settings or PlanSettings(), cost or CostModel.of(cluster, QWEN3_30B)
    candidates = _candidates(workloads, placement, cluster, threads) if may_move else [placement]
    choice = choose_homes(workloads, candidates, cluster, chosen, weights, threads)
    choice = drop_costly_replicas(choice, workloads, cluster, weights, threads)
    return _join(choice, workloads, schedule, cluster, chosen.to_json(weights, groups=len(workloads)))


def _workloads(sequences: SequenceCounts, schedule: Schedule, ranks: int, groups: int) -> list[Workload]:
    """The load of each expert-parallel group."""
    loads = []
    for group in range(groups):
        mine, part = schedule.of_group(group, ranks)
        loads.append(Workload.from_sequences(sequences if groups == 1 else sequences.select(mine), part))
    return loads


def _candidates(
    workloads: Sequence[Workload], placement: Placement, cluster: ClusterSpec, threads: int
) -> list[Placement]:
    """The present homes, and improved ones with every move penalty."""
    return [placement] + [_place(workloads, placement, cluster, penalty, threads) for penalty in MOVE_PENALTIES]


def _place(
    workloads: Sequence[Workload], placement: Placement, cluster: ClusterSpec, move_penalty: float, threads: int
) -> Placement:
    """Homes for the micro-steps of all groups, layer by layer."""
    counts_MLE = np.concatenate([workload.token_counts_MLRE.sum(axis=2) for workload in workloads])

    def place_one(layer: int) -> Array:
        return place_experts(
            counts_MLE[:, layer],
            placement.home[layer],
            cluster.ranks,
            cluster.ranks_per_node,
            move_penalty=move_penalty / counts_MLE.shape[2],
        )

    return Placement(np.stack(map_layers(place_one, len(placement.home), threads)))


def _join(
    choice: HomeChoice, workloads: Sequence[Workload], schedule: Schedule, cluster: ClusterSpec, settings: str
) -> GroupPlans:
    """The plans of all groups."""
    plans = tuple(
        StepPlan.from_replicas(
            schedule.of_group(group, cluster.ranks)[1],
            choice.placement,
            choice.group(group),
            mixed_ML=workload.mixed_ML,
            cluster=cluster,
            settings=settings,
        )
        for group, workload in enumerate(workloads)
    )
    return GroupPlans(schedule, choice.placement, plans)
