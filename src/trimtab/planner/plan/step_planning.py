"""`StepPlanning`: plans a strategy for all or some of a step's layers and micro-steps, and predicts its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, StepCosts
from trimtab.planner.placement.home_swaps import place_experts
from trimtab.planner.placement.placement import Placement
from trimtab.planner.plan.instances import map_layers
from trimtab.planner.plan.plan_settings import PlanSettings, prices_of
from trimtab.planner.plan.rank_work import RankWork, rank_work
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.strategy import NEAR, PAST, STAY, Strategy
from trimtab.planner.plan.workload import Workload, max_over_mean
from trimtab.planner.replicas.kernel_values import Limits
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.planner.replicas.replica_table import ReplicaTable


@dataclass(frozen=True, eq=False)
class PlannedLayers:
    """A strategy, planned for M micro-steps and L layers of every group.

    Attributes:
        micro_steps, layers: `[M]` and `[L]` integers.
        home_LE: `[L, E]` int16.
        replicas: of each group, of M * L instances, those of a micro-step next to each other.
        works: of each group.
    """

    strategy: Strategy
    micro_steps: Array
    layers: Array
    home_LE: Array
    replicas: list[ReplicaTable]
    works: list[RankWork]

    @property
    def has_replicas(self) -> bool:
        return any(len(table.ranks) for table in self.replicas)

    @property
    def max_vio(self) -> float:
        """max/mean - 1 of rank loads, mean over instances."""
        return float(np.mean([max_over_mean(work.loads_MLR) for work in self.works]) - 1)

    @property
    def loads_GMLR(self) -> list[Array]:
        """Of each group, `[M, L, R]` int64 rows of each rank."""
        return [work.loads_MLR for work in self.works]


@dataclass(frozen=True, eq=False)
class StepPlanning:
    """What planning one step needs.

    Attributes:
        loads: of the step's expert-parallel groups.
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
        return map_layers(lambda i: self.loads.count(micro_steps, layers[i : i + 1]), len(layers), self.threads)

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

        def plan_one(i: int) -> tuple[Array, list[ReplicaTable], list[RankWork]]:
            loads_G = counted[i] if counted else self.loads.count(micro_steps, layers[i : i + 1])
            home_E = homes[i] if homes else self.homes(strategy, int(layers[i]), loads_G)
            tables, works = [], []
            for load in loads_G:
                fixed_MR = load.expected_loads(home_E)[:, 0]
                table = plan_layer(load.token_counts_MLRE, fixed_MR, 0, home_E, limits)
                tables.append(table)
                works.append(self._work(table, home_E, load))
            return home_E, tables, works

        planned = map_layers(plan_one, len(layers), self.threads)
        groups = range(len(self.loads.schedules))
        return PlannedLayers(
            strategy,
            micro_steps,
            layers,
            np.stack([home_E for home_E, _, _ in planned]),
            [ReplicaTable.join_layers([tables[group] for _, tables, _ in planned]) for group in groups],
            [_join([works[group] for _, _, works in planned]) for group in groups],
        )

    def homes(self, strategy: Strategy, layer: int, loads_G: Sequence[Workload]) -> Array:
        """Homes of one layer under a strategy, `[E]` int16.

        Args:
            loads_G: the layer's load by group, for homes by this step's loads.
        """
        home_E = self.placement.home[layer]
        if strategy.homes == STAY:
            return home_E
        if strategy.homes == PAST:
            assert self.past_PLE is not None
            counts_ME = self.past_PLE[:, layer].sum(axis=0)[None]
        else:
            counts_ME = expert_counts(loads_G)
        return self.improved(home_E, counts_ME, strategy.move_penalty, in_nodes=strategy.in_nodes)

    def improved(self, home_E: Array, counts_ME: Array, move_penalty: float, *, in_nodes: bool = False) -> Array:
        """Homes `[E]` int16 that are better for some tokens by micro-step and expert."""
        ranks, per_node = self.cluster.ranks, self.cluster.ranks_per_node
        penalty = move_penalty / len(home_E)
        return place_experts(counts_ME, home_E, ranks, per_node, move_penalty=penalty, in_nodes=in_nodes)

    def cluster_of(self, strategy: Strategy) -> ClusterSpec:
        """The cluster with the paths of weights that a strategy may use."""
        has_links = self.cluster.node_bytes_per_s and self.cluster.network_bytes_per_s
        return self.cluster if strategy.mirror or not has_links else replace(self.cluster, host_bytes_per_s=0.0)

    def limits(self, strategy: Strategy) -> Limits:
        """Limits and prices of a strategy's replicas."""
        prices = prices_of(self.costs, self.cluster, strategy.exposed)
        reach = self.cluster.ranks_per_node if strategy.replicas == NEAR else self.cluster.ranks
        cluster = replace(self.cluster, slots_per_rank=strategy.slots)
        return self.settings.limits(cluster, prices, reach=reach)

    def _work(self, table: ReplicaTable, home_E: Array, load: Workload) -> RankWork:
        operations = self.costs.operations
        return rank_work(table, home_E[None], load.estimated_MLRE, self.cluster.ranks_per_node, operations)


def expert_counts(loads_G: Sequence[Workload]) -> Array:
    """Tokens `[M, E]` by micro-step and expert of one layer, those of all groups one after another."""
    return np.concatenate([load.token_counts_MLRE[:, 0].sum(axis=1) for load in loads_G])


def _join(works: Sequence[RankWork]) -> RankWork:
    """The work of several layers, each given by itself."""
    return RankWork(*(np.concatenate(parts, axis=1) for parts in zip(*works, strict=True)))
