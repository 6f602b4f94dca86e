"""`SessionPlanner`: each rank counts its sequences, rank 0 plans from all counts, and the plan is broadcast."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

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
from trimtab.planner.plan.slices import SliceRules
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime.planning_ahead import Ahead, LaterSequences, PlanningAhead
from trimtab.runtime.ranks.first_rank import on_first_rank
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts

Mode = Literal["plan", "rehome", "static", "shadow", "off"]
Paths = Literal["both", "peer", "host"]
# Rates of one of a few ranks on a CPU machine: grouped products in float32, gloo over loopback, copies in memory.
# Homes and strategy are chosen again if less than this part of a step's tokens was counted ahead.
KNOWN_AHEAD = 0.5
LOCAL_CPU = load_cluster("local-cpu", ranks=1)


class _Plans(NamedTuple):
    """A schedule, the plan of every group, and the figures of `PlannedStep`."""

    schedule: Schedule
    plans: tuple[StepPlan, ...]
    max_vio_before: float
    strategy: str = "nothing"
    runner_up: str = ""
    predicted_s: float = 0.0
    predicted_gain: float = 0.0
    slices: SliceRules | None = None
    ahead_s: float = 0.0
    known_ahead: float = 0.0
    nothing_s: float = 0.0
    parts_s: Mapping[str, float] = {}

    @classmethod
    def of(cls, planned: GroupPlans, ahead: Ahead | None = None, tokens: int = 0) -> _Plans:
        """Args: ahead: what was planned ahead; tokens: of the step."""
        seconds, choice = planned.prediction.seconds, planned.choice
        names = choice.strategy.name, choice.runner_up
        gain = 1 - min(choice.seconds.values()) / max(choice.seconds["nothing"], 1e-30)
        known = 0.0
        if ahead is not None and ahead.plans is not None and planned.choice is ahead.plans.choice:
            known = min(1.0, ahead.tokens / max(1, tokens))
        return cls(
            planned.schedule, planned.plans, planned.max_vio_before, *names, seconds, gain, planned.slices,
            0.0 if ahead is None else ahead.seconds, known, choice.seconds["nothing"], planned.prediction.parts_s,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A planned step, before its sequences are sent to their ranks.

    Attributes:
        schedule: the schedule of all data ranks.
        plan: the plan of this rank's expert-parallel group.
        strategy: what the plan does, the strategy with the least predicted time.
        runner_up: the second best strategy; "" if there is no other.
        predicted_s: predicted seconds of the step.
        predicted_gain: predicted saving of the best strategy over doing nothing, as a fraction of the step. It is given
            also where it is too small for a plan to be executed.
        max_vio_before: max/mean - 1 of rank loads, mean over instances, at the present homes without replicas.
        slices: the rules by which replicas follow while the step runs; None if the plan has them.
        planning_s: seconds from counting to the end of the plan's broadcast.
        ahead_s: seconds of counting and planning on the first rank, before, beside the rollout.
        known_ahead: the part of the step's tokens from which homes and strategy were chosen then; 0 if they were not.
        nothing_s: predicted seconds of the step if nothing is done.
        parts_s: `predicted_s` by part.
        workload: workload of this rank's expert-parallel group; None if it was not gathered for planning.
    """

    schedule: Schedule
    plan: StepPlan
    strategy: str = "nothing"
    runner_up: str = ""
    predicted_s: float = 0.0
    predicted_gain: float = 0.0
    max_vio_before: float = 0.0
    slices: SliceRules | None = None
    planning_s: float = 0.0
    ahead_s: float = 0.0
    known_ahead: float = 0.0
    nothing_s: float = 0.0
    parts_s: Mapping[str, float] = field(default_factory=dict)
    workload: Workload | None = None


