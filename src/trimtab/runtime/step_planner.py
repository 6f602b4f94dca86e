"""`SessionPlanner`: each rank counts its sequences, the first rank of a group plans, and the plan is broadcast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, ModelSpec, StepCosts, load_cluster
from trimtab.planner import (
    Placement,
    PlannedStep,
    PlanSettings,
    Schedule,
    SequenceCounts,
    pack_by_length,
    plan_schedule,
    plan_sequences,
)
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.step_planning import plan_homes
from trimtab.planner.plan.workload import ExpertLoads, max_over_mean
from trimtab.runtime.planning.planning_in_rollout import PlannedAhead, PlanningInRollout, RankSequences
from trimtab.runtime.planning.rank_load import RankLoad, RequestedCounts
from trimtab.runtime.ranks.lockstep import digest
from trimtab.runtime.ranks.rank_calls import Leaders, on_first_rank
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.session_settings import Mode, Paths, SessionSettings
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.trace import RoutingTrace

# Rates of one of a few ranks on a CPU machine: grouped products in float32, gloo over loopback, copies in memory.
LOCAL_CPU = load_cluster("local-cpu", ranks=1)


@dataclass(frozen=True, eq=False)
class SessionPlanner:
    """Plans for the ranks of a session. Public methods are collective over its data ranks.

    Attributes:
        cluster: the ranks of one expert-parallel group, and the number of cores that rank 0 plans with.
        placement: the homes of the session.
        costs: costs that the planner minimises.
        settings: settings of the planner.
        mode: mode of the session.
        excluded: strategies that are not used; see `StepPlanning`.
        slots: numbers of slots of a rank of which the plan chooses one; none: the cluster's.
    """

    topology: Topology
    cluster: ClusterSpec
    placement: Placement
    costs: StepCosts
    settings: PlanSettings
    mode: Mode
    excluded: frozenset[str] = frozenset()
    slots: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        topology: Topology,
        layers: Sequence[HomeExperts],
        settings: SessionSettings,
        slots: tuple[int, ...],
        *,
        top_k: int,
        move_s_per_expert: float | None = None,
        scale: float = 1.0,
        excluded: frozenset[str] = frozenset(),
    ) -> SessionPlanner:
        """A planner for these layers.

        Args:
            slots: of a rank, or several numbers of which the plan chooses one.
            move_s_per_expert: measured seconds to bring one expert with its optimizer state to another rank, for
                renumbering; from the rates by default.
            scale: factor of the costs of compute and links.
            excluded: strategies that are not used; see `StepPlanning`.
        """
        first = layers[0]
        cluster, costs = _prices(
            settings.rates or default_rates(first.device), topology.num_ranks, topology.ranks_per_node,
            topology.groups, slots[0], settings.ring_layers, settings.paths,
            None if settings.mirror_bytes is None else settings.mirror_bytes // first.expert_bytes,
            first.dispatch_forwards, len(layers), first.num_experts, tuple(first.expert_shapes), first.dtype.itemsize,
            first.expert_groups, top_k,
        )  # fmt: skip
        operations = costs.operations.scaled(scale)
        if move_s_per_expert is not None:
            operations = operations._replace(near_state_s=move_s_per_expert, far_state_s=move_s_per_expert)
        costs = replace(costs, operations=operations)
        placement = Placement(np.broadcast_to(first.places.home_E, (len(layers), first.num_experts)))
        numbers = slots if len(slots) > 1 else ()
        return cls(topology, cluster, placement, costs, settings.plan_settings, settings.mode, excluded, numbers)

    def for_schedule(
        self,
        trace: RoutingTrace,
        schedule: Schedule,
        *,
        sliced: bool = False,
        in_rollout: PlanningInRollout | None = None,
        may_move: bool = False,
    ) -> tuple[PlannedStep, RankLoad]:
        """Plan a step with a given schedule; `trace` has this rank's sequences of it. Returns also this rank's load.

        Args:
            sliced: replicas may follow while the step runs.
            in_rollout: what was planned ahead of the step; None if nothing was.
            may_move: the plan may have other homes, if experts come there in less time than that saves. It tells in
                which order to renumber them, and is not applied.
        """
        start = time.perf_counter()
        topology = self.topology
        load = RankLoad.of(trace, schedule, topology.data_rank, topology)
        _, part = schedule.of_group(topology.group, topology.num_ranks)
        lengths, of_group, requests = self._gather_lengths(trace, part), load.of_group, RequestedCounts(load)
        leaders = Leaders(topology.leaders)

        def plan() -> PlannedStep:
            loads = StepLoads(
                (part,), load.unknown_ML.shape[1], topology.groups, (lengths,), (of_group.mixed_ML,),
                lambda micro_steps, layers: [requests.count(micro_steps, layers)],
                lambda micro_steps, layers: [of_group.counts_MLE[np.ix_(micro_steps, layers)]],
                leaders.gather,
            )  # fmt: skip
            if self.mode in ("static", "off"):
                return self._static(loads, [of_group], schedule)
            ahead = PlannedAhead()
            if in_rollout is not None:
                tokens = sum(leaders.gather([int(lengths.sum())]))
                # The first data rank has planned ahead.
                ahead = leaders.gather([in_rollout.result(tokens)])[0]
            planned = plan_schedule(
                loads, schedule, self.placement, self.cluster, ahead=ahead.planned,
                **self._options(sliced=sliced, may_move=may_move),
            )  # fmt: skip
            if len(set(leaders.gather([digest(planned.placement.home)]))) > 1:
                raise RuntimeError("the planners of the expert-parallel groups have chosen different homes")
            return ahead.credited(planned)

        def plan_and_end() -> PlannedStep:
            try:
                return leaders.run(plan)
            finally:
                requests.end()

        if topology.rank:
            requests.serve()
        return self._plan_on_first_rank(plan_and_end, start), load

    def for_sequences(
        self,
        trace: RoutingTrace,
        *,
        sliced: bool,
        token_budget: int,
        mini_batch: Array | None,
        in_rollout: PlanningInRollout | None = None,
    ) -> PlannedStep:
        """Plan a step and its schedule; `trace` has any of the sequences on each rank.

        Args:
            sliced: replicas may follow while the step runs.
            in_rollout: has counted some of the sequences; None if nothing was counted ahead.
        """
        start = time.perf_counter()
        counting = in_rollout or PlanningInRollout(self.topology)
        gathered: list[RankSequences | None] | None = None
        if self.topology.data_rank == 0:
            gathered = [None] * self.topology.num_data_ranks
        dist.gather_object(counting.count_new(trace), gathered, group=self.topology.control, group_dst=0)

        def plan() -> list[PlannedStep]:
            assert gathered is not None
            sequences = counting.join([part for part in gathered if part is not None])
            planned = self._plan_all(sequences, counting, token_budget, mini_batch, sliced=sliced)
            return [replace(planned, plans=(plan,)) for plan in planned.plans]

        leaders = Leaders(self.topology.leaders)
        return self._plan_on_first_rank(lambda: leaders.run(lambda: leaders.spread(plan)), start)

    def _plan_all(
        self,
        sequences: SequenceCounts,
        counting: PlanningInRollout,
        token_budget: int,
        mini_batch: Array | None,
        *,
        sliced: bool,
    ) -> PlannedStep:
        """The plans of all groups, on the first data rank."""
        groups, ranks = self.topology.groups, self.topology.num_ranks
        if self.mode == "plan":
            ahead = counting.result(int(sequences.lengths.sum()))
            planned = plan_sequences(
                sequences, self.placement, self.cluster, token_budget=token_budget, mini_batch=mini_batch,
                groups=groups, ahead=ahead.planned, **self._options(sliced=sliced),
            )  # fmt: skip
            return ahead.credited(planned)
        packed = pack_by_length(
            sequences.lengths, num_ranks=self.topology.num_data_ranks, token_budget=token_budget, mini_batch=mini_batch
        )
        loads = StepLoads.of_sequences(sequences, packed, ranks)
        if self.mode in ("static", "off"):
            parts = (packed.of_group(group, ranks) for group in range(groups))
            by_expert = [ExpertLoads.from_sequences(sequences.select(mine), part) for mine, part in parts]
            return self._static(loads, by_expert, packed)
        return plan_schedule(loads, packed, self.placement, self.cluster, **self._options(sliced=False))

    def plan_ahead(self, sequences: SequenceCounts, *, token_budget: int) -> PlannedStep:
        """Plans for a part of a step's sequences. Not a collective."""
        budget = max(token_budget, int(sequences.lengths.max(initial=0)))
        return plan_sequences(
            sequences, self.placement, self.cluster, token_budget=budget, groups=self.topology.groups,
            **self._options(sliced=True),
        )  # fmt: skip

    def _gather_lengths(self, trace: RoutingTrace, schedule: Schedule) -> Array:
        """`[S]` tokens of each sequence of the group's schedule, on its first rank; 0 on others."""
        lengths_R: list[Array] | None = None
        if self.topology.rank == 0:
            lengths_R = [np.empty(0)] * self.topology.num_ranks
        dist.gather_object(trace.sequence_lengths, lengths_R, group=self.topology.expert_control, group_dst=0)
        lengths = np.zeros(len(schedule.rank), np.int64)
        for rank, part in enumerate(lengths_R or []):
            lengths[schedule.sequences_of(rank)] = part
        return lengths

    def _plan_on_first_rank(self, plan: Callable[[], PlannedStep], start: float) -> PlannedStep:
        """What the first rank of the group plans, on each of its ranks."""
        planned = on_first_rank(plan, self.topology.expert_control)
        return replace(planned, planning_s=time.perf_counter() - start)

    def _options(self, *, sliced: bool, may_move: bool = False) -> dict[str, Any]:
        """Arguments of all calls of the planner."""
        return {
            "settings": self.settings,
            "costs": self.costs,
            "threads": self.cluster.planning_threads,
            "excluded": self.excluded,
            "may_move": may_move,
            "sliced": sliced,
            "slots": self.slots,
        }

    def _static(self, loads: StepLoads, by_expert_G: Sequence[ExpertLoads], schedule: Schedule) -> PlannedStep:
        """Plans without replicas."""
        plans = tuple(
            plan_homes(by_expert, part, self.placement, self.cluster, self.settings)
            for by_expert, part in zip(by_expert_G, loads.schedules, strict=True)
        )
        pairs = zip(plans, by_expert_G, strict=True)
        ratios = loads.gather([max_over_mean(plan.rank_loads(by_expert)) for plan, by_expert in pairs])
        return PlannedStep(schedule, plans, max_vio_before=float(np.mean(ratios) - 1))


