"""`SessionMicroSteps`: the part of a `Session` that runs micro-steps, those of the applied step and live ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial

import torch

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.errors import InputError
from trimtab.planner import StepPlan
from trimtab.runtime.layer.layer_call import A_MICRO_STEP
from trimtab.runtime.layer.micro_step import BoundRoutes, MicroStep, RunningStep
from trimtab.runtime.live.balancer import LiveBalancer, LiveMicroStep
from trimtab.runtime.plan_report import RankMemory
from trimtab.runtime.ranks.lockstep import LIVE_MICRO_STEP, MICRO_STEP
from trimtab.runtime.ranks.rank_calls import CallThread
from trimtab.runtime.session_base import SessionBase
from trimtab.runtime.session_settings import SessionSettings
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.streams import BackgroundCopies

# Most seconds that a new plan waits for the round of slices that the planner's thread is in.
PATIENCE_S = 1.0


class SessionMicroSteps(SessionBase):
    """Micro-steps of a session. The ranks agree on each, copy changed weights, and bind its routes and programs."""

    def __init__(self, settings: SessionSettings) -> None:
        super().__init__(settings)
        # Number of plans that were applied, and of balanced live runs that were begun.
        self._plans = 0
        self._live: LiveBalancer | None = None
        # The step whose plan was applied last; None before the first plan, and once live micro-steps are balanced.
        self._step: RunningStep | None = None
        # Most seconds that a micro-step waits for its slices.
        self._patience_s: float | None = 0.0
        # Whether the planner's thread still works.
        self._can_slice = True

    def micro_step(
        self,
        index: int,
        *,
        positions: torch.Tensor | None = None,
        sequence_hashes: Array | None = None,
        may_deviate: bool = False,
    ) -> MicroStep:
        """A micro-step of the planned step: a context for every forward of its tokens.

        Not a collective, but entering it is. Micro-steps may be entered in any order, any number of times (recompute,
        then update; each pipeline chunk), one at a time; their backwards need no context. Layouts are computed once if
        the same object is entered again, or `positions` is None.

        Args:
            index: the micro-step, 0 .. M-1.
            positions: `[n]` int64, distinct rows of this rank's n planned tokens among the rows that the layers are
                given, if there are more (padding). The output of the other rows is zero.
            sequence_hashes: `hash_tokens` of this rank's sequences in the batch, in plan order. If they differ from the
                planned ones on any rank, the micro-step runs on live routing on all ranks.
            may_deviate: this rank may call layers with other ids than their `route` returned. Rows with an expert that
                was recorded for their token are computed as planned, others at the home of their expert;
                `max_rows_per_rank` and `exact` hold for the former. If any rank says so, all ranks exchange numbers of
                rows in each layer, for which the host waits. Layers that checkpointing recomputes need the ids of
                their forward again.

        Raises:
            RuntimeError: if there is no plan; when it is entered, if another micro-step is open.
            InputError: when it is entered, on all ranks, if a rank's index is not in the plan, or its positions have a
                row twice.
        """
        step = self._need_step("micro_step()")
        matches = step.problem(index) is None and step.matches_plan(index, sequence_hashes)
        known = step.micro_steps.get(index)
        if known is not None and matches and known.positions is positions and known.may_deviate == may_deviate:
            return known
        run = partial(self._running, step, matches, _problem_of(positions))
        micro_step = MicroStep(index, positions, partial(self._bind, step), run, may_deviate=may_deviate)
        if matches:
            step.micro_steps[index] = micro_step
        return micro_step

    @property
    def step_plan(self) -> StepPlan:
        """The last applied plan of this rank's expert-parallel group; waits for all of its replicas.

        Raises:
            RuntimeError: if there is no plan.
        """
        return self._need_step("step_plan").whole_plan

    @property
    def rank_loads(self) -> Array:
        """Tokens `[M, L, R]` int64 that each rank computes in the planned step, if the plan is executed.

        Raises:
            RuntimeError: if there is no plan.
        """
        step = self._need_step("rank_loads")
        return step.whole_plan.rank_loads(step.load.of_group)

    def memory(self) -> RankMemory:
        """Memory of this rank, by owner, now. Not a collective."""
        return self._experts.memory(0 if self._step is None else self._step.program_bytes)

    def live_micro_step(self, *, positions: torch.Tensor | None = None) -> MicroStep:
        """A micro-step without plan or recorded routing. In mode `live` its layers are balanced, as `policy` says.

        Args:
            positions: `[n]` int64, rows of this rank's tokens among the rows that the layers are given, which keeps
                padding out of the experts; all rows by default.
        """
        run = partial(self._running, None, True, _problem_of(positions))
        return MicroStep(-1, positions, partial(self._bind, None), run)

    def _end_step(self) -> int:
        """End the last step, before another plan or balanced live micro-steps. Returns the number of what follows."""
        self._calls.backward.end_plan()
        self._live = None
        slices = None if self._step is None else self._step.slices
        if slices is not None and not slices.end(self.settings.patience_s(PATIENCE_S)) and self._can_slice:
            self._can_slice = False
            logging.getLogger("trimtab").warning(
                "the planner's thread does not end; plans are made before their step from now on"
            )
        if self._step is not None:
            self._step.drop_programs()
        self._step = None
        self._plans += 1
        return self._plans

    def _drop_step(self) -> None:
        """End the present step, with its threads and device memory."""
        self._end_step()
        self._feedback.begin(None)
        self._calls.is_planned = False
        for name in ("_programs_thread", "_uploads"):
            vars(self).pop(name, None)

    def _need_step(self, what: str) -> RunningStep:
        """The step. Raises RuntimeError if there is none."""
        if self._step is None:
            raise RuntimeError(f"{what} needs a planned step; call plan() or apply_plan() first")
        return self._step

    def _prepare_live(self) -> None:
        """Let live micro-steps be balanced, if the mode says so. Collective when it begins."""
        if self.settings.mode != "live":
            self._live = None
        elif self._live is None:
            settings, experts = self.settings, self._experts
            slots = settings.slot_numbers[0]
            cluster = ClusterSpec(self.topology.num_ranks, self.topology.ranks_per_node, slots)
            number = self._end_step()
            # Nothing is read in other ranks' memory if there are no replicas.
            by_messages = settings.paths == "message" or settings.policy == "off" or slots == 0
            self._live = LiveBalancer(settings.policy, experts.layers, settings.plan_settings.limits(cluster))
            with torch.inference_mode(False):
                experts.drain()
                experts.transfers.prepare_live(self._live, number, slots, by_messages=by_messages)
            experts.changed = True

    def _bind(
        self, step: RunningStep | None, micro_step: MicroStep, matches_plan: bool, has_slices: bool, may_deviate: bool
    ) -> BoundRoutes:
        if step is None and self._live is not None:
            live = LiveMicroStep(self._live)
            return BoundRoutes(micro_step, None, self._experts.transfers, self._plans, live)
        if step is None or not matches_plan:
            return BoundRoutes(micro_step)
        return step.bind(micro_step, has_slices, may_deviate)

    @cached_property
    def _programs_thread(self) -> CallThread:
        return CallThread("trimtab-programs")

    @cached_property
    def _uploads(self) -> BackgroundCopies | None:
        """Copies programs to the device; None if that is the host."""
        device = self._experts.device
        return BackgroundCopies(device) if streams.has_streams(device) else None

    @contextmanager
    def _running(
        self, step: RunningStep | None, matches: bool, problem: Exception | None, micro_step: MicroStep
    ) -> Iterator[None]:
        """The context of a micro-step: agree with the other ranks, refresh changed copies, bind routes.

        Args:
            step: the step of the micro-step; None for a live one.
            matches: whether this rank has the planned sequences.
            problem: why the micro-step can't run on this rank; raised on all ranks.
        """
        index, recorder = micro_step.index, self.counters.recorder
        if step is not None and (missing := step.problem(index)) is not None:
            problem, index = missing, -1
        if step is not None and step.numbering != self.numbering:
            problem = RuntimeError(f"micro-step {index} is planned for weights of another numbering; plan it again")
        if step is not None and step is not self._step:
            problem = RuntimeError(f"micro-step {index} is of an earlier plan; call micro_step() again")
        all_match, may_deviate = self._agree_on_micro_step(
            step, index, matches and problem is None, micro_step.may_deviate, problem
        )
        matches_plan = all_match and step is not None
        has_slices = step is None or step.has_slices(index)
        routes_now = partial(micro_step.routes, matches_plan, has_slices, may_deviate)
        self._calls.backward.open(index, routes_now)
        try:
            if step is not None and matches_plan:
                step.start_programs(index, has_slices, may_deviate, self._programs_thread)
            if step is not None:
                self._feedback.enter(index)
            routes = self._calls.current = routes_now()
            with nullcontext() if recorder is None or step is None else recorder.micro_step(index):
                self.counters.unplanned_micro_steps += step is not None and not routes.is_planned
                if routes.transfers is not None:
                    routes.transfers.ring.begin(index if routes.live is None else routes.live.balancer.last)
                yield
                if routes.transfers is not None:
                    # Sends of live calls are by call, and none is of a later micro-step.
                    routes.transfers.ring.end(index if routes.live is None else None)
        finally:
            self._calls.current = None
            self._calls.backward.close()
            self._feedback.mark()

    def _agree_on_micro_step(
        self, step: RunningStep | None, index: int, matches: bool, may_deviate: bool, problem: Exception | None
    ) -> tuple[bool, bool]:
        """Agree on the micro-step with the other ranks, and refresh copies of changed weights.

        Returns:
            Whether all ranks have the planned sequences, and whether any rank's rows may deviate from the plan.
        """
        self._calls.require_between_micro_steps(A_MICRO_STEP)
        if torch.is_grad_enabled():
            self._calls.accumulation.begin_forward()
        changed, trained, broken = self._experts.transfers.watch.compare(self._experts.changed)
        slices = None if step is None or problem is not None else step.slices
        if slices is not None and not slices.is_agreed(index):
            self.counters.planning_waited_s += slices.wait(index, self._patience_s)
        # Groups that refresh copies together begin a micro-step together.
        together = self._experts.are_copies and self.topology.groups > 1
        values_RV = self._lockstep.agree(
            LIVE_MICRO_STEP if step is None else MICRO_STEP, micro_step=index,
            values=(changed, matches, may_deviate, *(slices.to_compare() if slices is not None else ())),
            must_match={
                "gradients enabled": torch.is_grad_enabled(), "trained expert tensors": trained,
                # Choices in live micro-steps depend on them. Those of a plan were compared with it.
                **(self.settings.shared if step is None else step.tokens_to_match(index) if problem is None else {}),
            },
            problem=problem or broken or self._experts.optimizers.untrained(), all_data_ranks=together,
        )  # fmt: skip
        must_refresh = values_RV[:, 0].any()
        if together:
            values_RV = values_RV.reshape(self.topology.groups, self.topology.num_ranks, -1)[self.topology.group]
        if slices is not None:
            slices.agree(values_RV[:, 3:], index)
            self.counters.late_micro_steps += not slices.is_agreed(index)
        if step is None:
            self._prepare_live()
        if must_refresh or self._experts.changed:
            self._experts.refresh()
        return bool(values_RV[:, 1].all()), bool(values_RV[:, 2].any())


def _problem_of(positions: torch.Tensor | None) -> InputError | None:
    """The error of positions of which one occurs twice. On a device, where the host does not wait, the device fails."""
    if positions is None:
        return None
    is_distinct = (positions.sort().values.diff() != 0).all()
    if positions.device.type != "cpu":
        torch._assert_async(is_distinct)
        return None
    return None if is_distinct else InputError("positions of a micro-step have a row twice; they should be distinct")