@dataclass(frozen=True)
class PlanReport:
    """Figures of a planned step.

    Where replicas are planned while the step runs (`is_sliced`), their number, `max_vio_after` and `peak_rows_after`
    are expectations; `Session.take_metrics` has the figures of what was planned.

    Attributes:
        is_sliced: whether replicas and split follow while the step runs.
        planning_s: seconds from counting to the end of the plan's broadcast.
        waited_s: seconds for which the step waited: these, and of applying the plan without moves.
        ahead_s: seconds of counting and planning ahead of the step, beside the rollout, on the first rank.
        known_ahead: the part of the step's tokens from which homes and strategy were chosen then. If it is 0, they were
            chosen from all, or doing nothing was; the schedule always is of all.
        moving_s: seconds of moving experts to new homes.
        strategy: what the plan does, the strategy with the least predicted time.
        runner_up: the second best strategy; "" if there is no other.
        predicted_s: predicted seconds of the step.
        predicted_gain: predicted saving of the best strategy over doing nothing, as a fraction of the step. It is given
            also where it is too small for a plan to be executed.
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

    is_sliced: bool
    planning_s: float
    waited_s: float
    ahead_s: float
    known_ahead: float
    moving_s: float
    strategy: str
    runner_up: str
    predicted_s: float
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
        if paths == "peer":
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
        ahead: Ahead | None = None,
    ) -> PlannedStep:
        """Plan a step with a given schedule; `trace` has this rank's sequences of it.

        Args:
            sliced: replicas may follow while the step runs.
            ahead: what was planned ahead of the step; None if nothing was.
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
                ahead=ahead,
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
        gathered: list[LaterSequences | None] | None = None
        if self.topology.data_rank == 0:
            gathered = [None] * self.topology.num_data_ranks
        dist.gather_object(counting.later(trace), gathered, group=self.topology.control, group_dst=0)

        def make() -> _Plans:
            assert gathered is not None
            sequences = counting.join([part for part in gathered if part is not None])
            tokens = int(sequences.lengths.sum())
            packed = pack_by_length(
                sequences.lengths,
                num_ranks=self.topology.num_data_ranks,
                token_budget=token_budget,
                mini_batch=mini_batch,
            )
            if mode != "plan":
                loads = self._workloads(sequences, packed)
                return self._given_schedule(
                    loads, packed, placement, mode, sequences.lengths, may_move=may_move, sliced=False
                )
            return _Plans.of(
                plan_sequences(
                    sequences,
                    placement,
                    self.cluster,
                    token_budget=token_budget,
                    mini_batch=mini_batch,
                    groups=self.topology.groups,
                    settings=self.settings,
                    costs=self.costs,
                    may_move=may_move,
                    threads=self.cluster.planning_threads,
                    excluded=self.excluded,
                    sliced=sliced,
                    ahead=_still_good(counting.found, placement, tokens),
                ),
                counting.found,
                tokens,
            )

        return self._plan_on_first_rank(make, start)

    def plan_ahead(
        self, sequences: SequenceCounts, placement: Placement, *, token_budget: int, may_move: bool
    ) -> GroupPlans:
        """Plans for a part of a step's sequences. Not a collective."""
        return plan_sequences(
            sequences,
            placement,
            self.cluster,
            token_budget=max(token_budget, int(sequences.lengths.max(initial=0))),
            groups=self.topology.groups,
            settings=self.settings,
            costs=self.costs,
            may_move=may_move,
            threads=self.cluster.planning_threads,
            excluded=self.excluded,
            sliced=True,
        )

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

    def _plan_on_first_rank(self, make: Callable[[], _Plans], start: float) -> PlannedStep:
        def packed() -> tuple[_Plans, list[bytes]]:
            made = make()
            return made._replace(plans=()), [plan.to_bytes() for plan in made.plans]

        made, packed_plans = on_first_rank(packed, self.topology.control)
        plan = StepPlan.from_bytes(packed_plans[self.topology.group])
        figures = {name: getattr(made, name) for name in _Plans._fields if name not in ("schedule", "plans")}
        return PlannedStep(made.schedule, plan, planning_s=time.perf_counter() - start, **figures)

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
        ahead: Ahead | None = None,
    ) -> _Plans:
        if mode in ("static", "off"):
            if mode == "static":
                num_layers, num_experts = placement.home.shape
                placement = self.topology.initial_placement(num_layers, num_experts)
            static = self._static(loads, schedule, placement)
            return _Plans(schedule, static, _max_vio(static, loads))
        tokens = 0 if lengths is None else int(lengths.sum())
        return _Plans.of(
            plan_schedule(
                loads,
                schedule,
                placement,
                self.cluster,
                lengths=lengths,
                settings=self.settings,
                costs=self.costs,
                may_move=may_move,
                threads=self.cluster.planning_threads,
                excluded=self.excluded,
                sliced=sliced,
                ahead=_still_good(ahead, placement, tokens),
            ),
            ahead,
            tokens,
        )

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


def _still_good(ahead: Ahead | None, placement: Placement, tokens: int) -> GroupPlans | None:
    """What was planned ahead, if it was from enough of the step's tokens, and homes are still the same."""
    if ahead is None or ahead.plans is None or ahead.plans_from is None or ahead.tokens < KNOWN_AHEAD * tokens:
        return None
    return ahead.plans if np.array_equal(ahead.plans_from.home, placement.home) else None


def _max_vio(plans: Sequence[StepPlan], loads: Sequence[Workload]) -> float:
    ratios = [max_over_mean(plan.rank_loads(load)) for plan, load in zip(plans, loads, strict=True)]
    return float(np.mean(ratios) - 1)
