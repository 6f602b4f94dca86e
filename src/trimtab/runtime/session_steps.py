"""`SessionSteps`: the part of a `Session` that plans steps with the other ranks, and applies plans."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import PlannedStep, Schedule, SequenceCounts, StepPlan
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime.layer.micro_step import RunningStep
from trimtab.runtime.plan_report import PlanReport
from trimtab.runtime.planning import trace_checks
from trimtab.runtime.planning.background_slices import planner_thread, start_slices
from trimtab.runtime.planning.planning_in_rollout import PlanningInRollout
from trimtab.runtime.planning.rank_load import RankLoad, assign_unread, checked_load
from trimtab.runtime.ranks.lockstep import APPLY_PLAN, PLAN, PLAN_SEQUENCES, digest
from trimtab.runtime.ranks.rank_calls import attempt
from trimtab.runtime.session_micro_steps import SessionMicroSteps
from trimtab.runtime.session_settings import SessionSettings
from trimtab.runtime.step_planner import SessionPlanner
from trimtab.runtime.transfer import streams
from trimtab.trace import RoutingTrace
from trimtab.trace.numbering import Numbering

# Most seconds that a session waits for what is planned ahead, if no step follows.
PATIENCE_S = 10.0


class SessionSteps(SessionMicroSteps):
    """Plans of a session's steps. All methods but `plan_ahead` are collective."""

    def __init__(self, settings: SessionSettings) -> None:
        super().__init__(settings)
        # What was planned of the next step during the rollout.
        self._in_rollout: PlanningInRollout | None = None
        # Slots of a rank, or numbers to choose from; and how often one is still chosen.
        self._slots, self._choices = settings.slot_numbers, 2

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
        mine, problem = attempt(self._checked, trace, schedule, rank, ranks)
        places = digest(schedule.micro_step, schedule.rank, schedule.mini_batch_of_micro_step)
        sliced = self._agree(PLAN, {"number of micro-steps": schedule.num_micro_steps, "schedule": places}, problem)
        assert mine is not None
        return self._plan(mine, schedule, sliced=sliced)

    def plan_micro_steps(
        self,
        rows: Sequence[npt.ArrayLike],
        *,
        unread: Sequence[npt.ArrayLike] | None = None,
        problem: InputError | None = None,
        numbering: Numbering | None = None,
    ) -> PlanReport:
        """Plan a step with given micro-steps, and apply the plan.

        Args:
            rows: for every micro-step the integer ids `[n, L, K]` that were recorded for this rank's n tokens in the
                session's L layers. The tokens may be packed batches, slices of sequences, or those of one pipeline
                stage. If a token's route in a layer is unknown, all its K ids are negative. All ranks have the same
                number of micro-steps, each with any number of tokens.
            unread: for every micro-step a mask `[n]` bool of tokens whose output nothing uses: neither a loss, those of
                routers included, nor another token, by attention say. The last token of a sequence is one, and
                padding. The plan gives them distinct experts that even out the ranks, whatever their ids are, and they
                replay these. Given on all ranks or on none.
            problem: the caller's reason why this rank can't plan; it is raised on all ranks.
            numbering: `session.numbering` when the ids were recorded; needed once the session has renumbered.

        Raises:
            InputError: if ids and layers are inconsistent, ranks differ in the number of micro-steps, or `unread` is
                given although the model has an auxiliary loss, as far as an integration knows of it.
        """
        self._calls.require_between_micro_steps("plan_micro_steps")
        if problem is None and unread is not None and (loss := self.auxiliary_loss()):
            problem = InputError(
                f"unread tokens can't get experts by the plan: {loss} uses the routes of all tokens; leave out unread, "
                "or switch it off"
            )
        shape = self._experts.shape
        trace, wrong = (None, problem) if problem else attempt(trace_checks.trace_of_micro_steps, rows, *shape, unread)
        if trace is not None:
            layers = trace.layer_indices if self.decoder_layers is None else self.decoder_layers
            of_layers = partial(replace, trace, numbering=numbering, layer_indices=layers)
            trace, wrong = attempt(lambda: self._present(of_layers()))
        same = {"number of micro-steps": len(rows), "top_k": trace and trace.top_k}
        sliced = self._agree(PLAN, same | {"unread is given": unread is not None}, wrong)
        assert trace is not None
        unread_T = None
        if unread is not None:
            unread_T = np.concatenate([np.asarray(mask) for mask in unread])
            assign_unread(trace, unread_T, self._physical.places.experts_RH, self.topology)
        ranks = self.topology.num_data_ranks
        schedule = Schedule(
            micro_step=np.repeat(np.arange(len(rows), dtype=np.int32), ranks),
            rank=np.tile(np.arange(ranks, dtype=np.int32), len(rows)),
            mini_batch_of_micro_step=np.zeros(len(rows), np.int32),
            num_ranks=ranks,
        )
        return self._plan(trace, schedule, sliced=sliced, unread_T=unread_T)

    def complete_plan(self) -> PlanReport:
        """Plan the step again, with routes in place of the unknown ones.

        These are the routes of micro-steps that ran without gradients, as in the recompute of log-probabilities. The
        update then needs no exchange of counts for them.

        Raises:
            RuntimeError: if the session has not planned the step.
        """
        self._calls.require_between_micro_steps("complete_plan")
        step = self._step
        if step is None or step.schedule is None:
            raise RuntimeError("complete_plan() needs a step that this session has planned")
        problem = None
        if step.numbering != self.numbering:
            problem = RuntimeError("the step was planned for weights of another numbering; plan it again")
        # Its micro-steps have run forward only.
        self._feedback.begin(None)
        sliced = self._agree(PLAN, {}, problem)
        report = self._plan(step.completed_trace, step.schedule, sliced=sliced, unread_T=step.unread_T)
        self._feedback.begin(None)
        return report

    def plan_ahead(self, trace: RoutingTrace, *, token_budget: int) -> None:
        """Count finished sequences of the next step while others still generate, and choose a strategy from them.

        It returns at once; the work is done on a thread. The next plan counts only the other sequences, and keeps the
        strategy if it was chosen from half of its tokens. Call it any number of times before a plan, equally
        often on all ranks, at any times. Not for `max_rows_per_rank`, `exact` and modes other than `plan`, where it
        has no effect on the plan.

        Args:
            trace: more of this rank's finished sequences, with `sequence_hashes`; it may have none. Some of them may be
                left out of the step, or train on other ranks.
            token_budget: most tokens of a rank in a micro-step.

        Raises:
            InputError: if the trace does not fit the model, or has no hashes.
        """
        if not self.topology.has_groups:
            raise RuntimeError("plan_ahead() needs the session's process groups; call it before suspend()")
        counted, problem = attempt(lambda: trace_checks.countable_trace(self._present(trace), self._experts.shape))
        # The other ranks wait for this one's counts.
        mine = trace.part(0, 0) if counted is None else counted
        in_rollout = self._in_rollout = self._in_rollout or PlanningInRollout(self.topology)
        planner = self._planner(mine)

        def plan(sequences: SequenceCounts) -> PlannedStep:
            return planner.plan_ahead(sequences, token_budget=token_budget)

        in_rollout.expect()
        planner_thread(self.topology).start(lambda: in_rollout.run(mine, plan))
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
        mine, problem = attempt(self._checked, trace)
        sliced = self._agree(PLAN_SEQUENCES, same, problem)
        assert mine is not None
        planned = self._planner(mine).for_sequences(
            mine, sliced=sliced, token_budget=token_budget, mini_batch=mini_batch,
            in_rollout=self._take_in_rollout(sliced=sliced),
        )  # fmt: skip
        prints_D: list[Any] = [None] * self.topology.num_data_ranks
        dist.all_gather_object(prints_D, trace_checks.fingerprints(mine), group=self.topology.control)
        return replace(planned, sequences=np.concatenate(prints_D))

    def apply_plan(self, planned: PlannedStep, trace: RoutingTrace) -> PlanReport:
        """Apply a plan of `plan_sequences`.

        Args:
            planned: the plan.
            trace: this rank's sequences, in the order of `planned.schedule.sequences_of(rank)`.

        Raises:
            InputError: as `apply_step_plan`.
        """
        hashes = planned.sequences
        if hashes is not None:
            hashes = hashes[planned.schedule.sequences_of(self.topology.data_rank)]
        mine, problem = self._own_trace(trace, planned.plan, hashes)
        return self._apply_planned(planned, mine, planned.schedule, problem)

    def apply_step_plan(self, plan: StepPlan, trace: RoutingTrace) -> PlanReport:
        """Apply any plan whose homes are those of the session.

        Args:
            plan: the plan of this rank's expert-parallel group.
            trace: this rank's sequences, in the order of `plan.schedule.sequences_of(rank)`.

        Raises:
            InputError: if the plan is invalid (see `StepPlan.check`), has more slots than this session or other homes.
            RanksDisagreeError: if the ranks have different plans.
        """
        mine, problem = self._own_trace(trace, plan, None)
        return self._apply_planned(PlannedStep(plan.schedule, (plan,)), mine, None, problem)

    def _drop_step(self) -> None:
        """End the present step, and what was planned of the next one, with their threads."""
        if self._in_rollout is not None:
            self._in_rollout.is_complete(PATIENCE_S)
        self._in_rollout = None
        super()._drop_step()

    def _present(self, trace: RoutingTrace) -> RoutingTrace:
        return trace_checks.in_present_ids(trace, self.numbering, self.decoder_layers)

    def _checked(self, trace: RoutingTrace, *of_schedule: Any) -> RoutingTrace:
        """This rank's trace by present ids, as `own_trace`."""
        return trace_checks.own_trace(self._present(trace), self._experts.shape, *of_schedule)

    def _own_trace(
        self, trace: RoutingTrace, plan: StepPlan, hashes: Array | None
    ) -> tuple[RoutingTrace, Exception | None]:
        """This rank's trace of a plan of its group; or the trace as it is, and why it does not fit."""
        ranks = self.topology.rank, self.topology.num_ranks
        mine, problem = attempt(self._checked, trace, plan.schedule, *ranks, hashes)
        return trace if mine is None else mine, problem

    def _plan(
        self,
        trace: RoutingTrace,
        schedule: Schedule,
        *,
        sliced: bool,
        unread_T: Array | None = None,
    ) -> PlanReport:
        planned, load = self._planner(trace).for_schedule(
            trace, schedule, sliced=sliced, in_rollout=self._take_in_rollout(sliced=sliced)
        )
        return self._apply_planned(planned, trace, schedule, load=load, unread_T=unread_T)

    def _planner(self, trace: RoutingTrace, move_s: float | None = None) -> SessionPlanner:
        """The planner with the present settings, and these seconds for an expert that changes its rank."""
        settings = self.settings
        return SessionPlanner.of(
            self.topology, self._experts.layers, settings, self._slots, top_k=trace.top_k,
            move_s_per_expert=None if settings.rates else move_s,
            scale=self._feedback.scale, excluded=self._feedback.excluded,
        )  # fmt: skip

    @property
    def _shared(self) -> dict[str, object]:
        """Values that plans depend on, which must be equal on all ranks."""
        return self.settings.shared | {
            "ranks_per_node": self.topology.ranks_per_node,
            "layers": len(self._experts.layers),
            "experts": self._experts.layers[0].expert_like,
        }

    def _agree(self, call: int, same: Mapping[str, object], problem: Exception | None) -> bool:
        """Agree with all data ranks on a call that plans, see `Lockstep.agree`, and on whether replicas may follow
        while the step runs."""
        problem = problem or attempt(self._require_plans)[1] or self._experts.optimizers.untrained()
        can_slice = self.settings.slices_plans and self._can_slice
        # To plan at once takes no less time.
        is_counted = self._in_rollout is not None and can_slice and self._in_rollout.is_complete()
        values_RV = self._lockstep.agree(
            call, must_match={**same, **self._shared}, problem=problem,
            values=[can_slice, is_counted, self._feedback.take(), self._experts.most_slots(self.settings)],
            all_data_ranks=True,
        )  # fmt: skip
        if self._choices:
            fitting = [number for number in self.settings.slot_numbers if number <= values_RV[:, 3].min()]
            self._slots = tuple(fitting) or self.settings.slot_numbers[:1]
        self._feedback.learn(values_RV[:, 2], adapts=self.settings.rates is None)
        if not values_RV[:, 1].all():
            self._in_rollout = None
        return bool(values_RV[:, 0].all())

    def _keep_slots(self, slots: int, predicted_s: Mapping[int, float]) -> None:
        """Keep the number of slots that was chosen; on a GPU it is chosen once more, when a step has run."""
        self._choices = self._choices - 1 if streams.has_streams(self._experts.device) else 0
        if not self._choices:
            self._slots = (slots,)
        if self.topology.data_rank == 0:
            others = ", ".join(f"{number}: {seconds:.3g} s" for number, seconds in predicted_s.items())
            more = self._experts.slot_bytes(self.settings) * slots / 1e9
            logging.getLogger("trimtab").warning(
                "%d slots per rank of %.2g GB in all; predicted seconds of a step by slots: %s", slots, more, others
            )

    def _take_in_rollout(self, *, sliced: bool) -> PlanningInRollout | None:
        """What was planned of this step during the rollout, once."""
        in_rollout, self._in_rollout = self._in_rollout, None
        return in_rollout if sliced and not self._feedback.measures_nothing else None

    def _require_plans(self) -> None:
        if self.settings.mode == "live":
            raise InputError(
                "mode 'live' makes no plans; enter live_micro_step(), or set the session's mode to 'plan' before a plan"
            )

    def _check_plan(self, plan: StepPlan) -> None:
        self._require_plans()
        if not self.settings.executes_plans:
            return
        slots = self.slots_per_rank
        if plan.slots_per_rank > slots:
            raise InputError(f"the plan is for {plan.slots_per_rank} slots a rank; this session has {slots}")
        home_LE = self._experts.placement.home
        if plan.home.shape == home_LE.shape and (moved := np.count_nonzero(plan.home != home_LE)):
            raise InputError(
                f"the plan has other homes for {moved} experts than the session; experts change their rank only by "
                "renumber()"
            )

    def _apply_planned(
        self,
        planned: PlannedStep,
        trace: RoutingTrace,
        schedule: Schedule | None,
        problem: Exception | None = None,
        load: RankLoad | None = None,
        unread_T: Array | None = None,
    ) -> PlanReport:
        """Check that all ranks apply the same plan, and apply it: allocate memory, start micro-steps.

        Args:
            trace: this rank's sequences.
            schedule: the schedule of all data ranks; None if the session has not planned the step.
            problem: why the trace does not fit.
            load: this rank's; counted by default.
            unread_T: `[T]` bool, tokens of the trace whose output is not used.
        """
        self._calls.require_between_micro_steps("apply_plan")
        plan, experts, is_executed = planned.plan, self._experts, self.settings.executes_plans
        problem = problem or attempt(self._check_plan, plan)[1]
        if problem is None:
            load, problem = attempt(checked_load, plan, trace, load, self.topology)
        same: dict[str, object] = {"the plan": plan.hash, **self._shared}
        self._lockstep.agree(APPLY_PLAN, must_match=same, problem=problem)
        assert load is not None
        plan.check_mixed(load.of_group.mixed_ML)

        applied_at = time.perf_counter()
        if self.rollout_placement is not None:
            self.rollout_placement.add(trace)
        slices = planned.slices if is_executed else None
        before = load.of_group.home_loads(experts.placement.home)
        after = plan.rank_loads(load.of_group) if plan.num_replicas else before
        if schedule is None:
            planned = replace(planned, max_vio_before=float(max_over_mean(before).mean() - 1))
        number = self._end_step()
        if planned.slots_s:
            self._keep_slots(plan.slots_per_rank, planned.slots_s)
        transfers = experts.transfers if is_executed else None
        following = None
        if slices is not None:
            following = start_slices(plan, load, slices, self.topology)
            # A micro-step waits for its replicas for as long as they are predicted to save.
            self._patience_s = self.settings.patience_s(slices.saved_s / max(1, plan.num_micro_steps))
        experts.drain()
        arriving_RMLH = load.for_homes(self._physical.places.experts_RH)
        step = RunningStep(
            self.topology, experts.layers, plan, load, arriving_RMLH, trace, schedule, transfers, number,
            self._physical, self._uploads, following, unread_T, self.numbering,
        )  # fmt: skip
        if transfers is not None:
            with torch.inference_mode(False):
                transfers.prepare(plan, step.replicas, number, slices, by_messages=self.settings.paths == "message")
        # Optimizers may have written to parameters in ways that don't show.
        experts.changed = True
        self._calls.is_planned = True
        self._step = step
        if slices is None and plan.num_micro_steps:
            step.start_programs(0, True, False, self._programs_thread)
        self._feedback.begin(planned if is_executed and schedule is not None else None)
        return PlanReport.of(
            planned, (before, after), self.memory, is_executed=is_executed,
            applying_s=time.perf_counter() - applied_at,
        )  # fmt: skip
