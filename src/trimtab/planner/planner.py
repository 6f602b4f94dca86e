"""`Planner`: all four levels of a step, from the routing of its sequences. Counts during the rollout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import QWEN3_30B, ClusterSpec, CostModel
from trimtab.errors import InputError
from trimtab.planner.ordering import order_for_reuse, reordered
from trimtab.planner.placement.placement import Placement, place_experts
from trimtab.planner.plan.instances import PlanSettings, map_layers, plan_step
from trimtab.planner.plan.prediction import predict
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.workload import Workload
from trimtab.planner.schedule.grouping import group_by_routing
from trimtab.planner.schedule.rank_assignment import rows_by_node, seat_by_locality
from trimtab.planner.schedule.schedule import Schedule, pack_by_length
from trimtab.planner.schedule.sequence_counts import SequenceCounts
from trimtab.trace.routing import RoutingTrace

# Move penalties, in parts of a layer's imbalance per expert; see `place_experts`.
RELUCTANCES = (0.0, 0.25, 1.0)
# Steps over which the cost of a move is spread. The load of a step changes slowly, so good homes stay good; but moves
# load links unevenly, and some are undone soon.
STEPS_TO_PAY = 4
# The part of a replica's transfer that is assumed not to overlap with compute, when deciding on replicas for an
# instance.
EXPOSED = 0.1


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
        self.schedule, self.placement, plans = plan_sequences(
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
        self._counted.clear()
        return plans


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
) -> tuple[Schedule, Placement, tuple[StepPlan, ...]]:
    """All four levels of one step; the arguments are those of `Planner`, and `may_move`: whether homes may change.

    Sequences are packed by length and homes placed for that; then sequences are grouped by routing on those homes,
    homes placed again, now including the cost of moves, micro-steps ordered, and sequences assigned to ranks near their
    experts. Replicas and split follow for every instance in which they reduce the predicted time.

    Returns:
        The schedule on the data ranks of all groups, the homes, and one plan for each group.

    Raises:
        InputError: if the homes are not even or not for this step, a sequence exceeds the budget, or mini-batches don't
            fit the sequences.
    """
    placement.check(sequences.num_layers, sequences.num_experts, cluster.ranks)
    if groups < 1:
        raise InputError(f"there are {groups} expert-parallel groups; there should be 1 or more")
    chosen = settings or PlanSettings()
    weights = cost or CostModel.of(cluster, QWEN3_30B)
    num_data_ranks = cluster.ranks * groups
    packed = pack_by_length(
        sequences.lengths, num_ranks=num_data_ranks, token_budget=token_budget, mini_batch=mini_batch
    )
    loads = _workloads(sequences, packed, cluster.ranks, groups)
    balanced = _placed(loads, placement, cluster, 0.0, threads) if may_move else placement
    lengths = sequences.lengths.astype(np.float64)
    attention = np.rint(lengths * (weights.attention_token_rows + weights.attention_square_rows * lengths))
    attention_S = attention.astype(np.int64)
    schedule = group_by_routing(
        sequences, packed, balanced, token_budget, num_groups=groups, attention_rows=attention_S
    )
    workloads = _workloads(sequences, schedule, cluster.ranks, groups)
    homes, first = _place(workloads, schedule, placement, cluster, chosen, weights, may_move=may_move, threads=threads)
    # Replicas don't depend on the ranks of sequences, so the order can be chosen first.
    order = order_for_reuse(first[0])
    worth = [_worth(each, load, weights)[order] for each, load in zip(first, workloads, strict=True)]
    schedule = reordered(schedule, order)
    rows_SN = rows_by_node(sequences, homes, cluster)
    schedule = seat_by_locality(sequences.lengths, schedule, rows_SN, token_budget, num_groups=groups, work=attention_S)
    workloads = _workloads(sequences, schedule, cluster.ranks, groups)
    costs = {name: float(f"{value:.9g}") for name, value in asdict(weights).items()}
    described = json.dumps({"groups": groups, "token_budget": int(token_budget), "cost": costs})
    plans = _plan_groups(workloads, schedule, homes, cluster, chosen, worth, threads=threads)
    return schedule, homes, tuple(replace(each, settings=f"{each.settings} {described}") for each in plans)


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
) -> tuple[Placement, tuple[StepPlan, ...]]:
    """All levels below a given schedule. Other arguments are those of `Planner`.

    Args:
        workloads: of each expert-parallel group.
        schedule: on the data ranks of all groups.
        may_move: whether homes may change.

    Returns:
        The homes, and one plan for each group.
    """
    chosen, weights = settings or PlanSettings(), cost or CostModel.of(cluster, QWEN3_30B)
    homes, plans = _place(workloads, schedule, placement, cluster, chosen, weights, may_move=may_move, threads=threads)
    worth = [_worth(each, load, weights) for each, load in zip(plans, workloads, strict=True)]
    return homes, _plan_groups(workloads, schedule, homes, cluster, chosen, worth, threads=threads)


def _place(
    workloads: Sequence[Workload],
    schedule: Schedule,
    placement: Placement,
    cluster: ClusterSpec,
    settings: PlanSettings,
    cost: CostModel,
    *,
    may_move: bool,
    threads: int,
) -> tuple[Placement, tuple[StepPlan, ...]]:
    """Returns the homes with the least predicted time, and plans on them with all replicas that balance."""
    if not may_move:
        return placement, _plan_groups(workloads, schedule, placement, cluster, settings, threads=threads)
    candidates = [placement] + [
        _placed(workloads, placement, cluster, reluctance, threads) for reluctance in RELUCTANCES
    ]
    tried = [
        _plan_groups(workloads, schedule, candidate, cluster, settings, threads=threads) for candidate in candidates
    ]
    homes = _cheapest(candidates, tried, workloads, cluster, cost)
    return homes, _plan_groups(workloads, schedule, homes, cluster, settings, threads=threads)


def _plan_groups(
    workloads: Sequence[Workload],
    schedule: Schedule,
    placement: Placement,
    cluster: ClusterSpec,
    settings: PlanSettings,
    worth: Sequence[Array] | None = None,
    *,
    threads: int,
) -> tuple[StepPlan, ...]:
    """Replicas and split of every group on given homes."""
    return tuple(
        plan_step(
            workload,
            schedule.of_group(group, cluster.ranks)[1],
            placement,
            cluster,
            settings,
            worth_ML=worth[group] if worth else None,
            threads=threads,
        )
        for group, workload in enumerate(workloads)
    )


def _workloads(sequences: SequenceCounts, schedule: Schedule, ranks: int, groups: int) -> list[Workload]:
    """The load of each expert-parallel group."""
    loads = []
    for group in range(groups):
        mine, part = schedule.of_group(group, ranks)
        loads.append(Workload.from_sequences(sequences if groups == 1 else sequences.select(mine), part))
    return loads


def _placed(
    workloads: Sequence[Workload], placement: Placement, cluster: ClusterSpec, reluctance: float, threads: int
) -> Placement:
    """Homes for the micro-steps of all groups, layer by layer."""
    counts_MLE = np.concatenate([workload.token_counts_MLRE.sum(axis=2) for workload in workloads])
    num_experts = counts_MLE.shape[2]

    def place_one(layer: int) -> Array:
        return place_experts(
            counts_MLE[:, layer],
            placement.home[layer],
            cluster.ranks,
            cluster.ranks_per_node,
            reluctance=reluctance / num_experts,
        )

    return Placement(np.stack(map_layers(place_one, len(placement.home), threads)))


def _worth(plan: StepPlan, workload: Workload, cost: CostModel) -> Array:
    """`[M, L]` bool, instances that are predicted to be no slower with replicas, most of whose transfer is hidden."""
    exposed = replace(cost, near_replica_s=EXPOSED * cost.near_replica_s, far_replica_s=EXPOSED * cost.far_replica_s)
    with_replicas = predict(plan, workload, exposed).seconds_ML
    without = predict(plan.without_replicas(), workload, cost).seconds_ML
    return np.rint(with_replicas * 1e9) <= np.rint(without * 1e9)


def _cheapest(
    candidates: list[Placement],
    plans: list[tuple[StepPlan, ...]],
    workloads: Sequence[Workload],
    cluster: ClusterSpec,
    cost: CostModel,
) -> Placement:
    """For every layer the homes with the least predicted time, including the move from the first candidate."""
    seconds_CL = np.zeros((len(candidates), len(candidates[0].home)))
    for seconds_L, candidate, each in zip(seconds_CL, candidates, plans, strict=True):
        for plan, workload in zip(each, workloads, strict=True):
            seconds_L += predict(plan, workload, cost).seconds_ML.sum(axis=0)
        near_L, far_L = candidates[0].moves(candidate, cluster.ranks_per_node)
        seconds_L += (cost.near_move_s * near_L + cost.far_move_s * far_L) / (cluster.ranks * STEPS_TO_PAY)
    # Integer nanoseconds, so the choice does not depend on the order of summation.
    best_L = np.rint(seconds_CL * 1e9).argmin(axis=0)
    return Placement(np.stack([candidates[best].home[layer] for layer, best in enumerate(best_L)]))
