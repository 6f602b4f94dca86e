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
from trimtab.cluster.specs import RING_LAYERS
from trimtab.planner import (
    GroupPlans,
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
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime.planned_step import PlannedStep
from trimtab.runtime.planning_ahead import EarlyPlan, PlanningAhead, RankSequences
from trimtab.runtime.ranks.first_rank import on_first_rank
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.session_settings import Mode, Paths
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts

# Rates of one of a few ranks on a CPU machine: grouped products in float32, gloo over loopback, copies in memory.
LOCAL_CPU = load_cluster("local-cpu", ranks=1)
# Homes and strategy are chosen again if less than this part of a step's tokens was counted ahead.
KNOWN_AHEAD = 0.5


@dataclass(frozen=True, eq=False)
class SessionPlanner:
    """Plans for the ranks of a session. Public methods are collective over its data ranks.

    Attributes:
        cluster: the ranks of one expert-parallel group, and the number of cores that rank 0 plans with.
        costs: costs that the planner minimises.
        settings: settings of the planner.
        excluded: strategies that are not used; see `StepPlanning`.
    """

    topology: Topology
    cluster: ClusterSpec
    costs: StepCosts
    settings: PlanSettings
    excluded: frozenset[str] | None = frozenset()

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
        settings: PlanSettings | None = None,
        ring_layers: int = RING_LAYERS,
        rates: ClusterSpec | None = None,
        move_s_per_expert: float | None = None,
        scale: float = 1.0,
        excluded: frozenset[str] | None = frozenset(),
    ) -> SessionPlanner:
        """A planner for these layers; other arguments as those of `Session`.

        Args:
            scale: factor of the costs of compute and links.
            excluded: strategies that are not used; see `StepPlanning`.
            move_s_per_expert: measured seconds to move one expert with its optimizer state; from `rates` by default.
        """
        first, device = layers[0], layers[0].device
        hidden_size = first.expert_shapes[0][-1]
        rates = rates or default_rates(device)
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
        costs = StepCosts.of(cluster, model, moe_layers=len(layers), groups=topology.groups, ring_layers=ring_layers)
        costs = replace(costs, operations=costs.operations.scaled(scale))
        if move_s_per_expert is not None:
            measured = costs.operations._replace(near_state_s=move_s_per_expert, far_state_s=move_s_per_expert)
            costs = replace(costs, operations=measured)
        if paths in ("peer", "message"):
            cluster = replace(cluster, host_bytes_per_s=0.0)
        if paths == "host":
            cluster = replace(cluster, node_bytes_per_s=0.0, network_bytes_per_s=0.0)
        if mirror_bytes is not None:
            cluster = replace(cluster, mirror_experts=mirror_bytes // first.expert_bytes)
        return cls(topology, cluster, costs, settings or PlanSettings(), excluded)

    def for_schedule(
        self,
        trace: RoutingTrace,
        schedule: Schedule,
        placement: Placement,
        mode: Mode,
        *,
        may_move: bool,
        sliced: bool,
        early: EarlyPlan | None = None,
    ) -> PlannedStep:
        """Plan a step with a given schedule; `trace` has this rank's sequences of it.

        Args:
            sliced: replicas may follow while the step runs.
            early: what was planned ahead of the step; None if nothing was.
        """
        start = time.perf_counter()
        loads = self.gather_workloads(trace, schedule)
        lengths = self._gather_lengths(trace, schedule)

        planned = self._plan_on_first_rank(
            lambda: self._given_schedule(
                loads,
                schedule,
                placement,
                mode,
                lengths,
                may_move=may_move,
                sliced=sliced,
                early=early,
            ),
            start,
        )
        return replace(planned, workload=loads[self.topology.group])

    def for_sequences(
        self,
        trace: RoutingTrace,
        placement: Placement,
        mode: Mode,
        *,
        may_move: bool,
        sliced: bool,
        token_budget: int,
        mini_batch: Array | None,
        planning_ahead: PlanningAhead | None = None,
    ) -> PlannedStep:
        """Plan a step and its schedule; `trace` has any of the sequences on each rank.

        Args:
            sliced: replicas may follow while the step runs.
            planning_ahead: has counted some of the sequences; None if nothing was counted ahead.
        """
        start = time.perf_counter()
        counting = planning_ahead or PlanningAhead(self.topology)
        gathered: list[RankSequences | None] | None = None
        if self.topology.data_rank == 0:
            gathered = [None] * self.topology.num_data_ranks
        dist.gather_object(counting.count_new(trace), gathered, group=self.topology.control, group_dst=0)

        def make() -> list[PlannedStep]:
            assert gathered is not None
            sequences = counting.join([part for part in gathered if part is not None])
            tokens = int(sequences.lengths.sum())
            if mode == "plan":
                early = counting.found
                planned = plan_sequences(
                    sequences, placement, self.cluster, token_budget=token_budget, mini_batch=mini_batch,
                    groups=self.topology.groups, ahead=_usable(early, placement, tokens),
                    **self._options(may_move=may_move, sliced=sliced),
                )  # fmt: skip
                return _steps_of(planned, early, tokens)
            packed = pack_by_length(
                sequences.lengths, num_ranks=self.topology.num_data_ranks, token_budget=token_budget,
                mini_batch=mini_batch,
            )  # fmt: skip
            loads = self._workloads(sequences, packed)
            return self._given_schedule(
                loads, packed, placement, mode, sequences.lengths, may_move=may_move, sliced=False
            )

        return self._plan_on_first_rank(make, start)

    def plan_ahead(
        self, sequences: SequenceCounts, placement: Placement, *, token_budget: int, may_move: bool
    ) -> GroupPlans:
        """Plans for a part of a step's sequences. Not a collective."""
        budget = max(token_budget, int(sequences.lengths.max(initial=0)))
        return plan_sequences(
            sequences, placement, self.cluster, token_budget=budget, groups=self.topology.groups,
            **self._options(may_move=may_move, sliced=True),
        )  # fmt: skip

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

    def _plan_on_first_rank(self, make: Callable[[], list[PlannedStep]], start: float) -> PlannedStep:
        """This rank's of the steps that the first rank makes, one for each expert-parallel group."""
        steps = on_first_rank(make, self.topology.control)
        return replace(steps[self.topology.group], planning_s=time.perf_counter() - start)

    def _given_schedule(
        self,
        loads: list[Workload],
        schedule: Schedule,
        placement: Placement,
        mode: Mode,
        lengths: Array | None,
        *,
        may_move: bool,
        sliced: bool,
        early: EarlyPlan | None = None,
    ) -> list[PlannedStep]:
        if mode in ("static", "off"):
            if mode == "static":
                num_layers, num_experts = placement.home.shape
                placement = self.topology.initial_placement(num_layers, num_experts)
            static = self._static(loads, schedule, placement)
            return [PlannedStep(schedule, plan, max_vio_before=_max_vio(static, loads)) for plan in static]
        tokens = 0 if lengths is None else int(lengths.sum())
        planned = plan_schedule(
            loads, schedule, placement, self.cluster, lengths=lengths, ahead=_usable(early, placement, tokens),
            **self._options(may_move=may_move, sliced=sliced),
        )  # fmt: skip
        return _steps_of(planned, early, tokens)

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


def _usable(early: EarlyPlan | None, placement: Placement, tokens: int) -> GroupPlans | None:
    """What was planned ahead, if it was from enough of the step's tokens, and homes are still the same."""
    if early is None or early.plans is None or early.homes is None or early.tokens < KNOWN_AHEAD * tokens:
        return None
    return early.plans if np.array_equal(early.homes.home, placement.home) else None


def _steps_of(planned: GroupPlans, early: EarlyPlan | None, tokens: int) -> list[PlannedStep]:
    """The step of each expert-parallel group.

    Args:
        early: what was planned ahead of the step; None if nothing was.
        tokens: of the step.
    """
    choice, early = planned.choice, early or EarlyPlan()
    is_used = early.plans is not None and choice is early.plans.choice
    first = PlannedStep(
        planned.schedule,
        planned.plans[0],
        strategy=choice.strategy.name,
        runner_up=choice.runner_up,
        predicted_s=planned.prediction.seconds,
        predicted_gain=1 - min(choice.seconds.values()) / max(choice.seconds["nothing"], 1e-30),
        max_vio_before=planned.max_vio_before,
        slices=planned.slices,
        ahead_s=early.seconds,
        known_ahead=min(1.0, early.tokens / max(1, tokens)) if is_used else 0.0,
        nothing_s=choice.seconds["nothing"],
        parts_s=planned.prediction.parts_s,
    )
    return [replace(first, plan=plan) for plan in planned.plans]


def _max_vio(plans: Sequence[StepPlan], loads: Sequence[Workload]) -> float:
    ratios = [max_over_mean(plan.rank_loads(load)) for plan, load in zip(plans, loads, strict=True)]
    return float(np.mean(ratios) - 1)
