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
from trimtab.errors import InputError
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
from trimtab.planner.plan.prediction import predict
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.planner import STEPS_TO_PAY
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts

Mode = Literal["plan", "static", "shadow", "off"]
Paths = Literal["both", "peer", "host"]
# Every replica costs the ranks CPU time or links, so it has to be worth more than the last half percent of balance.
THRESHOLD = 1.02
# Rates of one of a few ranks on a CPU machine: grouped products in float32, gloo over loopback, copies in memory.
LOCAL_CPU = load_cluster("local-cpu", ranks=1)


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
        return cls(topology, cluster, cost, PlanSettings(THRESHOLD), least_gain)

    def for_schedule(
        self, trace: RoutingTrace, schedule: Schedule, placement: Placement, mode: Mode, *, may_move: bool
    ) -> PlannedStep:
        """Plan a step with a given schedule; `trace` has this rank's sequences of it."""
        start = time.perf_counter()
        loads = self.gather_workloads(trace, schedule)

        planned = self._on_first_rank(
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
            static = self._static(packed_loads, packed, placement)
            max_vio = _max_vio(static, packed_loads)
            schedule, _, plans = plan_sequences(
                sequences, placement, self.cluster, token_budget=token_budget, mini_batch=mini_batch,
                groups=self.topology.groups, settings=self.settings, cost=self.cost, may_move=may_move,
                threads=self.cluster.planning_threads,
            )  # fmt: skip
            before = self._seconds(static, packed_loads, placement)
            gain = 1 - self._seconds(plans, self._workloads(sequences, schedule), placement) / max(before, 1e-30)
            return (schedule, plans, gain, max_vio) if gain >= self.least_gain else (packed, static, gain, max_vio)

        return self._on_first_rank(make, start)

    def gather_workloads(self, trace: RoutingTrace, schedule: Schedule) -> list[Workload]:
        """The workload of every expert-parallel group; `trace` has the order of `schedule.sequences_of`."""
        micro_step, num_micro_steps = schedule.of_rank(self.topology.data_rank), schedule.num_micro_steps
        counts_MLE = count_experts(trace, micro_step, num_micro_steps)
        rows_M = np.bincount(micro_step, trace.sequence_lengths * trace.top_k, num_micro_steps).astype(np.int64)
        unknown_ML = rows_M[:, None] - counts_MLE.sum(axis=2, dtype=np.int64)
        counts, unknown = torch.from_numpy(counts_MLE), torch.from_numpy(unknown_ML.astype(np.int32))
        counts_D = [torch.empty_like(counts) for _ in range(self.topology.num_data_ranks)]
        unknown_D = [torch.empty_like(unknown) for _ in range(self.topology.num_data_ranks)]
        dist.all_gather(counts_D, counts, group=self.topology.control)
        dist.all_gather(unknown_D, unknown, group=self.topology.control)
        loads = []
        for group in range(self.topology.groups):
            ranks = slice(group * self.topology.num_ranks, (group + 1) * self.topology.num_ranks)
            unknown_MLR = torch.stack(unknown_D[ranks], dim=2).numpy()
            loads.append(Workload(torch.stack(counts_D[ranks], dim=2).numpy(), unknown_MLR))
        return loads

    def _on_first_rank(self, make: Callable[[], _Plans], start: float) -> PlannedStep:
        message: list[tuple[Schedule, list[bytes], float, float] | InputError | None] = [None]
        if self.topology.data_rank == 0:
            try:
                schedule, plans, gain, max_vio = make()
                message = [(schedule, [plan.to_bytes() for plan in plans], gain, max_vio)]
            except InputError as error:
                message = [error]
        dist.broadcast_object_list(message, group=self.topology.control, group_src=0)
        answer = message[0]
        assert answer is not None
        if isinstance(answer, InputError):
            raise answer
        schedule, parts, gain, max_vio = answer
        plan = StepPlan.from_bytes(parts[self.topology.group])
        return PlannedStep(schedule, plan, gain, max_vio, time.perf_counter() - start)

    def _given_schedule(
        self, loads: list[Workload], schedule: Schedule, placement: Placement, mode: Mode, *, may_move: bool
    ) -> _Plans:
        if mode == "static":
            num_layers, num_experts = placement.home.shape
            placement = self.topology.initial_placement(num_layers, num_experts)
        static = self._static(loads, schedule, placement)
        max_vio = _max_vio(static, loads)
        if mode in ("static", "off"):
            return schedule, static, 0.0, max_vio
        plans = plan_schedule(
            loads, schedule, placement, self.cluster, settings=self.settings, cost=self.cost, may_move=may_move,
            threads=self.cluster.planning_threads,
        )[1]  # fmt: skip
        gain = 1 - self._seconds(plans, loads, placement) / max(self._seconds(static, loads, placement), 1e-30)
        return (schedule, plans if gain >= self.least_gain else static, gain, max_vio)

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
