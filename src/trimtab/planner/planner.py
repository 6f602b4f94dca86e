"""`Planner`: all four levels of a step, from the routing of its sequences. Counts during the rollout."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, StepCosts, default_model
from trimtab.errors import InputError
from trimtab.planner.placement.placement import Placement
from trimtab.planner.plan.plan_settings import PlanSettings, refuse, require_known_routes
from trimtab.planner.plan.planned_step import PlannedStep
from trimtab.planner.plan.prediction import Prediction, dense_times, plan_parts, refreshing_seconds, slowest
from trimtab.planner.plan.slices import SliceRules
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.step_planning import PlannedLayers, StepPlanning, map_layers
from trimtab.planner.plan.step_times import moving_seconds
from trimtab.planner.plan.strategy import NONE, NOTHING, STAY, Strategy, facts_of
from trimtab.planner.plan.strategy_choice import (
    PAST_STEPS,
    StrategyChoice,
    choose_strategy,
    fewest_slots,
    predict_slots,
    replicas_anywhere,
)
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.planner.replicas.paths import HOST, choose_paths, links_of
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.planner.schedule.grouping import group_by_routing
from trimtab.planner.schedule.schedule import Schedule, pack_by_length
from trimtab.planner.schedule.sequence_counts import SequenceCounts
from trimtab.planner.schedule.time_packing import dense_rows, pack_by_time
from trimtab.timeline import MIGRATION
from trimtab.trace.routing import RoutingTrace


class Planner:
    """Plans one step after another for a cluster. Homes stay where the last step put them unless a move reduces the
    time.

    Args:
        cluster: the ranks of one expert-parallel group.
        placement: homes when the first step begins.
        groups: expert-parallel groups that share the homes; each has its own sequences.
        costs: of a step's operations; of Qwen3-30B-A3B on this cluster by default.
        threads: layers counted or planned at the same time. Plans don't depend on it.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        placement: Placement,
        *,
        groups: int = 1,
        settings: PlanSettings | None = None,
        costs: StepCosts | None = None,
        threads: int = 1,
    ) -> None:
        self.cluster = cluster
        self.placement = placement
        self.groups = groups
        self.settings = settings or PlanSettings()
        self.costs = costs or StepCosts.of(cluster, default_model())
        self.threads = threads
        self.schedule: Schedule | None = None
        # Of the last steps, tokens by layer and expert.
        self._past: deque[Array] = deque(maxlen=PAST_STEPS)
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
            costs=self.costs,
            past_PLE=np.stack(self._past) if self._past else None,
            threads=self.threads,
        )
        self._past.append(sequences.counts_SLE.sum(axis=0, dtype=np.int64))
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
    costs: StepCosts | None = None,
    past_PLE: Array | None = None,
    may_move: bool = True,
    threads: int = 1,
    sliced: bool = False,
    ahead: PlannedStep | None = None,
    excluded: frozenset[str] = frozenset(),
    slots: Sequence[int] = (),
) -> PlannedStep:
    """All four levels of one step; the arguments are those of `Planner`.

    Sequences are packed so that ranks take the same time. Then the strategy with the least predicted time is planned:
    homes, and replicas and split for every instance. Where that has no replicas, sequences are also grouped by their
    routing, if that is faster.

    Args:
        past_PLE: `[P, L, E]` tokens of past steps, latest last. Homes may be chosen for them, and they tell how long
            homes stay good. None if there are none.
        may_move: whether homes may change.
        sliced: plans may be headers, without replicas, with the rules by which slices follow. Its predictions are those
            of the sample by which the strategy was chosen.
        ahead: with `sliced`, plans of a part of the sequences, whose homes and rules are kept.
        excluded: strategies that are not used; see `StepPlanning`.
        slots: numbers of slots of a rank, ascending, one of which is chosen in place of the cluster's.

    Raises:
        InputError: if the homes are not even or not for this step, a sequence exceeds the budget, or mini-batches don't
            fit the sequences.
    """
    placement.check(sequences.num_layers, sequences.num_experts, cluster.ranks)
    if groups < 1:
        raise InputError(f"there are {groups} expert-parallel groups; there should be 1 or more")
    chosen, costs = settings or PlanSettings(), costs or StepCosts.of(cluster, default_model())
    packed = pack_by_length(
        sequences.lengths, num_ranks=cluster.ranks * groups, token_budget=token_budget, mini_batch=mini_batch
    )

    def plan(schedule: Schedule) -> PlannedStep:
        loads = StepLoads.of_sequences(sequences, schedule, cluster.ranks)
        planning = StepPlanning(loads, placement, cluster, chosen, costs, past_PLE, threads, sliced, excluded)
        return _plan(planning, schedule, slots, may_move=may_move, groups=groups, token_budget=token_budget)

    if ahead is not None and ahead.slices is not None:
        schedule = pack_by_time(packed, sequences.lengths, sequences.top_k, cluster, costs, token_budget)
        return _follow(ahead, schedule, StepLoads.of_sequences(sequences, schedule, cluster.ranks), cluster)
    planned = plan(pack_by_time(packed, sequences.lengths, sequences.top_k, cluster, costs, token_budget))
    if planned.chosen_strategy.replicas != NONE:
        return planned
    # Without replicas, the routing of the sequences in a micro-step decides how even its ranks are.
    rows_S = dense_rows(sequences.lengths, costs)
    by_routing = group_by_routing(
        sequences, planned.schedule, planned.placement, token_budget, num_groups=groups, attention_rows=rows_S
    )
    try:
        grouped = plan(by_routing)
    except InputError:
        # Its busiest instance may have more rows than the limit, which the first schedule keeps.
        return planned
    return min(planned, grouped, key=lambda step: step.predicted_s)