@lru_cache(maxsize=8)
def _prices(
    rates: ClusterSpec,
    ranks: int,
    ranks_per_node: int,
    groups: int,
    slots: int,
    ring_layers: int,
    paths: Paths,
    mirror_experts: int | None,
    forwards: bool,
    layers: int,
    num_experts: int,
    shapes: tuple[torch.Size, ...],
    weight_bytes: int,
    expert_groups: tuple[int, int],
    top_k: int,
) -> tuple[ClusterSpec, StepCosts]:
    """The cluster, and costs without what steps have taught."""
    cluster = replace(
        rates, ranks=ranks, ranks_per_node=ranks_per_node, slots_per_rank=slots, dispatch_forwards=forwards
    )
    hidden_size = shapes[0][-1]
    model = ModelSpec(
        "session",
        num_experts=num_experts,
        top_k=top_k,
        # As of experts with a gate. It only affects the estimated cost of the dense part of a layer.
        hidden_size=hidden_size,
        expert_width=max(1, sum(shape.numel() for shape in shapes) // (3 * hidden_size)),
        weight_bytes=weight_bytes,
        expert_groups=expert_groups[0],
        groups_per_token=expert_groups[1],
    )
    costs = StepCosts.of(cluster, model, moe_layers=layers, groups=groups, ring_layers=ring_layers)
    if paths in ("peer", "message"):
        cluster = replace(cluster, host_bytes_per_s=0.0)
    if paths == "host":
        cluster = replace(cluster, node_bytes_per_s=0.0, network_bytes_per_s=0.0)
    if mirror_experts is not None:
        cluster = replace(cluster, mirror_experts=mirror_experts)
    return cluster, costs


def default_rates(device: torch.device) -> ClusterSpec:
    """Rates of compute and links that are assumed for a device: of a CPU machine, or of an H100 cluster."""
    return LOCAL_CPU if device.type == "cpu" else ClusterSpec(1, 1)
