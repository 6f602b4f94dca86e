"""Who plans: each rank counts its own sequences, the first one plans from all counts, every rank gets the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
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
from trimtab.planner.plan.home_choice import STEPS_TO_PAY
from trimtab.planner.plan.plan_settings import SESSION_THRESHOLD
from trimtab.planner.plan.prediction import predict
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts
from trimtab.trace.routing import no_route

Mode = Literal["plan", "static", "shadow", "off"]
Paths = Literal["both", "peer", "host"]
# What one rank of a few on a CPU machine reaches: grouped products in float32, gloo over loopback, copies in memory.
LOCAL_CPU = load_cluster("local-cpu", ranks=1)


# A schedule, the plan of every group, the predicted gain, and max_vio of the run that it is held against.
_Made = tuple[Schedule, tuple[StepPlan, ...], float, float]


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step as it was planned, before its sequences are where it wants them.

    Attributes:
        schedule: of all data ranks.
        plan: of this rank's expert-parallel group.
        predicted_gain: the part of the expert time that the plan is predicted to save.
        max_vio_before: max/mean - 1 of rank loads, mean over instances, without a plan: at the present homes, packed by
            length if the schedule is planned, too.
        planning_s: seconds from counting to the plan being on every rank.
        workload: of this rank's expert-parallel group, if it was gathered for planning.
    """

    schedule: Schedule
    plan: StepPlan
    predicted_gain: float = 0.0
    max_vio_before: float = 0.0
    planning_s: float = 0.0
    workload: Workload | None = None


@dataclass(frozen=True)
class PlanReport:
    """What planning a step came to.

    Attributes:
        planning_s: seconds from counting to the plan being on every rank.
        moving_s: seconds that bringing experts to their new homes took.
        predicted_gain: the part of the expert time that the plan is predicted to save.
        max_vio_before, max_vio_after: max/mean - 1 of rank loads, mean over instances, at the present homes and under
            the plan.
        replicas: in all instances together.
        homes_moved: experts that changed rank, over all layers.
        micro_steps, unplanned_micro_steps: of the step, and those that run without a plan.
        mixed_instances: with unknown routes, whose counts the ranks will exchange.
        peak_rows_before, peak_rows_after: rows of the busiest rank in its busiest instance, at home and under the plan.
        pool_bytes: of a rank, for replicas and for arriving gradients, whatever the number of layers.
        mirror_bytes: host memory of this rank's node.
        free_bytes: what is left of the device's memory.
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
    """Plans for the ranks of a session. All methods are collective over its data ranks.

    Attributes:
        cluster: the ranks of one expert-parallel group, and on how many cores the first rank plans.
        cost: what plans are weighed by.
        settings: how hard to balance.
        least_gain: a plan that is predicted to save less of the expert time is not worth it.
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
        """A planner for these layers; see `Session`."""
        first, device = layers[0], layers[0].device
        hidden_size = first.expert_shapes[0][-1]
        rates = rates or (LOCAL_CPU if device.type == "cpu" else ClusterSpec(1, 1))
        cluster = replace(rates, ranks=topology.num_ranks, ranks_per_node=topology.ranks_per_node, slots_per_rank=slots)
        parameters = sum(shape.numel() for shape in first.expert_shapes)
        model = ModelSpec(
            "session",
            num_experts=len(first.home_E),
            top_k=top_k,
            # Of the usual experts. It only weighs the dense half of a layer, which is guessed from it.
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
        """Plan a step whose schedule is given; `trace` is of this rank's part of it."""
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
        """Plan a step and its schedule; `trace` is of the sequences that this rank happens to have."""
        start = time.perf_counter()
        gathered: list[SequenceCounts | None] | None = None
        if self.topology.data_rank == 0:
            gathered = [None] * self.topology.num_data_ranks
        dist.gather_object(SequenceCounts.from_trace(trace), gathered, group=self.topology.control, group_dst=0)

        def make() -> _Made:
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
        """The load of every expert-parallel group; `trace` is in the order of `schedule.sequences_of`."""
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

    def _on_first_rank(self, make: Callable[[], _Made], start: float) -> PlannedStep:
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
    ) -> _Made:
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
        ).plans  # fmt: skip
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
        """Predicted time of a step in which all groups wait for the slowest, and experts come from `placement`."""
        slowest_ML = np.max(
            [predict(p, load, self.cost).seconds_ML for p, load in zip(plans, loads, strict=True)], axis=0
        )
        near_L, far_L = placement.moves(plans[0].placement, self.cluster.ranks_per_node)
        moves = self.cost.near_move_s * near_L.sum() + self.cost.far_move_s * far_L.sum()
        return float(slowest_ML.sum() + moves / (self.cluster.ranks * STEPS_TO_PAY))


def _max_vio(plans: Sequence[StepPlan], loads: Sequence[Workload]) -> float:
    ratios = [max_over_mean(plan.rank_loads(load)) for plan, load in zip(plans, loads, strict=True)]
    return float(np.mean(ratios) - 1)


def check_model(trace: RoutingTrace, shape: tuple[int, int]) -> None:
    """Raises InputError if a trace is not of a model with this many layers and experts, or has ids of no expert."""
    if (trace.num_layers, trace.num_experts) != shape:
        num_layers, num_experts = shape
        raise InputError(
            f"the trace has {trace.shape_text}; the model has {num_layers} MoE layers, {num_experts} experts"
        )
    # Unknown routes are above all ids, so that most traces need one pass.
    if trace.num_tokens and trace.expert_ids.max() >= trace.num_experts:
        trace.check()


def trace_of_micro_steps(rows: Sequence[npt.ArrayLike], num_layers: int, num_experts: int) -> RoutingTrace:
    """A rank's micro-steps as a trace, in which each is one sequence.

    Args:
        rows: integer ids `[n, L, K]` of each micro-step; negative where the route is unknown.

    Raises:
        InputError: if they are no such ids.
    """
    arrays = [np.asarray(ids) for ids in rows]
    if not arrays:
        raise InputError("there are no micro-steps to plan; give the ids [tokens, layers, top_k] of at least one")
    for index, ids in enumerate(arrays):
        if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer) or ids.shape[1:] != arrays[0].shape[1:]:
            raise InputError(
                f"micro-step {index} has ids {list(ids.shape)} of {ids.dtype}; they should be integers "
                f"[tokens, layers, top_k], with as many layers and experts a token as micro-step 0, "
                f"{list(arrays[0].shape)}"
            )
    unknown = no_route(num_experts)
    wide = [np.where(ids < 0, unknown, ids) if ids.dtype.kind == "i" else ids for ids in arrays]
    for index, ids in enumerate(wide):
        wrong = (ids >= num_experts) & (ids != unknown)
        if wrong.any():
            raise InputError(f"micro-step {index} has expert id {ids[wrong][0]}; ids should be below {num_experts}")
    trace = RoutingTrace.from_sequences(wide, num_experts=num_experts)
    check_model(trace, (num_layers, num_experts))
    return trace


def check_fits(trace: RoutingTrace, schedule: Schedule, rank: int, num_ranks: int, shape: tuple[int, int]) -> None:
    """Raises InputError if a trace is not of the model, or not of a rank's sequences.

    Args:
        shape: layers and experts of the model.
    """
    check_model(trace, shape)
    mine = len(schedule.sequences_of(rank))
    if schedule.num_ranks != num_ranks or mine != trace.num_sequences:
        raise InputError(
            f"the schedule gives rank {rank} of {schedule.num_ranks} {mine} sequences; the session has "
            f"{num_ranks} ranks and this rank's trace {trace.num_sequences} sequences"
        )