def plan_schedule(
    loads: StepLoads,
    schedule: Schedule,
    placement: Placement,
    cluster: ClusterSpec,
    *,
    settings: PlanSettings | None = None,
    costs: StepCosts | None = None,
    past_PLE: Array | None = None,
    may_move: bool = True,
    threads: int = 1,
    sliced: bool = False,
    ahead: PlannedStep | None = None,
    excluded: frozenset[str] = frozenset(),
    slots: Sequence[int] = (),
) -> PlannedStep:
    """All levels below a given schedule. Other arguments are those of `plan_sequences`.

    A collective over the processes that plan the groups of a step; each gets the plans of its own groups.

    Args:
        loads: under the schedule; without lengths the time of dense parts is not predicted.
        schedule: on the data ranks of all groups.
        may_move: whether homes may change.
    """
    chosen, costs = settings or PlanSettings(), costs or StepCosts.of(cluster, default_model())
    if ahead is not None and ahead.slices is not None:
        return _follow(ahead, schedule, loads, cluster)
    planning = StepPlanning(loads, placement, cluster, chosen, costs, past_PLE, threads, sliced, excluded)
    return _plan(planning, schedule, slots, may_move=may_move, groups=loads.num_groups)


def _plan(
    planning: StepPlanning, schedule: Schedule, slots: Sequence[int], *, may_move: bool, **settings: Any
) -> PlannedStep:
    """Plans of the strategy with the least predicted time, with one of these numbers of slots if there are any."""
    require_known_routes(planning.settings, planning.loads.gather(planning.loads.mixed_GML))
    slots_s: dict[int, float] = {}
    if slots:
        slots_s = predict_slots(planning, slots)
        # A limit of rows may need all of them.
        number = slots[-1] if planning.settings.limits_rows else fewest_slots(slots_s)
        planning = replace(planning, cluster=replace(planning.cluster, slots_per_rank=number))
        settings["slots_s"] = {str(number): float(f"{seconds:.4g}") for number, seconds in slots_s.items()}
    choice = choose_strategy(planning, may_move=may_move)
    if planning.sliced and not planning.settings.limits_rows:
        return replace(_header(planning, schedule, choice, **settings), slots_s=slots_s)
    nothing = _carry_out(planning, NOTHING)
    done, seconds = nothing, choice.seconds
    if choice.strategy != NOTHING:
        planned = _carry_out(planning, choice.strategy)
        planned_s = planned.prediction.seconds - planned.moving_s * (1 - 1 / choice.move_life)
        # Strategies are chosen by a sample; what is not faster in the whole step is not done.
        enough_s = (1 - planning.settings.least_gain) * nothing.prediction.seconds
        if planned_s <= enough_s or not nothing.planned.keeps_limits:
            done = planned
        scale = planned_s / max(seconds[choice.strategy.name], 1e-30)
        seconds = {name: strategy_s * scale for name, strategy_s in seconds.items()}
    seconds |= {"nothing": nothing.prediction.seconds}
    if not done.planned.keeps_limits:
        anywhere = replicas_anywhere(planning.cluster)
        done = _carry_out(planning, anywhere)
        if not done.planned.keeps_limits:
            raise refuse(planning.settings, planning.cluster.slots_per_rank, partial(_loads, planning, anywhere))
    ordered = dict(sorted(seconds.items(), key=lambda entry: (entry[1], entry[0])))
    strategy = done.planned.strategy
    text = planning.settings.to_json(planning.costs, **facts_of(strategy, ordered), **settings)
    plans = tuple(replace(plan, settings=text) for plan in done.plans)
    return PlannedStep(
        schedule, plans, strategy, ordered, done.prediction.parts_s, nothing.planned.max_vio, choice.move_life, slots_s
    )


