"""`SessionPlanner`: each rank counts its sequences, rank 0 plans from all counts, and the plan is broadcast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, CostModel, ModelSpec, load_cluster
from trimtab.planner import (
    Placement,
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
from trimtab.planner.plan.home_choice import STEPS_TO_PAY
from trimtab.planner.plan.plan_settings import SESSION_THRESHOLD
from trimtab.planner.plan.prediction import predict
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime.ranks.first_rank import on_first_rank
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts

Mode = Literal["plan", "static", "shadow", "off"]
Paths = Literal["both", "peer", "host"]
# Rates of one of a few ranks on a CPU machine: grouped products in float32, gloo over loopback, copies in memory.
LOCAL_CPU = load_cluster("local-cpu", ranks=1)

# A schedule, the plan of every group, and the workload of every group.
_Candidate = tuple[Schedule, tuple[StepPlan, ...], list[Workload]]
# A schedule, the plan of every group, the predicted gain, and max_vio without a plan.
_Plans = tuple[Schedule, tuple[StepPlan, ...], float, float]


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A planned step, before its sequences are sent to their ranks.

    Attributes:
        schedule: the schedule of all data ranks.
        plan: the plan of this rank's expert-parallel group.
        predicted_gain: predicted saving, as a fraction of expert time.
        max_vio_before: max/mean - 1 of rank loads, mean over instances, without a plan: at the present homes; packed by
            length if the schedule is planned as well.
        planning_s: seconds from counting to the end of the plan's broadcast.
        workload: workload of this rank's expert-parallel group; None if it was not gathered for planning.
    """

    schedule: Schedule
    plan: StepPlan
    predicted_gain: float = 0.0
    max_vio_before: float = 0.0
    planning_s: float = 0.0
    workload: Workload | None = None


@dataclass(frozen=True)
class PlanReport:
    """Figures of a planned step.

    Attributes:
        planning_s: seconds from counting to the end of the plan's broadcast.
        moving_s: seconds of moving experts to new homes.
        predicted_gain: predicted saving, as a fraction of expert time.
        max_vio_before, max_vio_after: max/mean - 1 of rank loads, mean over instances, at the present homes and under
            the plan.
        replicas: replicas in all instances.
        homes_moved: experts that change rank, over all layers.
        micro_steps, unplanned_micro_steps: micro-steps of the step, and those that run without a plan.
        mixed_instances: instances with unknown routes, whose counts the ranks exchange.
        peak_rows_before, peak_rows_after: rows of the busiest rank in its busiest instance, at the present homes and
            under the plan.
        pool_bytes: bytes on a rank for replicas and arriving gradients, independent of the number of layers.
        mirror_bytes: bytes of the mirror of this rank's node.
        free_bytes: free memory of the device.
    """

    planning_s: float
    moving_s: float
    predicted_gain: float
    max_vio_before: float
    max_vio_after: float
    replicas: int
    homes_moved: int
    micro_steps: int
    unplanned_micro_steps: int
    mixed_instances: int
    peak_rows_before: int
    peak_rows_after: int
    pool_bytes: int
    mirror_bytes: int
    free_bytes: int


