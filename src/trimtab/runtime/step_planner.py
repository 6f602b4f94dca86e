"""`SessionPlanner`: each rank counts its sequences, rank 0 plans from all counts, and the plan is broadcast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    StepPlan,
    Workload,
    pack_by_length,
    plan_schedule,
    plan_sequences,
    plan_step,
)
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime.planning_in_rollout import PlanningInRollout, RankSequences
from trimtab.runtime.ranks.rank_calls import on_first_rank
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.session_settings import Mode, SessionSettings
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts

# Rates of one of a few ranks on a CPU machine: grouped products in float32, gloo over loopback, copies in memory.
LOCAL_CPU = load_cluster("local-cpu", ranks=1)


@dataclass(frozen=True, eq=False)
class SessionPlanner:
    """Plans for the ranks of a session. Public methods are collective over its data ranks.

    Attributes:
        cluster: the ranks of one expert-parallel group, and the number of cores that rank 0 plans with.
        costs: costs that the planner minimises.
        settings: settings of the planner.
        mode: mode of the session.
        excluded: strategies that are not used; see `StepPlanning`.
    """

    topology: Topology
    cluster: ClusterSpec
    costs: StepCosts
    settings: PlanSettings
    mode: Mode
    excluded: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        topology: Topology,
        layers: Sequence[HomeExperts],
        settings: SessionSettings,
        *,
        top_k: int,
        move_s_per_expert: float | None = None,
        scale: float = 1.0,
        excluded: frozenset[str] = frozenset(),
    ) -> SessionPlanner:
        """A planner for these layers.

        Args:
            move_s_per_expert: measured seconds to move one expert with its optimizer state; from the rates by default.
            scale: factor of the costs of compute and links.
            excluded: strategies that are not used; see `StepPlanning`.
        """
        first = layers[0]
        hidden_size = first.expert_shapes[0][-1]
        cluster = replace(
            settings.rates or default_rates(first.device),
            ranks=topology.num_ranks,
            ranks_per_node=topology.ranks_per_node,
            slots_per_rank=settings.planned_slots,
            dispatch_forwards=first.dispatch_forwards,
        )
        parameters = sum(shape.numel() for shape in first.expert_shapes)
        model = ModelSpec(
            "session",
            num_experts=len(first.home_E),
            top_k=top_k,
            # As of experts with a gate. It only affects the estimated cost of the dense part of a layer.
            hidden_size=hidden_size,
            expert_width=max(1, parameters // (3 * hidden_size)),
            weight_bytes=first.dtype.itemsize,
            expert_groups=first.expert_groups[0],
            groups_per_token=first.expert_groups[1],
        )
        costs = StepCosts.of(
            cluster, model, moe_layers=len(layers), groups=topology.groups, ring_layers=settings.ring_layers
        )
        costs = replace(costs, operations=costs.operations.scaled(scale))
        if move_s_per_expert is not None:
            measured = costs.operations._replace(near_state_s=move_s_per_expert, far_state_s=move_s_per_expert)
            costs = replace(costs, operations=measured)
        if settings.paths in ("peer", "message"):
            cluster = replace(cluster, host_bytes_per_s=0.0)
        if settings.paths == "host":
            cluster = replace(cluster, node_bytes_per_s=0.0, network_bytes_per_s=0.0)
        if settings.mirror_bytes is not None:
            cluster = replace(cluster, mirror_experts=settings.mirror_bytes // first.expert_bytes)
        return cls(topology, cluster, costs, settings.plan_settings, settings.mode, excluded)

    def for_schedule(
        self,
        trace: RoutingTrace,
        schedule: Schedule,
        placement: Placement,
        *,
        may_move: bool,
        sliced: bool,
        in_rollout: PlanningInRollout | None = None,
    ) -> PlannedStep:
        """Plan a step with a given schedule; `trace` has this rank's sequences of it.

        Args:
            sliced: replicas may follow while the step runs.
            in_rollout: what was planned ahead of the step; None if nothing was.
        """
        start = time.perf_counter()
        counts_MLE, unknown_ML = self._count(trace, schedule)
        workload = self._group_workload(counts_MLE, unknown_ML)
        loads = self._gather_workloads(counts_MLE, unknown_ML, workload)
        lengths = self._gather_lengths(trace, schedule)

        def plan() -> PlannedStep:
            return self._with_schedule(loads, schedule, placement, lengths, in_rollout, may_move, sliced=sliced)

        return replace(self._plan_on_first_rank(plan, start), workload=workload)

    def for_sequences(
        self,
        trace: RoutingTrace,
        placement: Placement,
        *,
        may_move: bool,
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

        def plan() -> PlannedStep:
            assert gathered is not None
            sequences = counting.join([part for part in gathered if part is not None])
            if self.mode == "plan":
                tokens = int(sequences.lengths.sum())
                planned = plan_sequences(
                    sequences, placement, self.cluster, token_budget=token_budget, mini_batch=mini_batch,
                    groups=self.topology.groups, ahead=counting.usable(placement, tokens),
                    **self._options(may_move=may_move, sliced=sliced),
                )  # fmt: skip
                return counting.credited(planned, tokens)
            packed = pack_by_length(
                sequences.lengths, num_ranks=self.topology.num_data_ranks, token_budget=token_budget,
                mini_batch=mini_batch,
            )  # fmt: skip
            loads = self._workloads(sequences, packed)
            return self._with_schedule(loads, packed, placement, sequences.lengths, None, may_move, sliced=False)

        return self._plan_on_first_rank(plan, start)

    def plan_ahead(
        self, sequences: SequenceCounts, placement: Placement, *, token_budget: int, may_move: bool
    ) -> PlannedStep:
        """Plans for a part of a step's sequences. Not a collective."""
        budget = max(token_budget, int(sequences.lengths.max(initial=0)))
        return plan_sequences(
            sequences, placement, self.cluster, token_budget=budget, groups=self.topology.groups,
            **self._options(may_move=may_move, sliced=True),
        )  # fmt: skip

    def group_workload(self, trace: RoutingTrace, schedule: Schedule) -> Workload:
        """The workload of this rank's expert-parallel group; `trace` has the order of `schedule.sequences_of`.

        A collective of the group.
        """
        return self._group_workload(*self._count(trace, schedule))

    def _count(self, trace: RoutingTrace, schedule: Schedule) -> tuple[Array, Array]:
        """This rank's known rows `[M, L, E]` and unknown ones `[M, L]`, both int32."""
        micro_step, num_micro_steps = schedule.of_rank(self.topology.data_rank), schedule.num_micro_steps
        counts_MLE = count_experts(trace, micro_step, num_micro_steps)
        rows_M = np.bincount(micro_step, trace.sequence_lengths * trace.top_k, num_micro_steps).astype(np.int64)
        unknown_ML = rows_M[:, None] - counts_MLE.sum(axis=2, dtype=np.int64)
        return counts_MLE, unknown_ML.astype(np.int32)

    def _group_workload(self, counts_MLE: Array, unknown_ML: Array) -> Workload:
        def gathered(array_ML: Array) -> Array:
            array_RML = np.empty((self.topology.num_ranks, *array_ML.shape), array_ML.dtype)
            parts = [*torch.from_numpy(array_RML)]
            dist.all_gather(parts, torch.from_numpy(array_ML), group=self.topology.expert_control)
            return np.stack([*array_RML], axis=2)

        return Workload(gathered(counts_MLE), gathered(unknown_ML))

    def _gather_workloads(self, counts_MLE: Array, unknown_ML: Array, workload: Workload) -> list[Workload]:
        """On the first rank, which plans, the workloads of all groups; with several groups none on others.

        So the memory of a rank does not grow with the number of groups, but for the first one.
        """
        if self.topology.groups == 1:
            return [workload]
        is_first, ranks = self.topology.data_rank == 0, self.topology.num_ranks

        def gathered(array_ML: Array) -> list[Array]:
            array_DML = np.empty((self.topology.num_data_ranks if is_first else 0, *array_ML.shape), array_ML.dtype)
            parts = [*torch.from_numpy(array_DML)] if is_first else None
            dist.gather(torch.from_numpy(array_ML), parts, group=self.topology.control, group_dst=0)
            return [np.stack([*array_DML[n : n + ranks]], axis=2) for n in range(0, len(array_DML), ranks)]

        counts_GMLRE, unknown_GMLR = gathered(counts_MLE), gathered(unknown_ML)
        return [Workload(counts, unknown) for counts, unknown in zip(counts_GMLRE, unknown_GMLR, strict=True)]

    def _gather_lengths(self, trace: RoutingTrace, schedule: Schedule) -> Array | None:
        """`[S]` tokens of each sequence of the schedule on rank 0, None on others."""
        lengths_D: list[Array] | None = None
        if self.topology.data_rank == 0:
            lengths_D = [np.empty(0)] * self.topology.num_data_ranks
        dist.gather_object(trace.sequence_lengths, lengths_D, group=self.topology.control, group_dst=0)
        if lengths_D is None:
            return None
        lengths = np.empty(len(schedule.rank), np.int64)
        for rank, part in enumerate(lengths_D):
            lengths[schedule.sequences_of(rank)] = part
        return lengths

    def _plan_on_first_rank(self, plan: Callable[[], PlannedStep], start: float) -> PlannedStep:
        """What the first rank plans, on each rank with the plan of its group alone."""
        planned, group = on_first_rank(plan, self.topology.control), self.topology.group
        return replace(planned, plans=planned.plans[group : group + 1], planning_s=time.perf_counter() - start)

    def _with_schedule(
        self,
        loads: list[Workload],
        schedule: Schedule,
        placement: Placement,
        lengths: Array | None,
        in_rollout: PlanningInRollout | None,
        may_move: bool,
        *,
        sliced: bool,
    ) -> PlannedStep:
        if self.mode in ("static", "off"):
            if self.mode == "static":
                placement = self.topology.initial_placement(*placement.home.shape)
            plans = self._static(loads, schedule, placement)
            ratios = [max_over_mean(plan.rank_loads(load)) for plan, load in zip(plans, loads, strict=True)]
            return PlannedStep(schedule, plans, max_vio_before=float(np.mean(ratios) - 1))
        tokens = 0 if lengths is None else int(lengths.sum())
        planned = plan_schedule(
            loads, schedule, placement, self.cluster, lengths=lengths,
            ahead=None if in_rollout is None else in_rollout.usable(placement, tokens),
            **self._options(may_move=may_move, sliced=sliced),
        )  # fmt: skip
        return planned if in_rollout is None else in_rollout.credited(planned, tokens)

    def _options(self, *, may_move: bool, sliced: bool) -> dict[str, Any]:
        """Arguments of all calls of the planner."""
        return {
            "settings": self.settings,
            "costs": self.costs,
            "threads": self.cluster.planning_threads,
            "excluded": self.excluded,
            "may_move": may_move,
            "sliced": sliced,
        }

    def _static(self, loads: list[Workload], schedule: Schedule, placement: Placement) -> tuple[StepPlan, ...]:
        bare = replace(self.cluster, slots_per_rank=0)
        return tuple(
            plan_step(load, schedule.of_group(group, self.cluster.ranks)[1], placement, bare, self.settings)
            for group, load in enumerate(loads)
        )

    def _workloads(self, sequences: SequenceCounts, schedule: Schedule) -> list[Workload]:
        parts = (schedule.of_group(group, self.cluster.ranks) for group in range(self.topology.groups))
        return [Workload.from_sequences(sequences.select(mine), part) for mine, part in parts]


def default_rates(device: torch.device) -> ClusterSpec:
    """Rates of compute and links that are assumed for a device: of a CPU machine, or of an H100 cluster."""
    return LOCAL_CPU if device.type == "cpu" else ClusterSpec(1, 1)