def _header(planning: StepPlanning, schedule: Schedule, choice: StrategyChoice, **settings: Any) -> PlannedStep:
    """Plans without replicas, and the rules by which these follow."""
    strategy = choice.strategy
    home_LE = planning.placement.home
    if strategy.homes != STAY:
        home_LE = np.stack(planning.homes(strategy, planning.micro_steps, planning.layers))
    rules, more = None, {}
    if strategy.replicas != NONE:
        cluster = planning.cluster_of(strategy)
        mirrors: tuple[Array, ...] = (np.zeros((0, 3), np.int64),) * planning.loads.num_groups
        if cluster.host_bytes_per_s:
            typical = map_layers(
                lambda layer: _typical(planning, strategy, home_LE, layer), len(home_LE), planning.threads
            )
            mine = [_mirrored(home_LE, list(tables), cluster) for tables in zip(*typical, strict=True)]
            mirrors = tuple(planning.loads.gather(mine))
        rules = SliceRules(
            planning.limits(strategy), links_of(cluster), mirrors, choice.max_vio, choice.replicas,
            choice.most_returns, choice.saved_s,
        )  # fmt: skip
        more = {"slices": rules.digest}
    text = planning.settings.to_json(planning.costs, **facts_of(strategy, choice.seconds), **settings, **more)
    plans = _without_replicas(planning.loads, Placement(home_LE), planning.cluster, text)
    return PlannedStep(
        schedule, plans, strategy, choice.seconds, choice.prediction.parts_s, choice.max_vio_before, choice.move_life,
        slices=rules,
    )  # fmt: skip


def _without_replicas(
    loads: StepLoads, placement: Placement, cluster: ClusterSpec, settings: str
) -> tuple[StepPlan, ...]:
    """A plan without replicas for each group."""
    return tuple(
        StepPlan.from_replicas(
            part, placement, ReplicaTable.none(mixed_ML.size), mixed_ML=mixed_ML, cluster=cluster, settings=settings
        )
        for part, mixed_ML in zip(loads.schedules, loads.mixed_GML, strict=True)
    )