@dataclass(frozen=True, eq=False)
class SessionPlanner:
    """Plans for the ranks of a session. Public methods are collective over its data ranks.

    Attributes:
        cluster: the ranks of one expert-parallel group, and the number of cores that rank 0 plans with.
        cost: costs that the planner minimises.
        settings: settings of the planner.
        least_gain: a plan with a smaller predicted saving is replaced by a static one.
    """

    topology: Topology
    cluster: ClusterSpec
    cost: CostModel
    settings: PlanSettings
    least_gain: float

    @classmethod
    def of(
        cls,
        topology: Topology,
        layers: Sequence[HomeExperts],
        *,
        top_k: int,
        slots: int,
        paths: Paths = "both",
        mirror_bytes: int | None = None,
        least_gain: float = 0.0,
        rates: ClusterSpec | None = None,
    ) -> SessionPlanner:
        """A planner for these layers; arguments as those of `Session`."""
        first, device = layers[0], layers[0].device
        hidden_size = first.expert_shapes[0][-1]
        rates = rates or (LOCAL_CPU if device.type == "cpu" else ClusterSpec(1, 1))
        cluster = replace(rates, ranks=topology.num_ranks, ranks_per_node=topology.ranks_per_node, slots_per_rank=slots)
        parameters = sum(shape.numel() for shape in first.expert_shapes)
        model = ModelSpec(
            "session",
            num_experts=len(first.home_E),
            top_k=top_k,
            # As of experts with a gate. It only affects the estimated cost of the dense part of a layer.
            hidden_size=hidden_size,
            expert_width=max(1, parameters // (3 * hidden_size)),
            weight_bytes=first.dtype.itemsize,
        )
        cost = CostModel.of(cluster, model)
        if paths == "peer":
            cluster = replace(cluster, host_bytes_per_s=0.0)
        if paths == "host":
            cluster = replace(cluster, node_bytes_per_s=0.0, network_bytes_per_s=0.0)
        if mirror_bytes is not None:
            cluster = replace(cluster, mirror_experts=mirror_bytes // first.expert_bytes)
        return cls(topology, cluster, cost, PlanSettings(SESSION_THRESHOLD), least_gain)

    def for_schedule(
        self, trace: RoutingTrace, schedule: Schedule, placement: Placement, mode: Mode, *, may_move: bool
    ) -> PlannedStep:
        """Plan a step with a given schedule; `trace` has this rank's sequences of it."""
        start = time.perf_counter()
        loads = self.gather_workloads(trace, schedule)

        planned = self._plan_on_first_rank(
            lambda: self._given_schedule(loads, schedule, placement, mode, may_move=may_move), start
        )
        return replace(planned, workload=loads[self.topology.group])

    def for_sequences(
        self,
        trace: RoutingTrace,
        placement: Placement,
        mode: Mode,
        *,
        may_move: bool,
        token_budget: int,
        mini_batch: Array | None,
    ) -> PlannedStep:
        """Plan a step and its schedule; `trace` has any of the sequences on each rank."""
        start = time.perf_counter()
        gathered: list[SequenceCounts | None] | None = None
        if self.topology.data_rank == 0:
            gathered = [None] * self.topology.num_data_ranks
        dist.gather_object(SequenceCounts.from_trace(trace), gathered, group=self.topology.control, group_dst=0)

        def make() -> _Plans:
            assert gathered is not None
            sequences = SequenceCounts.concatenate([part for part in gathered if part is not None])
            packed = pack_by_length(
                sequences.lengths,
                num_ranks=self.topology.num_data_ranks,
                token_budget=token_budget,
                mini_batch=mini_batch,
            )
            packed_loads = self._workloads(sequences, packed)
            if mode != "plan":
                return self._given_schedule(packed_loads, packed, placement, mode, may_move=may_move)
            schedule, _, plans = plan_sequences(
                sequences, placement, self.cluster, token_budget=token_budget, mini_batch=mini_batch,
                groups=self.topology.groups, settings=self.settings, cost=self.cost, may_move=may_move,
                threads=self.cluster.planning_threads,
            )  # fmt: skip
            static = packed, self._static(packed_loads, packed, placement), packed_loads
            return self._if_faster((schedule, plans, self._workloads(sequences, schedule)), static, placement)

        return self._plan_on_first_rank(make, start)

    def gather_workloads(self, trace: RoutingTrace, schedule: Schedule) -> list[Workload]:
        """The workload of every expert-parallel group; `trace` has the order of `schedule.sequences_of`."""
        micro_step, num_micro_steps = schedule.of_rank(self.topology.data_rank), schedule.num_micro_steps
        counts_MLE = count_experts(trace, micro_step, num_micro_steps)
        rows_M = np.bincount(micro_step, trace.sequence_lengths * trace.top_k, num_micro_steps).astype(np.int64)
        unknown_ML = rows_M[:, None] - counts_MLE.sum(axis=2, dtype=np.int64)
        counts_GMLRE = self._gather_by_group(counts_MLE)
        unknown_GMLR = self._gather_by_group(unknown_ML.astype(np.int32))
        return [Workload(counts, unknown) for counts, unknown in zip(counts_GMLRE, unknown_GMLR, strict=True)]

    def _gather_by_group(self, array_ML: Array) -> list[Array]:
        """All ranks' arrays `[M, L, ...]`, for each expert-parallel group stacked to `[M, L, R, ...]`."""
        mine, ranks = torch.from_numpy(array_ML), self.topology.num_ranks
        arrays_D = [torch.empty_like(mine) for _ in range(self.topology.num_data_ranks)]
        dist.all_gather(arrays_D, mine, group=self.topology.control)
        starts = range(0, len(arrays_D), ranks)
        return [torch.stack(arrays_D[start : start + ranks], dim=2).numpy() for start in starts]

    def _plan_on_first_rank(self, make: Callable[[], _Plans], start: float) -> PlannedStep:
        def packed() -> tuple[Schedule, list[bytes], float, float]:
            schedule, plans, gain, max_vio = make()
            return schedule, [plan.to_bytes() for plan in plans], gain, max_vio

        schedule, packed_plans, gain, max_vio = on_first_rank(packed, self.topology.control)
        plan = StepPlan.from_bytes(packed_plans[self.topology.group])
        return PlannedStep(schedule, plan, gain, max_vio, time.perf_counter() - start)

    def _given_schedule(
        self, loads: list[Workload], schedule: Schedule, placement: Placement, mode: Mode, *, may_move: bool
    ) -> _Plans:
        if mode == "static":
            num_layers, num_experts = placement.home.shape
            placement = self.topology.initial_placement(num_layers, num_experts)
        static = self._static(loads, schedule, placement)
        if mode in ("static", "off"):
            return schedule, static, 0.0, _max_vio(static, loads)
        plans = plan_schedule(
            loads, schedule, placement, self.cluster, settings=self.settings, cost=self.cost, may_move=may_move,
            threads=self.cluster.planning_threads,
        ).plans  # fmt: skip
        return self._if_faster((schedule, plans, loads), (schedule, static, loads), placement)

    def _if_faster(self, planned: _Candidate, static: _Candidate, placement: Placement) -> _Plans:
        """The planned candidate if its predicted gain over the static one is large enough, else the static one."""
        planned_s, static_s = (self._seconds(plans, loads, placement) for _, plans, loads in (planned, static))
        gain = 1 - planned_s / max(static_s, 1e-30)
        schedule, plans, _ = planned if gain >= self.least_gain else static
        return schedule, plans, gain, _max_vio(*static[1:])

    def _static(self, loads: list[Workload], schedule: Schedule, placement: Placement) -> tuple[StepPlan, ...]:
        bare = replace(self.cluster, slots_per_rank=0)
        return tuple(
            plan_step(load, schedule.of_group(group, self.cluster.ranks)[1], placement, bare, self.settings)
            for group, load in enumerate(loads)
        )

    def _workloads(self, sequences: SequenceCounts, schedule: Schedule) -> list[Workload]:
        parts = (schedule.of_group(group, self.cluster.ranks) for group in range(self.topology.groups))
        return [Workload.from_sequences(sequences.select(mine), part) for mine, part in parts]

    def _seconds(self, plans: tuple[StepPlan, ...], loads: list[Workload], placement: Placement) -> float:
        """Predicted seconds of a step of the slowest group, including moves of experts from `placement`."""
        slowest_ML = np.max(
            [predict(p, load, self.cost).seconds_ML for p, load in zip(plans, loads, strict=True)], axis=0
        )
        near_L, far_L = placement.moves(plans[0].placement, self.cluster.ranks_per_node)
        moves = self.cost.near_move_s * near_L.sum() + self.cost.far_move_s * far_L.sum()
        return float(slowest_ML.sum() + moves / (self.cluster.ranks * STEPS_TO_PAY))


def _max_vio(plans: Sequence[StepPlan], loads: Sequence[Workload]) -> float:
    ratios = [max_over_mean(plan.rank_loads(load)) for plan, load in zip(plans, loads, strict=True)]
    return float(np.mean(ratios) - 1)
