"""Plans of a step: `plan_step`, of all its instances; `StepPlanning`, of a strategy in some of them, with its time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, StepCosts
from trimtab.errors import InputError
from trimtab.planner.placement.home_swaps import place_experts
from trimtab.planner.placement.placement import Placement
from trimtab.planner.plan.plan_settings import PlanSettings, keeps_to, prices_of, refuse, require_known_routes
from trimtab.planner.plan.rank_work import rank_work
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.strategy import NEAR, PAST, STAY, Strategy
from trimtab.planner.plan.workload import ExpertLoads, Workload, max_over_mean
from trimtab.planner.replicas.kernel_values import Limits
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.planner.schedule.schedule import Schedule
from trimtab.timeline.layer_passes import RankWork

Result = TypeVar("Result")


def plan_step(
    workload: Workload,
    schedule: Schedule,
    placement: Placement,
    cluster: ClusterSpec,
    settings: PlanSettings | None = None,
    *,
    threads: int = 1,
) -> StepPlan:
    """Replicas and token split for every instance of a workload.

    Replicas take known rows only. Unknown rows are estimated at the homes (`Workload.expected_loads`), and known rows
    are split so that the sum of both is even.

    Args:
        threads: layers planned at the same time. The plan does not depend on it.

    Raises:
        InputError: if workload and cluster differ in ranks, or the step can't keep to limits of rows.
    """
    if workload.num_ranks != cluster.ranks:
        raise InputError(f"the workload is for {workload.num_ranks} ranks; the cluster has {cluster.ranks}")
    chosen = settings or PlanSettings()
    require_known_routes(chosen, [workload.mixed_ML])
    fixed_MLR = workload.expected_loads(placement.home)

    def plan_with(settings: PlanSettings) -> StepPlan:
        limits = settings.limits(cluster)

        def plan_one(layer: int) -> ReplicaTable:
            home_E = placement.home[layer]
            return plan_layer(workload.token_counts_MLRE, fixed_MLR[:, layer], layer, home_E, limits)

        replicas = ReplicaTable.join_layers(map_layers(plan_one, workload.num_layers, threads))
        return StepPlan.from_replicas(
            schedule, placement, replicas, mixed_ML=workload.mixed_ML, cluster=cluster, settings=settings.to_json()
        )

    plan = plan_with(chosen)
    if chosen.limits_rows and not keeps_to(chosen, [plan.rank_loads(workload)]):
        raise refuse(chosen, cluster.slots_per_rank, lambda settings: [plan_with(settings).rank_loads(workload)])
    return plan


def plan_homes(
    load: ExpertLoads, schedule: Schedule, placement: Placement, cluster: ClusterSpec, settings: PlanSettings
) -> StepPlan:
    """`plan_step` without slots, for which the rows of source ranks are not needed."""
    require_known_routes(settings, [load.mixed_ML])
    loads_MLR = load.home_loads(placement.home)
    if not keeps_to(settings, [loads_MLR]):
        raise refuse(settings, 0, lambda _: [loads_MLR])
    return StepPlan.from_replicas(
        schedule, placement, ReplicaTable.none(load.mixed_ML.size), mixed_ML=load.mixed_ML,
        cluster=replace(cluster, slots_per_rank=0), settings=settings.to_json(),
    )  # fmt: skip


def map_layers(task: Callable[[int], Result], num_layers: int, threads: int) -> list[Result]:
    """Runs a task for every layer, `threads` at a time; returns the results in layer order."""
    threads = min(threads, num_layers, os.cpu_count() or 1)
    if threads <= 1:
        return [task(layer) for layer in range(num_layers)]
    with ThreadPoolExecutor(threads) as pool:
        # One call of the pool for each thread: small layers take less time than that.
        parts = list(pool.map(lambda first: [*map(task, range(first, num_layers, threads))], range(threads)))
    return [parts[layer % threads][layer // threads] for layer in range(num_layers)]


class GroupFigures(NamedTuple):
    """What all groups are told of one group's plan.

    Attributes:
        replicas: their number.
        ratios_ML: `[M, L]` max/mean of rank loads.
        keeps: whether it keeps to the limits of rows.
    """

    replicas: int
    ratios_ML: Array
    keeps: bool


@dataclass(frozen=True, eq=False)
class PlannedLayers:
    """A strategy, planned for M micro-steps and L layers of the groups that are planned here.

    Attributes:
        micro_steps, layers: `[M]` and `[L]` integers.
        home_LE: `[L, E]` int16.
        replicas: of each group, of M * L instances, those of a micro-step next to each other.
        works: of each group.
        figures: of each group of the whole step.
    """

    strategy: Strategy
    micro_steps: Array
    layers: Array
    home_LE: Array
    replicas: list[ReplicaTable]
    works: list[RankWork]
    figures: list[GroupFigures]

    @property
    def num_replicas(self) -> int:
        """Of all groups."""
        return sum(group.replicas for group in self.figures)

    @property
    def keeps_limits(self) -> bool:
        """Whether no rank has more rows than the settings allow."""
        return all(group.keeps for group in self.figures)

    @property
    def max_vio(self) -> float:
        """max/mean - 1 of rank loads, mean over instances."""
        return float(np.mean([group.ratios_ML for group in self.figures]) - 1)


@dataclass(frozen=True, eq=False)
class StepPlanning:
    """What planning one step needs.

    Attributes:
        loads: of the step's expert-parallel groups. Methods are collective over the processes that plan them.
        placement: homes when the step begins.
        cluster: the ranks of one group.
        past_PLE: `[P, L, E]` tokens of past steps, latest last; None if there are none.
        threads: layers planned at the same time.
        sliced: replicas and split are planned while the step runs.
        excluded: names of strategies that are not used. Limits of rows come first.
    """

    loads: StepLoads
    placement: Placement
    cluster: ClusterSpec
    settings: PlanSettings
    costs: StepCosts
    past_PLE: Array | None
    threads: int
    sliced: bool = False
    excluded: frozenset[str] = frozenset()

    @property
    def layers(self) -> Array:
        """All layers, `[L]`."""
        return np.arange(self.loads.num_layers)

    @property
    def micro_steps(self) -> Array:
        """All micro-steps, `[M]`."""
        return np.arange(self.loads.num_micro_steps)

    def count(self, micro_steps: Array, layers: Array) -> list[list[Workload]]:
        """The load of each layer by itself, of every group."""
        of_groups = self.loads.count(micro_steps, layers)
        return [[load.of_layer(i) for load in of_groups] for i in range(len(layers))]

    def plan(
        self,
        strategy: Strategy,
        micro_steps: Array,
        layers: Array,
        *,
        counted: list[list[Workload]] | None = None,
        homes: list[Array] | None = None,
    ) -> PlannedLayers:
        """Homes, replicas and split of some micro-steps and layers.

        Args:
            counted: `count` of them; counted layer by layer by default, which needs less memory.
            homes: `[E]` homes of each of the layers; those of the strategy by default.
        """
        limits = self.limits(strategy)
        homes_L = homes or self.homes(strategy, micro_steps, layers)

        def plan_one(i: int) -> tuple[list[ReplicaTable], list[RankWork]]:
            home_E, tables, works = homes_L[i], [], []
            for load in counted[i] if counted else self.loads.count(micro_steps, layers[i : i + 1]):
                fixed_MR = load.expected_loads(home_E)[:, 0]
                table = plan_layer(load.token_counts_MLRE, fixed_MR, 0, home_E, limits)
                tables.append(table)
                works.append(self._work(table, home_E, load))
            return tables, works

        planned = map_layers(plan_one, len(layers), self.threads)
        groups = range(len(self.loads.schedules))
        replicas = [ReplicaTable.join_layers([tables[group] for tables, _ in planned]) for group in groups]
        works = [_join([works[group] for _, works in planned]) for group in groups]
        figures = [
            GroupFigures(
                len(table.ranks), max_over_mean(work.loads_MLR), keeps_to(self.settings, [work.loads_MLR])
            )
            for table, work in zip(replicas, works, strict=True)
        ]  # fmt: skip
        figures = self.loads.gather(figures)
        return PlannedLayers(strategy, micro_steps, layers, np.stack(homes_L), replicas, works, figures)

    def homes(self, strategy: Strategy, micro_steps: Array, layers: Array) -> list[Array]:
        """Homes of some layers under a strategy, `[E]` int16 each.

        Args:
            micro_steps: for homes by this step's loads.
        """
        stay = [self.placement.home[layer] for layer in layers]
        if strategy.homes == STAY:
            return stay
        found: list[Array] = []
        # As many layers at a time as threads, since all groups' counts of a layer are needed.
        for start in range(0, len(layers), self.threads):
            chosen = layers[start : start + self.threads]
            if strategy.homes == PAST:
                assert self.past_PLE is not None
                counts = [self.past_PLE[:, layer].sum(axis=0)[None] for layer in chosen]
            else:
                counts = self.loads.expert_counts(micro_steps, chosen)
            found += self.improved_homes(stay[start : start + self.threads], counts, strategy)
        return found

    def improved_homes(self, homes: Sequence[Array], counts: Sequence[Array], strategy: Strategy) -> list[Array]:
        """Of each layer homes `[E]` int16 that are better for some tokens `[M, E]` than the given ones.

        Not a collective.
        """

        def improved(i: int) -> Array:
            ranks, per_node = self.cluster.ranks, self.cluster.ranks_per_node
            penalty = strategy.move_penalty / len(homes[i])
            return place_experts(counts[i], homes[i], ranks, per_node, move_penalty=penalty, in_nodes=strategy.in_nodes)

        return map_layers(improved, len(homes), self.threads)

    def cluster_of(self, strategy: Strategy) -> ClusterSpec:
        """The cluster with the paths of weights that a strategy may use."""
        has_links = self.cluster.node_bytes_per_s and self.cluster.network_bytes_per_s
        return self.cluster if strategy.mirror or not has_links else replace(self.cluster, host_bytes_per_s=0.0)

    def limits(self, strategy: Strategy) -> Limits:
        """Limits and prices of a strategy's replicas."""
        prices = prices_of(self.costs, self.cluster, strategy.exposed)
        reach = self.cluster.ranks_per_node if strategy.replicas == NEAR else self.cluster.ranks
        cluster = replace(self.cluster, slots_per_rank=strategy.slots)
        sends, forwards = strategy.sends * strategy.slots, self.costs.operations.forwards
        return self.settings.limits(cluster, prices, reach=reach, sends=sends, forwards=forwards)

    def _work(self, table: ReplicaTable, home_E: Array, load: Workload) -> RankWork:
        operations = self.costs.operations
        return rank_work(table, home_E[None], load.estimated_MLRE, self.cluster.ranks_per_node, operations)


def _join(works: Sequence[RankWork]) -> RankWork:
    """The work of several layers, each given by itself."""
    return RankWork(*(np.concatenate(parts, axis=1) for parts in zip(*works, strict=True)))