def _follow(ahead: PlannedStep, schedule: Schedule, loads: StepLoads, cluster: ClusterSpec) -> PlannedStep:
    """Headers of a step whose homes and rules were planned ahead from a part of its sequences.

    Predicted times are scaled by the micro-steps.
    """
    cluster = replace(cluster, slots_per_rank=ahead.plan.slots_per_rank)
    plans = _without_replicas(loads, ahead.placement, cluster, ahead.plans[0].settings)
    scale = schedule.num_micro_steps / max(1, ahead.schedule.num_micro_steps)
    parts_s = {part: seconds * scale for part, seconds in ahead.parts_s.items()}
    assert ahead.slices is not None
    rules = ahead.slices._replace(saved_s=ahead.slices.saved_s * scale)
    return replace(ahead, schedule=schedule, plans=plans, parts_s=parts_s, slices=rules)


def _typical(planning: StepPlanning, strategy: Strategy, home_LE: Array, layer: int) -> list[ReplicaTable]:
    """Of each group, replicas of a layer for the mean load of its micro-steps."""
    tables = []
    for load in planning.loads.count(planning.micro_steps, np.array([layer])):
        mean_MLRE = (load.estimated_MLRE.sum(axis=0, keepdims=True) // len(planning.micro_steps)).astype(np.int32)
        fixed_MR = np.zeros((1, planning.cluster.ranks), np.int64)
        tables.append(plan_layer(mean_MLRE, fixed_MR, 0, home_LE[layer], planning.limits(strategy)))
    return tables


def _mirrored(home_LE: Array, tables: list[ReplicaTable], cluster: ClusterSpec) -> Array:
    """`[N, 3]` node, layer and expert of replicas of all layers that come from host memory."""
    table = ReplicaTable.join_layers(tables)
    host = choose_paths(home_LE, table, cluster) == HOST
    entries = table.ranks // cluster.ranks_per_node, table.instances_P, table.experts
    return np.unique(np.stack([column[host].astype(np.int64) for column in entries], axis=1), axis=0)


def _loads(planning: StepPlanning, strategy: Strategy, settings: PlanSettings) -> list[Array]:
    """`[M, L, R]` rows of each group under a strategy with other settings."""
    planning = replace(planning, settings=settings)
    planned = planning.plan(strategy, planning.micro_steps, planning.layers)
    return planning.loads.gather([work.loads_MLR for work in planned.works])


class _CarriedOut(NamedTuple):
    """A planned step, the plans of the groups that are planned here, and the predicted time of the step and of its
    moves."""

    planned: PlannedLayers
    plans: tuple[StepPlan, ...]
    prediction: Prediction
    moving_s: float


def _carry_out(planning: StepPlanning, strategy: Strategy) -> _CarriedOut:
    """Plan the whole step with a strategy."""
    planned = planning.plan(strategy, planning.micro_steps, planning.layers)
    loads = planning.loads
    plans, found = [], []
    for group, schedule in enumerate(loads.schedules):
        plan = StepPlan.from_replicas(
            schedule,
            Placement(planned.home_LE),
            planned.replicas[group],
            mixed_ML=loads.mixed_GML[group],
            cluster=planning.cluster_of(strategy),
        )
        plans.append(plan)
        dense = dense_times(schedule, loads.lengths_of(group), planning.costs)
        parts_P = plan_parts(plan, planned.works[group], dense, planning.costs)
        found.append((parts_P, refreshing_seconds([plan], planning.costs)))
    found = loads.gather(found)
    parts_P = slowest([parts_P for parts_P, _ in found]).copy()
    moving_s = moving_seconds(
        planning.placement.home, planned.home_LE, planning.cluster.ranks_per_node, planning.costs.operations
    )
    parts_P[MIGRATION] += moving_s + max(refresh_s for _, refresh_s in found)
    # The work of all ranks takes much memory in large steps.
    return _CarriedOut(replace(planned, works=[]), tuple(plans), Prediction.of(parts_P), moving_s)
