"""`Steps`: plans steps with the other ranks, and applies plans."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import GroupPlans, Placement, Schedule, SequenceCounts, StepPlan, Workload
from trimtab.planner.plan.slices import SlicePlanner, SliceRules
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime.feedback import Feedback
from trimtab.runtime.layer.instance import LayerCalls
from trimtab.runtime.layer.micro_step import RunningStep
from trimtab.runtime.micro_step_runs import MicroStepRuns
from trimtab.runtime.planned_step import PlannedStep, PlanReport
from trimtab.runtime.planning import SessionPlanner
from trimtab.runtime.planning_ahead import PlanningAhead
from trimtab.runtime.rank_experts import RankExperts
from trimtab.runtime.ranks.lockstep import (
    APPLY_PLAN,
    MOVE,
    PLAN,
    PLAN_SEQUENCES,
    digest,
)
from trimtab.runtime.rows.step_slices import StepSlices, planner_thread
from trimtab.runtime.settings import Settings
from trimtab.runtime.trace_checks import (
    check_countable,
    check_fits,
    check_model,
    check_order,
    fingerprints,
    own_trace,
    trace_of_micro_steps,
)
from trimtab.trace import RoutingTrace

# Most seconds that a micro-step waits for its slices in runs that can be repeated.
LONGEST_WAIT_S = 60.0


class Steps:
    """The steps of a session. Its methods implement those of `Session` with the same names.

    Attributes:
        feedback: what plans learn from measured times.
        runs: runs the micro-steps of the step whose plan was applied last.
    """

    def __init__(self, settings: Settings, experts: RankExperts, calls: LayerCalls) -> None:
        self._settings, self._experts, self._calls = settings, experts, calls
        self._topology, self._lockstep, self._counters = calls.topology, calls.lockstep, calls.counters
        self._ahead: PlanningAhead | None = None
        self.feedback = Feedback()
        self.runs = MicroStepRuns(settings, experts, calls, self.feedback)
        experts.at_backward_end = self.feedback.mark

    def move(self, placement: Placement) -> None:
        """Move experts between steps."""
        self._calls.require_between_micro_steps("move")
        problem = _problem(self._experts.check_move, placement)
        same = {"homes": digest(placement.home)} | ({} if problem else self._experts.state_to_move(placement))
        self._lockstep.agree(MOVE, must_match=same, problem=problem)
        if self.runs.step is not None and self._experts.num_moved(placement):
            self.runs.step.has_moved = True
        self._experts.move(placement)

    def plan(self, trace: RoutingTrace, schedule: Schedule) -> PlanReport:
        """Plan a given schedule."""
        self._calls.require_between_micro_steps("plan")
        rank, ranks = self._topology.data_rank, self._topology.num_data_ranks
        fits = _problem(check_fits, trace, schedule, rank, ranks, self._experts.shape)
        places = digest(schedule.micro_step, schedule.rank, schedule.mini_batch_of_micro_step)
        sliced = self._agree(PLAN, {"number of micro-steps": schedule.num_micro_steps, "schedule": places}, fits)
        return self._plan(own_trace(trace), schedule, sliced=sliced)

    def plan_micro_steps(
        self, rows: Sequence[npt.ArrayLike], problem: InputError | None, *, may_move: bool
    ) -> PlanReport:
        """Plan given rows: each micro-step becomes one sequence of each rank."""
        self._calls.require_between_micro_steps("plan_micro_steps")
        trace = None
        try:
            if problem is None:
                trace = trace_of_micro_steps(rows, *self._experts.shape)
        except InputError as error:
            problem = error
        same = {"number of micro-steps": len(rows), "top_k": trace and trace.top_k, "may_move": may_move}
        sliced = self._agree(PLAN, same, problem)
        assert trace is not None
        ranks = self._topology.num_data_ranks
        schedule = Schedule(
            micro_step=np.repeat(np.arange(len(rows), dtype=np.int32), ranks),
            rank=np.tile(np.arange(ranks, dtype=np.int32), len(rows)),
            mini_batch_of_micro_step=np.zeros(len(rows), np.int32),
            num_ranks=ranks,
        )
        return self._plan(own_trace(trace), schedule, sliced=sliced, may_move=may_move)

    def plan_ahead(self, trace: RoutingTrace, token_budget: int) -> None:
        """Count finished sequences, and plan from those counted so far."""
        problem = _problem(check_countable, trace, self._experts.shape)
        if problem is not None:
            # The other ranks wait for this one's counts.
            trace = trace.part(0, 0)
        trace = own_trace(trace)
        ahead = self._ahead = self._ahead or PlanningAhead(self._topology)
        planner, placement = self._planner(trace), self._experts.placement
        may_move = self._experts.state.may_move

        def plan(sequences: SequenceCounts) -> GroupPlans:
            return planner.plan_ahead(sequences, placement, token_budget=token_budget, may_move=may_move)

        ahead.expect()
        planner_thread(self._topology).start(lambda: ahead.run(trace, placement, plan))
        if problem is not None:
            raise problem

    def complete_plan(self) -> PlanReport:
        """Plan again with the routes recorded since."""
        self._calls.require_between_micro_steps("complete_plan")
        step = self.runs.step
        if step is None or step.schedule is None:
            raise RuntimeError("complete_plan() needs a step that this session has planned")
        # Its micro-steps have run forward only.
        self.feedback.begin(None)
        sliced = self._agree(PLAN, {}, None)
        report = self._plan(step.completed_trace, step.schedule, sliced=sliced, may_move=False)
        self.feedback.begin(None)
        return report

    def plan_sequences(self, trace: RoutingTrace, *, token_budget: int, mini_batch: Array | None) -> PlannedStep:
        """Plan schedule and step."""
        self._calls.require_between_micro_steps("plan_sequences")
        batches = None if mini_batch is None else digest(np.asarray(mini_batch, np.int64))
        same = {"token_budget": token_budget, "mini_batch": batches}
        sliced = self._agree(PLAN_SEQUENCES, same, _problem(check_model, trace, self._experts.shape))
        trace = own_trace(trace)
        planned = self._planner(trace).for_sequences(
            trace, self._experts.placement, self._settings.mode,
            may_move=self._experts.state.may_move, sliced=sliced, token_budget=token_budget, mini_batch=mini_batch,
            planning_ahead=self._take_ahead(sliced),
        )  # fmt: skip
        prints_D: list[Any] = [None] * self._topology.num_data_ranks
        dist.all_gather_object(prints_D, fingerprints(trace), group=self._topology.control)
        return replace(planned, sequences=np.concatenate(prints_D))

    def apply_plan(self, planned: PlannedStep, trace: RoutingTrace) -> PlanReport:
        """Apply a plan of `plan_sequences`."""
        return self._apply_planned(planned, own_trace(trace))

    def apply_step_plan(self, plan: StepPlan, trace: RoutingTrace) -> PlanReport:
        """Apply a plan from elsewhere."""
        trace = own_trace(trace)
        workload = self._agree_on_plan(plan, trace, None)
        before = float(max_over_mean(workload.home_loads(self._experts.placement.home)).mean() - 1)
        return self._apply(PlannedStep(plan.schedule, plan, max_vio_before=before), workload, trace, None)

    def _plan(self, trace: RoutingTrace, schedule: Schedule, *, sliced: bool, may_move: bool = True) -> PlanReport:
        may_move = may_move and self._experts.state.may_move
        ahead = self._take_ahead(sliced)
        planned = self._planner(trace).for_schedule(
            trace, schedule, self._experts.placement, self._settings.mode, may_move=may_move, sliced=sliced,
            early=None if ahead is None else ahead.found,
        )  # fmt: skip
        return self._apply_planned(planned, trace)

    def _apply_planned(self, planned: PlannedStep, trace: RoutingTrace) -> PlanReport:
        wrong = None
        if planned.sequences is not None:
            mine = planned.sequences[planned.schedule.sequences_of(self._topology.data_rank)]
            wrong = _problem(check_order, trace, mine)
        workload = self._agree_on_plan(planned.plan, trace, planned.workload, wrong)
        return self._apply(planned, workload, trace, planned.schedule)

    def _planner(self, trace: RoutingTrace) -> SessionPlanner:
        """The planner with the present settings and homes."""
        settings = self._settings
        return SessionPlanner.of(
            self._topology, self._experts.layers, top_k=trace.top_k, slots=settings.planned_slots,
            paths=settings.paths, mirror_bytes=settings.mirror_bytes, settings=settings.plan_settings,
            rates=settings.rates, ring_layers=settings.ring_layers,
            move_s_per_expert=None if settings.rates else self._experts.move_s_per_expert,
            scale=self.feedback.scale, excluded=self.feedback.excluded,
        )  # fmt: skip

    @property
    def _shared(self) -> dict[str, object]:
        """Values that plans depend on, which must be equal on all ranks."""
        first = self._experts.layers[0]
        return self._settings.shared | {
            "optimizers are known": self._experts.state.may_move,
            "ranks_per_node": self._topology.ranks_per_node,
            "layers": len(self._experts.layers),
            "experts": ([tuple(shape) for shape in first.expert_shapes], first.dtype),
        }

    def _agree(self, call: int, same: Mapping[str, object], problem: Exception | None) -> bool:
        """Agree with all data ranks on a call that plans; see `Lockstep.agree`.

        Returns:
            Whether replicas may follow while the step runs.
        """
        if self._settings.mode == "rehome" and not self._experts.has_state:
            problem = problem or InputError(
                "mode 'rehome' moves experts with the state of their optimizers; register these first"
            )
        problem = problem or _problem(self._require_plans)
        can_slice = self._settings.slices_plans and self.runs.can_slice
        ahead_is_good = self._ahead is not None and can_slice and self._ahead.is_complete()
        values_RV = self._lockstep.agree(
            call, must_match={**same, **self._shared}, problem=problem,
            values=[can_slice, ahead_is_good, *self.feedback.take()], all_data_ranks=True,
        )  # fmt: skip
        self.feedback.learn(values_RV[:, 2:], adapts=self._settings.rates is None)
        if not values_RV[:, 1].all():
            self._ahead = None
        return bool(values_RV[:, 0].all())

    def _take_ahead(self, sliced: bool) -> PlanningAhead | None:
        """What was planned ahead of this step, once."""
        ahead, self._ahead = self._ahead, None
        # A step that does nothing, to measure that, is not planned ahead.
        return ahead if sliced and self.feedback.excluded is not None else None

    def _agree_on_plan(
        self, plan: StepPlan, trace: RoutingTrace, workload: Workload | None, problem: Exception | None = None
    ) -> Workload:
        """Check that all ranks apply the same plan and that it fits their sequences. Returns the load of the group."""
        self._calls.require_between_micro_steps("apply_plan")
        problem = _problem(self._check_plan, plan, trace) or problem
        same: dict[str, object] = {"the plan": plan.hash, **self._shared}
        if self._settings.executes_plans and not problem and self._experts.num_moved(plan.placement):
            same |= self._experts.state_to_move(plan.placement)
        self._lockstep.agree(APPLY_PLAN, must_match=same, problem=problem)
        if workload is None:
            # The ranks of the group, numbered among all data ranks.
            first = self._topology.group * self._topology.num_ranks
            schedule = replace(plan.schedule, rank=plan.rank + first, num_ranks=self._topology.num_data_ranks)
            workload = self._planner(trace).gather_workloads(trace, schedule)[self._topology.group]
        plan.check(workload)
        return workload

    def _require_plans(self) -> None:
        if self._settings.mode == "live":
            raise InputError(
                "mode 'live' makes no plans; enter live_micro_step(), or set the session's mode to 'plan' before a plan"
            )

    def _check_plan(self, plan: StepPlan, trace: RoutingTrace) -> None:
        self._require_plans()
        check_fits(trace, plan.schedule, self._topology.rank, self._topology.num_ranks, self._experts.shape)
        if not self._settings.executes_plans:
            return
        slots = self._settings.slots_per_rank
        if plan.slots_per_rank > slots:
            raise InputError(f"the plan is for {plan.slots_per_rank} slots a rank; this session has {slots}")
        moved = self._experts.num_moved(plan.placement)
        if moved and not self._experts.state.may_move:
            raise InputError(
                f"the plan moves {moved} experts to other homes; register their optimizer with "
                "register_optimizers(), so that its state moves with them"
            )
        self._experts.check_move(plan.placement)

    def _apply(
        self, planned: PlannedStep, workload: Workload, trace: RoutingTrace, schedule: Schedule | None
    ) -> PlanReport:
        """Apply a checked plan: move experts, allocate memory.

        Args:
            schedule: the schedule of all data ranks; None if the session has not planned the step.
        """
        plan, experts, runs = planned.plan, self._experts, self._settings.executes_plans
        applied_at = time.perf_counter()
        slices = planned.slices if runs else None
        before, moved = workload.home_loads(experts.placement.home), experts.num_moved(plan.placement)
        after = plan.rank_loads(workload) if moved or plan.num_replicas else before
        start = time.perf_counter()
        number = self.runs.end_step()
        transfers = experts.transfers if runs else None
        slots = self._settings.slots_per_rank
        following = None if slices is None else self._start_slices(plan, workload, slices)
        step = RunningStep(plan, workload, trace, schedule, transfers, number, slots, following)
        if transfers is not None:
            with torch.inference_mode(False):
                experts.move(plan.placement)
                transfers.prepare(plan, step.replicas, number, slices, by_messages=self._settings.paths == "message")
        # Optimizers may have written to parameters in ways that don't show.
        experts.changed = True
        self._calls.is_planned = True
        self.runs.begin_step(step)
        moving_s = time.perf_counter() - start
        self.feedback.begin(planned if runs and schedule is not None else None, moving_s)
        max_vio, replicas = float(max_over_mean(after).mean() - 1), plan.num_replicas
        peak_rows = int(after.max(initial=0))
        if slices is not None:
            expected = (1 + slices.max_vio) * after.mean(axis=2).max(initial=0.0)
            peak_rows = min(peak_rows, math.ceil(expected))
            max_vio, replicas = slices.max_vio, round(slices.replicas * plan.mixed_ML.size)
        return PlanReport(
            is_sliced=slices is not None,
            planning_s=planned.planning_s,
            waited_s=planned.planning_s + time.perf_counter() - applied_at - moving_s,
            ahead_s=planned.ahead_s,
            known_ahead=planned.known_ahead,
            moving_s=moving_s,
            strategy=planned.strategy,
            runner_up=planned.runner_up,
            predicted_s=planned.predicted_s,
            predicted_gain=planned.predicted_gain,
            max_vio_before=planned.max_vio_before,
            max_vio_after=max_vio,
            replicas=replicas,
            homes_moved=moved,
            micro_steps=plan.num_micro_steps,
            unplanned_micro_steps=0 if runs else plan.num_micro_steps,
            mixed_instances=int(np.count_nonzero(plan.mixed_ML)),
            peak_rows_before=int(before.max(initial=0)),
            peak_rows_after=peak_rows,
            pool_bytes=experts.transfers.pool_bytes,
            mirror_bytes=experts.transfers.mirror_bytes,
            peer_memory_bytes=experts.transfers.peer_memory_bytes,
            free_bytes=_free_bytes(experts.device),
        )

    def _start_slices(self, header: StepPlan, workload: Workload, rules: SliceRules) -> StepSlices:
        planner = SlicePlanner.of(rules, self._topology.group, workload, header.home)
        slices = StepSlices(header, planner, self._topology, expected_max_vio=rules.max_vio)
        planner_thread(self._topology).start(slices.run)
        # A micro-step waits for its replicas for as long as they are predicted to save, or as long as it takes for runs
        # that can be repeated.
        self.runs.patience_s = rules.saved_s / max(1, header.num_micro_steps)
        if self._settings.rates is not None:
            self.runs.patience_s = LONGEST_WAIT_S
        return slices


def _problem(check: Callable[..., None], *args: Any) -> Exception | None:
    """The error that a check raises, or None."""
    try:
        check(*args)
    except (InputError, RuntimeError) as error:
        return error
    return None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
