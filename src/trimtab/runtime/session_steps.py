"""`SessionSteps`: the part of a `Session` that plans steps with the other ranks, and applies plans."""

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
from trimtab.runtime.layer.micro_step import RunningStep
from trimtab.runtime.planned_step import PlannedStep, PlanReport
from trimtab.runtime.planning import SessionPlanner
from trimtab.runtime.planning_ahead import PlanningAhead
from trimtab.runtime.ranks.lockstep import (
    APPLY_PLAN,
    MOVE,
    PLAN,
    PLAN_SEQUENCES,
    digest,
)
from trimtab.runtime.rows.step_slices import StepSlices, planner_thread
from trimtab.runtime.session_micro_steps import SessionMicroSteps
from trimtab.runtime.session_settings import SessionSettings
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


class SessionSteps(SessionMicroSteps):
    """Plans of a session's steps. All methods but `plan_ahead` are collective."""

    def __init__(self, settings: SessionSettings) -> None:
        super().__init__(settings)
        # What was planned of the next step during the rollout.
        self._ahead: PlanningAhead | None = None

    def move(self, placement: Placement) -> None:
        """Move all experts to given homes, with their rows of optimizer state, between steps. Plans include moves.

        Raises:
            InputError: if ranks have different numbers of experts, an optimizer has state that can't move, or a layer
                was added with `weights`.
            RuntimeError: if gradients are not zero.
        """
        self._calls.require_between_micro_steps("move")
        problem = _problem(self._experts.check_move, placement)
        same = {"homes": digest(placement.home)} | ({} if problem else self._experts.state_to_move(placement))
        self._lockstep.agree(MOVE, must_match=same, problem=problem)
        if self._step is not None and self._experts.num_moved(placement):
            self._step.has_moved = True
        self._experts.move(placement)

    def plan(self, trace: RoutingTrace, schedule: Schedule) -> PlanReport:
        """Plan a step with a given schedule, and apply the plan.

        Args:
            trace: this rank's sequences, in the order of `schedule.sequences_of(rank)`.
            schedule: the schedule of all data ranks, the same on every rank.

        Raises:
            InputError: if trace, schedule and layers are inconsistent.
        """
        self._calls.require_between_micro_steps("plan")
        rank, ranks = self.topology.data_rank, self.topology.num_data_ranks
        fits = _problem(check_fits, trace, schedule, rank, ranks, self._experts.shape)
        places = digest(schedule.micro_step, schedule.rank, schedule.mini_batch_of_micro_step)
        sliced = self._agree(PLAN, {"number of micro-steps": schedule.num_micro_steps, "schedule": places}, fits)
        return self._plan(own_trace(trace), schedule, sliced=sliced)

    def plan_micro_steps(
        self, rows: Sequence[npt.ArrayLike], *, problem: InputError | None = None, may_move: bool = True
    ) -> PlanReport:
        """Plan a step with given micro-steps, and apply the plan.

        Args:
            rows: for every micro-step the integer ids `[n, L, K]` that were recorded for this rank's n tokens in the
                session's L layers. The tokens may be packed batches, slices of sequences, or those of one pipeline
                stage. If a token's route in a layer is unknown, all its K ids are negative. All ranks have the same
                number of micro-steps, each with any number of tokens.
            problem: the caller's reason why this rank can't plan; it is raised on all ranks.
            may_move: the plan may move experts. Plans between the micro-steps of one accumulation may not.

        Raises:
            InputError: if ids and layers are inconsistent, or ranks differ in the number of micro-steps.
        """
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
        ranks = self.topology.num_data_ranks
        schedule = Schedule(
            micro_step=np.repeat(np.arange(len(rows), dtype=np.int32), ranks),
            rank=np.tile(np.arange(ranks, dtype=np.int32), len(rows)),
            mini_batch_of_micro_step=np.zeros(len(rows), np.int32),
            num_ranks=ranks,
        )
        return self._plan(own_trace(trace), schedule, sliced=sliced, may_move=may_move)

    def complete_plan(self) -> PlanReport:
        """Plan the step again, with routes in place of the unknown ones.

        These are the routes of micro-steps that ran without gradients, as in the recompute of log-probabilities. The
        update then needs no exchange of counts for them. Homes do not change.

        Raises:
            RuntimeError: if the session has not planned the step.
        """
        self._calls.require_between_micro_steps("complete_plan")
        step = self._step
        if step is None or step.schedule is None:
            raise RuntimeError("complete_plan() needs a step that this session has planned")
        # Its micro-steps have run forward only.
        self._feedback.begin(None)
        sliced = self._agree(PLAN, {}, None)
        report = self._plan(step.completed_trace, step.schedule, sliced=sliced, may_move=False)
        self._feedback.begin(None)
        return report

    def plan_ahead(self, trace: RoutingTrace, *, token_budget: int) -> None:
        """Count finished sequences of the next step while others still generate, and plan homes and strategy from them.

        It returns at once; the work is done on a thread. The next plan counts only the other sequences, and keeps homes
        and strategy if they were chosen from half of its tokens. Call it any number of times before a plan, equally
        often on all ranks, at any times. Not for `max_rows_per_rank`, `exact` and modes other than `plan`, where it
        has no effect on the plan.

        Args:
            trace: more of this rank's finished sequences, with `sequence_hashes`; it may have none. Some of them may be
                left out of the step, or train on other ranks.
            token_budget: most tokens of a rank in a micro-step.

        Raises:
            InputError: if the trace does not fit the model, or has no hashes.
        """
        problem = _problem(check_countable, trace, self._experts.shape)
        if problem is not None:
            # The other ranks wait for this one's counts.
            trace = trace.part(0, 0)
        trace = own_trace(trace)
        ahead = self._ahead = self._ahead or PlanningAhead(self.topology)
        planner, placement = self._planner(trace), self._experts.placement
        may_move = self._experts.state.may_move

        def plan(sequences: SequenceCounts) -> GroupPlans:
            return planner.plan_ahead(sequences, placement, token_budget=token_budget, may_move=may_move)

        ahead.expect()
        planner_thread(self.topology).start(lambda: ahead.run(trace, placement, plan))
        if problem is not None:
            raise problem

    def plan_sequences(self, trace: RoutingTrace, *, token_budget: int, mini_batch: Array | None = None) -> PlannedStep:
        """Plan a step and its schedule, from any distribution of sequences over ranks.

        Then send every sequence to its rank in the `schedule` of the result, and call `apply_plan`.

        Args:
            trace: this rank's sequences. The schedule numbers the sequences of all ranks in rank order.
            token_budget: most tokens of a rank in a micro-step.
            mini_batch: `[S]` mini-batch of the sequences of all ranks, the same on every rank; one mini-batch by
                default.

        Raises:
            InputError: if the trace does not fit the model, or a sequence exceeds the budget.
        """
        self._calls.require_between_micro_steps("plan_sequences")
        batches = None if mini_batch is None else digest(np.asarray(mini_batch, np.int64))
        same = {"token_budget": token_budget, "mini_batch": batches}
        sliced = self._agree(PLAN_SEQUENCES, same, _problem(check_model, trace, self._experts.shape))
        trace = own_trace(trace)
        planned = self._planner(trace).for_sequences(
            trace, self._experts.placement, self.settings.mode,
            may_move=self._experts.state.may_move, sliced=sliced, token_budget=token_budget, mini_batch=mini_batch,
            planning_ahead=self._take_ahead(sliced),
        )  # fmt: skip
        prints_D: list[Any] = [None] * self.topology.num_data_ranks
        dist.all_gather_object(prints_D, fingerprints(trace), group=self.topology.control)
        return replace(planned, sequences=np.concatenate(prints_D))

    def apply_plan(self, planned: PlannedStep, trace: RoutingTrace) -> PlanReport:
        """Apply a plan of `plan_sequences`. Experts move to the plan's homes.

        Args:
            planned: the plan.
            trace: this rank's sequences, in the order of `planned.schedule.sequences_of(rank)`.

        Raises:
            InputError: as `apply_step_plan`.
        """
        return self._apply_planned(planned, own_trace(trace))

    def apply_step_plan(self, plan: StepPlan, trace: RoutingTrace) -> PlanReport:
        """Apply any plan. Experts move to the plan's homes.

        Args:
            plan: the plan of this rank's expert-parallel group.
            trace: this rank's sequences, in the order of `plan.schedule.sequences_of(rank)`.

        Raises:
            InputError: if the plan is invalid (see `StepPlan.check`), has more slots than this session, or moves homes
                although no optimizer is registered.
            RanksDisagreeError: if the ranks have different plans.
        """
        trace = own_trace(trace)
        workload = self._agree_on_plan(plan, trace, None)
        before = float(max_over_mean(workload.home_loads(self._experts.placement.home)).mean() - 1)
        return self._apply(PlannedStep(plan.schedule, plan, max_vio_before=before), workload, trace, None)

    def _plan(self, trace: RoutingTrace, schedule: Schedule, *, sliced: bool, may_move: bool = True) -> PlanReport:
        may_move = may_move and self._experts.state.may_move
        ahead = self._take_ahead(sliced)
        planned = self._planner(trace).for_schedule(
            trace, schedule, self._experts.placement, self.settings.mode, may_move=may_move, sliced=sliced,
            early=None if ahead is None else ahead.found,
        )  # fmt: skip
        return self._apply_planned(planned, trace)

    def _apply_planned(self, planned: PlannedStep, trace: RoutingTrace) -> PlanReport:
        wrong = None
        if planned.sequences is not None:
            mine = planned.sequences[planned.schedule.sequences_of(self.topology.data_rank)]
            wrong = _problem(check_order, trace, mine)
        workload = self._agree_on_plan(planned.plan, trace, planned.workload, wrong)
        return self._apply(planned, workload, trace, planned.schedule)

    def _planner(self, trace: RoutingTrace) -> SessionPlanner:
        """The planner with the present settings and homes."""
        settings = self.settings
        return SessionPlanner.of(
            self.topology, self._experts.layers, top_k=trace.top_k, slots=settings.planned_slots,
            paths=settings.paths, mirror_bytes=settings.mirror_bytes, settings=settings.plan_settings,
            rates=settings.rates, ring_layers=settings.ring_layers,
            move_s_per_expert=None if settings.rates else self._experts.move_s_per_expert,
            scale=self._feedback.scale, excluded=self._feedback.excluded,
        )  # fmt: skip

    @property
    def _shared(self) -> dict[str, object]:
        """Values that plans depend on, which must be equal on all ranks."""
        first = self._experts.layers[0]
        return self.settings.shared | {
            "optimizers are known": self._experts.state.may_move,
            "ranks_per_node": self.topology.ranks_per_node,
            "layers": len(self._experts.layers),
            "experts": ([tuple(shape) for shape in first.expert_shapes], first.dtype),
        }

    def _agree(self, call: int, same: Mapping[str, object], problem: Exception | None) -> bool:
        """Agree with all data ranks on a call that plans; see `Lockstep.agree`.

        Returns:
            Whether replicas may follow while the step runs.
        """
        if self.settings.mode == "rehome" and not self._experts.has_state:
            problem = problem or InputError(
                "mode 'rehome' moves experts with the state of their optimizers; register these first"
            )
        problem = problem or _problem(self._require_plans)
        can_slice = self.settings.slices_plans and self._can_slice
        ahead_is_good = self._ahead is not None and can_slice and self._ahead.is_complete()
        values_RV = self._lockstep.agree(
            call, must_match={**same, **self._shared}, problem=problem,
            values=[can_slice, ahead_is_good, *self._feedback.take()], all_data_ranks=True,
        )  # fmt: skip
        self._feedback.learn(values_RV[:, 2:], adapts=self.settings.rates is None)
        if not values_RV[:, 1].all():
            self._ahead = None
        return bool(values_RV[:, 0].all())

    def _take_ahead(self, sliced: bool) -> PlanningAhead | None:
        """What was planned ahead of this step, once."""
        ahead, self._ahead = self._ahead, None
        # A step that does nothing, to measure that, is not planned ahead.
        return ahead if sliced and self._feedback.excluded is not None else None

    def _agree_on_plan(
        self, plan: StepPlan, trace: RoutingTrace, workload: Workload | None, problem: Exception | None = None
    ) -> Workload:
        """Check that all ranks apply the same plan and that it fits their sequences. Returns the load of the group."""
        self._calls.require_between_micro_steps("apply_plan")
        problem = _problem(self._check_plan, plan, trace) or problem
        same: dict[str, object] = {"the plan": plan.hash, **self._shared}
        if self.settings.executes_plans and not problem and self._experts.num_moved(plan.placement):
            same |= self._experts.state_to_move(plan.placement)
        self._lockstep.agree(APPLY_PLAN, must_match=same, problem=problem)
        if workload is None:
            # The ranks of the group, numbered among all data ranks.
            first = self.topology.group * self.topology.num_ranks
            schedule = replace(plan.schedule, rank=plan.rank + first, num_ranks=self.topology.num_data_ranks)
            workload = self._planner(trace).gather_workloads(trace, schedule)[self.topology.group]
        plan.check(workload)
        return workload

    def _require_plans(self) -> None:
        if self.settings.mode == "live":
            raise InputError(
                "mode 'live' makes no plans; enter live_micro_step(), or set the session's mode to 'plan' before a plan"
            )

    def _check_plan(self, plan: StepPlan, trace: RoutingTrace) -> None:
        self._require_plans()
        check_fits(trace, plan.schedule, self.topology.rank, self.topology.num_ranks, self._experts.shape)
        if not self.settings.executes_plans:
            return
        slots = self.settings.slots_per_rank
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
        plan, experts, runs = planned.plan, self._experts, self.settings.executes_plans
        applied_at = time.perf_counter()
        slices = planned.slices if runs else None
        before, moved = workload.home_loads(experts.placement.home), experts.num_moved(plan.placement)
        after = plan.rank_loads(workload) if moved or plan.num_replicas else before
        start = time.perf_counter()
        number = self._end_step()
        transfers = experts.transfers if runs else None
        slots = self.settings.slots_per_rank
        following = None if slices is None else self._start_slices(plan, workload, slices)
        step = RunningStep(plan, workload, trace, schedule, transfers, number, slots, following)
        if transfers is not None:
            with torch.inference_mode(False):
                experts.move(plan.placement)
                transfers.prepare(plan, step.replicas, number, slices, by_messages=self.settings.paths == "message")
        # Optimizers may have written to parameters in ways that don't show.
        experts.changed = True
        self._calls.is_planned = True
        self._begin_step(step)
        moving_s = time.perf_counter() - start
        self._feedback.begin(planned if runs and schedule is not None else None, moving_s)
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
        planner = SlicePlanner.of(rules, self.topology.group, workload, header.home)
        slices = StepSlices(header, planner, self.topology, expected_max_vio=rules.max_vio)
        planner_thread(self.topology).start(slices.run)
        # A micro-step waits for its replicas for as long as they are predicted to save, or as long as it takes for runs
        # that can be repeated.
        self._patience_s = rules.saved_s / max(1, header.num_micro_steps)
        if self.settings.rates is not None:
            self._patience_s = LONGEST_WAIT_S
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
