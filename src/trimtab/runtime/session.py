"""`Session`: the public face of the runtime. It plans a step, binds micro-steps, and brings gradients home."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trimtab.cluster import ClusterSpec
from trimtab.errors import InputError
from trimtab.planner import Placement, Schedule, StepPlan, Workload
from trimtab.planner.workload import max_over_mean
from trimtab.runtime.accumulation import Accumulation
from trimtab.runtime.backward import Backward
from trimtab.runtime.checks import at_least, finite, one_of
from trimtab.runtime.counters import Counters
from trimtab.runtime.dispatch import Dispatcher, RowDispatcher
from trimtab.runtime.experts import ApplyExperts
from trimtab.runtime.gradients import clip_gradients, dense_parameters, describe, sum_gradients, zero_missing
from trimtab.runtime.home_experts import ExpertTensor, HomeExperts, ReadParameters, check_parameters, read_tensors
from trimtab.runtime.instance import LayerCalls
from trimtab.runtime.layer import ExpertLayer, HomeWeights
from trimtab.runtime.lockstep import (
    ADOPT,
    CLIP,
    FINISH,
    LIVE_MICRO_STEP,
    LOGICAL,
    MICRO_STEP,
    MOVE,
    PLAN,
    PLAN_SEQUENCES,
    STEP,
    Lockstep,
    digest,
)
from trimtab.runtime.logical import LogicalState
from trimtab.runtime.micro_step import BoundRoutes, MicroStep, RunningStep
from trimtab.runtime.moving import check_movable, move_experts, state_to_move
from trimtab.runtime.optimizer_watch import OptimizerWatch
from trimtab.runtime.planning import (
    Mode,
    Paths,
    PlannedStep,
    PlanReport,
    SessionPlanner,
    check_fits,
    check_model,
    trace_of_micro_steps,
)
from trimtab.runtime.recorder import REFRESHING, SUMMING, Recorder
from trimtab.runtime.topology import Topology
from trimtab.runtime.transfers import Transfers
from trimtab.trace import RoutingTrace
from trimtab.trace.routing import Array

# Environment variable: 1 turns on `verify_weights` where a session isn't told.
VERIFY_WEIGHTS = "TRIMTAB_VERIFY_WEIGHTS"


class Session:
    """Balanced expert parallelism over the ranks of a process group.

    Add every MoE layer once, and say which optimizers train them. Then, for every step: `plan`, and around forward and
    backward of each micro-step `micro_step`; before the optimizer steps, `finish_gradients`. Outside a micro-step the
    layers work as ordinary expert parallelism on the router's live choice. All methods are collective unless they say
    otherwise.

    Args:
        num_experts: experts of a layer, E.
        group: the data ranks; all ranks by default.
        groups: expert-parallel groups among them, each of neighbouring ranks that hold all experts together.
        expert_group: the ranks that hold all experts together, as a framework's own process group of any ranks; in
            place of `group`, `groups` and `ranks_per_node`. The rank at position i of R in it is home to experts
            i * E / R up to (i + 1) * E / R at the start. Making the session is a collective over the data ranks, which
            are the ranks of all the expert-parallel groups that `expert_dp_group` joins.
        expert_dp_group: with `expert_group`, the process group of the ranks that hold the same experts as this one,
            each at the place of its expert-parallel group; None for one expert-parallel group.
        nodes: with `expert_group`, the node number of each of its ranks, in its order; all on one node by default.
        mode: `plan` balances; `static` is expert parallelism on contiguous homes without replicas, on the planned path;
            `shadow` plans and reports, but runs as `off`; `off` replays routing in ordinary expert parallelism.
        slots_per_rank: replicas of one layer that a rank has room for.
        ring_layers: layers that replicas are kept for at a time, one in use and the others ahead of it.
        ranks_per_node: neighbouring ranks that share a node; all of a group by default.
        paths: how replicas' weights may come: from their homes (`peer`), from host memory (`host`), or both.
        mirror_bytes: most host memory of a node that mirrors experts; no bound by default.
        least_gain: a plan that is predicted to save a smaller part of the expert time is not carried out.
        rates: how fast ranks compute and links are, which plans weigh; an H100 cluster, or a CPU machine, by default.
            Its sizes don't count.
        verify_weights: check as each micro-step begins, on sampled elements of every expert, that no weight changed
            in a way that the session does not notice. By default in mode `shadow`, and where the environment has
            `TRIMTAB_VERIFY_WEIGHTS=1`. On CUDA the host then waits for the device.
        timeout: after which a rank that waits for others gives up; that of `group` by default.

    Raises:
        InputError: if the ranks don't divide the experts, the groups the ranks, or the nodes a group; if the groups of
            a framework don't line up, or this rank is not in them; or an argument is out of its range.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        group: dist.ProcessGroup | None = None,
        groups: int = 1,
        expert_group: dist.ProcessGroup | None = None,
        expert_dp_group: dist.ProcessGroup | None = None,
        nodes: Sequence[int] | None = None,
        mode: Mode = "plan",
        slots_per_rank: int = 2,
        ring_layers: int = 3,
        ranks_per_node: int | None = None,
        paths: Paths = "both",
        mirror_bytes: int | None = None,
        least_gain: float = 0.005,
        rates: ClusterSpec | None = None,
        verify_weights: bool | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.num_experts = at_least("num_experts", num_experts, 1)
        self.mode = mode
        self.paths = paths
        self.slots_per_rank = at_least("slots_per_rank", slots_per_rank, 0)
        self.ring_layers = at_least("ring_layers", ring_layers, 2)
        self.mirror_bytes = None if mirror_bytes is None else at_least("mirror_bytes", mirror_bytes, 0)
        self.least_gain = finite("least_gain", least_gain)
        self.rates = rates
        if verify_weights is None:
            verify_weights = mode == "shadow" or os.environ.get(VERIFY_WEIGHTS) == "1"
        self.verify_weights = verify_weights
        if expert_group is None:
            if expert_dp_group is not None or nodes is not None:
                raise InputError(
                    "expert_dp_group and nodes go with expert_group; for groups that the session makes, use groups and "
                    "ranks_per_node"
                )
            self.topology = Topology.build(group, at_least("groups", groups, 1), ranks_per_node, timeout)
        else:
            if group is not None or groups != 1 or ranks_per_node is not None:
                raise InputError(
                    "group, groups and ranks_per_node are for groups that the session makes; with expert_group, use "
                    "expert_dp_group for several expert-parallel groups and nodes for several nodes"
                )
            self.topology = Topology.given(expert_group, expert_dp_group, nodes, timeout)
        self.layers: list[ExpertLayer] = []
        self.homes: list[HomeExperts] = []
        self.unplanned_micro_steps = 0
        self._initial_E: Array = self.topology.initial_placement(1, num_experts).home[0]
        self._lockstep = Lockstep(self.topology, most_votes=max(num_experts, 2))
        self.counters = Counters(lockstep=self._lockstep)
        self._step: RunningStep | None = None
        self._plans = 0
        self._backward = Backward(self._complete_gradients, self._drop_gradients)
        self._accumulation = Accumulation(self._expert_parameters)
        self._calls = LayerCalls(
            self.topology, self._lockstep, self.counters, self._backward, self._accumulation, self.slots_per_rank
        )
        self._weights_changed = True
        self._optimizer_watch = OptimizerWatch(self._expert_parameters, self._before_step, self._after_step)

    @property
    def mode(self) -> Mode:
        """What is done with a plan; see `Session`."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode = cast(Mode, one_of("mode", mode, get_args(Mode)))

    @property
    def paths(self) -> Paths:
        """How replicas' weights may come; see `Session`."""
        return self._paths

    @paths.setter
    def paths(self, paths: Paths) -> None:
        self._paths = cast(Paths, one_of("paths", paths, get_args(Paths)))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that train the experts; see `train_with`."""
        return self._optimizer_watch.registered

    @property
    def rank(self) -> int:
        """This rank's number in its expert-parallel group."""
        return self.topology.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of an expert-parallel group, R."""
        return self.topology.num_ranks

    @property
    def placement(self) -> Placement:
        """The homes of all experts now."""
        return Placement(np.stack([layer.home_E for layer in self.homes]))

    @property
    def home_experts(self) -> Array:
        """Logical ids `[E / R]` of the experts that this rank is home to as a layer is added, rising."""
        return np.flatnonzero(self._initial_E == self.rank)

    def add_layer(
        self,
        parameters: Sequence[ExpertTensor] | ReadParameters,
        apply: ApplyExperts,
        *,
        compute_dtype: torch.dtype | None = None,
        weights: HomeWeights | None = None,
        dispatcher: Dispatcher | None = None,
    ) -> ExpertLayer:
        """Add the next MoE layer. Not a collective.

        Args:
            parameters: the tensors of this rank's `home_experts`, each a stacked Parameter `[E / R, ...]` or a sequence
                of E / R Parameters `[...]` in the order of `home_experts`; or a function that returns them, which is
                called whenever they are needed. They stay the caller's: train them with an elementwise optimizer, and
                keep them out of FSDP. Their memory may be replaced at any time outside micro-steps. Sequences are
                computed on as they are: nothing stacks them.
            apply: computes experts on grouped rows; see `gated_experts`.
            compute_dtype: what to compute in, if not in the parameters' own dtype (float32 masters, bfloat16 compute).
            weights: gives the same experts `[E / R, ...]`, in the graph, each time that the layer runs, if somebody
                else gathers their gradients and trains them, as FSDP does. Those gradients are then complete,
                replicas' included, when the layer's backward ends; `parameters` are only read, and homes stay.
            dispatcher: brings rows to physical experts and back; our own by default.

        Raises:
            InputError: if a tensor does not hold E / R experts, they differ in shape from other layers' or within a
                sequence, another layer has one of them, too, or there are sequences together with `weights`.
        """
        index = len(self.layers)
        read: ReadParameters = parameters if callable(parameters) else partial(_same, parameters)
        tensors = read_tensors(read)
        check_parameters(index, tensors, self.homes, self.home_experts)
        if weights is not None and not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise InputError(f"MoE layer {index}: experts that others train (`weights`) should be stacked tensors")
        homes = HomeExperts(
            index, read, rank=self.rank, home_E=self._initial_E, compute_dtype=compute_dtype,
            joins_in_backward=weights is not None,
        )  # fmt: skip
        if self.layers and _expert_shapes(homes) != _expert_shapes(self.homes[0]):
            raise InputError(
                f"MoE layer {index} has experts of {_expert_shapes(homes)}, layer 0 {_expert_shapes(self.homes[0])}. "
                "All layers share the room for replicas, so their experts should be alike"
            )
        layer = ExpertLayer(self._calls, homes, apply, weights, dispatcher or RowDispatcher())
        self.layers.append(layer)
        self.homes.append(homes)
        return layer

    def replicated_parameters(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """The model's parameters that every rank holds: all but the experts. Not a collective.

        Raises:
            InputError: if the model does not have the session's experts.
        """
        experts = {id(parameter) for layer in self.layers for parameter in layer.parameters}
        others = [parameter for parameter in model.parameters() if id(parameter) not in experts]
        found = len(list(model.parameters())) - len(others)
        if 0 < found < len(experts) or (not found and any(not layer.joins_in_backward for layer in self.homes)):
            raise InputError(
                f"the model has {found} of the session's {len(experts)} expert tensors; if others have taken their "
                "place, as load_state_dict(assign=True) does, add layers with a function that reads them"
            )
        return others

    def train_with(self, *optimizers: torch.optim.Optimizer) -> None:
        """Say which optimizers train the experts. Not a collective.

        Experts then move between steps, with their rows of optimizer state, where a plan wants them. Without this,
        homes stay where they are.

        Raises:
            InputError: if a layer was added with `weights`.
        """
        self.need_own_experts("move experts with their optimizer state")
        self._optimizer_watch.registered = list(optimizers)

    def move(self, placement: Placement) -> None:
        """Bring all experts to given homes, with their rows of optimizer state; between steps. Plans do it themselves.

        Raises:
            InputError: if the homes are not even, an optimizer keeps state that can't move, or a layer was added with
                `weights`.
            RuntimeError: if gradients wait for an optimizer step.
        """
        self._calls.need_to_be_between("move")
        problem = _problem(self._check_move, placement)
        same = {"homes": digest(placement.home)} | self._state_to_move(placement, problem)
        self._lockstep.agree(MOVE, same=same, problem=problem)
        if self._step is not None and not np.array_equal(placement.home, self.placement.home):
            self._step.has_moved = True
        self._move(placement)

    def _check_move(self, placement: Placement) -> None:
        if not np.array_equal(placement.home, self.placement.home):
            self.need_own_experts("move experts")
        placement.check(len(self.layers), self.num_experts, self.num_ranks)
        check_movable(self.homes, placement.home, self.optimizers)

    def _state_to_move(self, placement: Placement, problem: Exception | None) -> dict[str, object]:
        """What the ranks have to agree on to move experts."""
        return {} if problem else state_to_move(self.homes, placement.home, self.optimizers)

    def _move(self, placement: Placement) -> None:
        self.transfers.ring.drain()
        self.counters.moved_bytes += move_experts(self.homes, placement.home, self.optimizers, self.topology)
        self._weights_changed = True

    def plan(self, trace: RoutingTrace, schedule: Schedule) -> PlanReport:
        """Plan a step whose schedule is given, and take the plan over.

        Args:
            trace: this rank's sequences, as `schedule.sequences_of(rank)` orders them.
            schedule: the step's, on all data ranks, the same on every rank.

        Raises:
            InputError: if trace, schedule and layers don't fit together.
        """
        self._calls.need_to_be_between("plan")
        rank, ranks = self.topology.data_rank, self.topology.num_data_ranks
        fits = _problem(check_fits, trace, schedule, rank, ranks, self._shape)
        places = digest(schedule.micro_step, schedule.rank, schedule.mini_batch_of_micro_step)
        same = {"number of micro-steps": schedule.num_micro_steps, "schedule": places, **self._settings}
        self._meet(PLAN, same, fits)
        return self._plan(trace, schedule)

    def _plan(self, trace: RoutingTrace, schedule: Schedule, *, may_move: bool = True) -> PlanReport:
        may_move = may_move and bool(self.optimizers)
        planned = self._planner(trace).for_schedule(trace, schedule, self.placement, self.mode, may_move=may_move)
        return self.adopt(planned, trace)

    def plan_micro_steps(self, rows: Sequence[npt.ArrayLike]) -> PlanReport:
        """Plan a step of micro-steps that are made already, and take the plan over.

        Args:
            rows: for every micro-step the integer ids `[n, L, K]` that were recorded for this rank's n tokens in the
                session's L layers, whatever the tokens are: packed batches, slices of sequences, one pipeline stage's
                layers. Negative where a token's route in a layer is unknown, all K of them. All ranks have as many
                micro-steps, each with any number of tokens.

        Raises:
            InputError: if ids and layers don't fit together, or ranks differ in the number of micro-steps.
        """
        self._calls.need_to_be_between("plan_micro_steps")
        trace, problem = None, None
        try:
            trace = trace_of_micro_steps(rows, *self._shape)
        except InputError as error:
            problem = error
        ranks, same = self.topology.num_data_ranks, {"number of micro-steps": len(rows), **self._settings}
        same["top_k"] = None if trace is None else trace.top_k
        self._meet(PLAN, same, problem)
        assert trace is not None
        schedule = Schedule(
            micro_step=np.repeat(np.arange(len(rows), dtype=np.int32), ranks),
            rank=np.tile(np.arange(ranks, dtype=np.int32), len(rows)),
            mini_batch_of_micro_step=np.zeros(len(rows), np.int32),
            num_ranks=ranks,
        )
        return self._plan(trace, schedule)

    def complete_plan(self) -> PlanReport:
        """Plan the step again where it has unknown routes, with those that its tokens took since.

        The routes are those of micro-steps that ran without gradients, as the recompute of log-probabilities does. The
        update then needs no exchange of counts for them. Homes stay as they are.

        Raises:
            RuntimeError: if there is no step that was planned here.
        """
        self._calls.need_to_be_between("complete_plan")
        step = self._step
        if step is None or step.schedule is None:
            raise RuntimeError("complete_plan() needs a step that this session has planned")
        self._meet(PLAN, self._settings, None)
        return self._plan(step.completed_trace, step.schedule, may_move=False)

    def plan_sequences(self, trace: RoutingTrace, *, token_budget: int, mini_batch: Array | None = None) -> PlannedStep:
        """Plan a step with its schedule, from the sequences that each rank happens to have.

        Bring every sequence to the rank that `schedule` of the result gives it, then `adopt` the result.

        Args:
            trace: this rank's sequences. In the schedule, those of all ranks follow one another in rank order.
            token_budget: most tokens of a rank in a micro-step.
            mini_batch: `[S]` mini-batch of every rank's sequences, the same on every rank; all in one by default.

        Raises:
            InputError: if the trace is not of this model, or a sequence exceeds the budget.
        """
        self._calls.need_to_be_between("plan_sequences")
        batches = None if mini_batch is None else digest(np.asarray(mini_batch, np.int64))
        same = {"token_budget": token_budget, "mini_batch": batches, **self._settings}
        self._meet(PLAN_SEQUENCES, same, _problem(check_model, trace, self._shape))
        return self._planner(trace).for_sequences(
            trace, self.placement, self.mode,
            may_move=bool(self.optimizers), token_budget=token_budget, mini_batch=mini_batch,
        )  # fmt: skip

    def adopt(self, planned: PlannedStep, trace: RoutingTrace) -> PlanReport:
        """Take over a plan that `plan_sequences` made. Experts move to the homes that it wants.

        Args:
            planned: the plan.
            trace: this rank's sequences, as `planned.schedule.sequences_of(rank)` orders them.

        Raises:
            InputError: as `adopt_plan`.
        """
        workload = self._meet_over(planned.plan, trace, planned.workload)
        return self._take_over(
            planned.plan, workload, trace, planned.schedule, max_vio_before=planned.max_vio_before,
            predicted_gain=planned.predicted_gain, planning_s=planned.planning_s,
        )  # fmt: skip

    def adopt_plan(self, plan: StepPlan, trace: RoutingTrace) -> PlanReport:
        """Take over a plan that was made elsewhere. Experts move to the homes that it wants.

        Args:
            plan: for this rank's expert-parallel group.
            trace: this rank's sequences, as `plan.schedule.sequences_of(rank)` orders them.

        Raises:
            InputError: if the ranks hold different plans, a plan breaks one of its invariants (see `StepPlan.check`),
                has more slots than this session, or moves homes although no optimizer is known.
        """
        workload = self._meet_over(plan, trace, None)
        before = float(max_over_mean(workload.home_loads(self.placement.home)).mean() - 1)
        return self._take_over(plan, workload, trace, None, max_vio_before=before)

    def _meet_over(self, plan: StepPlan, trace: RoutingTrace, workload: Workload | None) -> Workload:
        """All ranks adopt the same plan, which is right for what they have; the load of the group."""
        self._calls.need_to_be_between("adopt")
        problem = _problem(self._check_plan, plan, trace)
        same = {"the plan": plan.hash, **self._settings}
        if self._num_moved(plan) and self.mode in ("plan", "static"):
            same |= self._state_to_move(plan.placement, problem)
        self._lockstep.agree(ADOPT, same=same, problem=problem)
        if workload is None:
            schedule = self._data_schedule(plan)
            workload = self._planner(trace).gather_workloads(trace, schedule)[self.topology.group]
        plan.check(workload)
        return workload

    def _take_over(
        self,
        plan: StepPlan,
        workload: Workload,
        trace: RoutingTrace,
        schedule: Schedule | None,
        *,
        max_vio_before: float,
        predicted_gain: float = 0.0,
        planning_s: float = 0.0,
    ) -> PlanReport:
        """Make ready for the micro-steps of a plan that is right: experts at their homes, room for what it needs."""
        runs = self.mode in ("plan", "static")
        before, after = workload.home_loads(self.placement.home), plan.rank_loads(workload)
        moved = self._num_moved(plan)
        start = time.perf_counter()
        self._backward.forget()
        self._plans += 1
        step = RunningStep(plan, workload, trace, schedule, runs, self._plans, self.slots_per_rank)
        if runs:
            with torch.inference_mode(False):
                self._move(plan.placement)
                self.transfers.prepare(plan, step.replicas_of, self._plans)
        self._weights_changed = True
        self._calls.is_planned = True
        self._step = step
        return PlanReport(
            planning_s=planning_s,
            moving_s=time.perf_counter() - start,
            predicted_gain=predicted_gain,
            max_vio_before=max_vio_before,
            max_vio_after=float(max_over_mean(after).mean() - 1),
            replicas=plan.num_replicas,
            homes_moved=moved,
            micro_steps=plan.num_micro_steps,
            unplanned_micro_steps=0 if runs else plan.num_micro_steps,
            mixed_instances=int(np.count_nonzero(plan.mixed_ML)),
            peak_rows_before=int(before.max(initial=0)),
            peak_rows_after=int(after.max(initial=0)),
            pool_bytes=self.transfers.pool_bytes,
            mirror_bytes=self.transfers.mirror_bytes,
            free_bytes=_free_bytes(self._device),
        )

    def micro_step(
        self,
        index: int,
        *,
        positions: torch.Tensor | None = None,
        sequence_hashes: Array | None = None,
    ) -> MicroStep:
        """A micro-step of the planned step, to be entered around every forward of its tokens: `with` it.

        Not a collective, but entering it is. Micro-steps may be entered in any order, any number of times (recompute,
        then update; each pipeline chunk), one at a time; their backwards need no context. Enter the same object again,
        or leave `positions` out, and what its layers need is made once.

        Args:
            index: the micro-step, 0 .. M-1.
            positions: `[n]` int64, where this rank's n planned tokens stand among the rows that the layers are given,
                if those hold more (padding). The others get zero from the experts.
            sequence_hashes: `hash_tokens` of this rank's sequences in the batch, in plan order. If they are not those
                that were planned, on any rank, the micro-step runs unplanned on live routing on all ranks.

        Raises:
            RuntimeError: if there is no plan; as it is entered, if another micro-step is open.
        """
        if self._step is None:
            raise RuntimeError("micro_step() needs a planned step")
        step = self._step
        knows = step.problem(index) is None and step.knows(index, sequence_hashes, self.rank)
        known = step.micro_steps.get(index)
        if known is not None and knows and known.positions is positions:
            return known
        made = MicroStep(index, positions, partial(self._bind, step), partial(self._running, step, knows))
        step.micro_steps[index] = made
        return made

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Note what this rank does, and when, as long as this is open. To compare ranks, let them begin together."""
        recorder = self.counters.recorder = Recorder(self._device)
        try:
            yield recorder
        finally:
            self.counters.recorder = None

    @property
    def step_plan(self) -> StepPlan:
        """The plan of this rank's expert-parallel group that was applied last.

        Raises:
            RuntimeError: if there is no plan.
        """
        if self._step is None:
            raise RuntimeError("there is no planned step; call plan() or adopt() first")
        return self._step.plan

    @property
    def rank_loads(self) -> Array:
        """Tokens `[M, L, R]` int64 that each rank computes in the planned step, if the plan is carried out.

        Raises:
            RuntimeError: if there is no plan.
        """
        if self._step is None:
            raise RuntimeError("rank_loads needs a planned step")
        return self.step_plan.rank_loads(self._step.workload)

    def live_micro_step(self, *, positions: torch.Tensor) -> MicroStep:
        """A micro-step that nothing is known of, to leave padding out of the experts. Needs no plan.

        Args:
            positions: `[n]` int64, where this rank's tokens stand among the rows that the layers are given.
        """
        return MicroStep(-1, positions, BoundRoutes, self._running_live)

    def finish_gradients(self, replicated: Iterable[torch.nn.Parameter] = ()) -> None:
        """Complete the gradients of all micro-steps so far; call it before clipping and the optimizer step.

        Replica gradients still under way are added to their home experts. Gradients of experts are summed over the
        expert-parallel groups, those of `replicated` parameters, which every rank holds, over all ranks. Those of
        layers that were added with `weights` are left to whoever trains them.

        A gradient that no rank has stays None.

        Raises:
            InputError: if `replicated` has experts of the session.
            RuntimeError: if it has summed these gradients already, and they were not zeroed since; within a backward.
            RanksDisagreeError: if the ranks are at different places in their step, or give different parameters.
        """
        self._calls.need_to_be_outside("finish_gradients")
        dense = dense_parameters(replicated, self._expert_parameters())
        experts = [parameter for parameter in self._expert_parameters() if parameter.requires_grad]
        summed = [*dense, *(experts if self.topology.expert_dp_group is not None else ())]
        same = {"replicated parameters": (len(dense), describe(dense, with_values=self.verify_weights))}
        self._meet(FINISH, same, self._accumulation.problem(summed))
        with self._noted(SUMMING):
            if self._calls.transfers is not None:
                self._calls.transfers.ring.drain()
            zero_missing([*dense, *experts], self.topology.control)
            if self.topology.expert_dp_group is not None:
                sum_gradients(experts, self.topology.expert_dp_group)
            sum_gradients(dense, self.topology.data)
        self._accumulation.finish(summed)
        self._weights_changed = True

    def clip_gradients(self, replicated: Iterable[torch.nn.Parameter], max_norm: float) -> float:
        """Clip the gradients of replicated parameters and of all ranks' experts by their joint norm, and return it.

        Raises:
            InputError: if a layer was added with `weights`, or `replicated` has experts of the session.
            RuntimeError: if gradients are not finished.
        """
        self.need_own_experts("clip their gradients")
        dense = dense_parameters(replicated, self._expert_parameters())
        problem = RuntimeError("clip_gradients() needs complete gradients; call finish_gradients() first")
        same = {"max_norm": max_norm, "replicated parameters": len(dense)}
        self._meet(CLIP, same, problem if self._accumulation.is_open else None)
        return float(clip_gradients(dense, self._expert_parameters(), max_norm, self.topology.experts))

    def weights_changed(self) -> None:
        """Say that parameters were changed other than by an optimizer step after `finish_gradients`, or by loading them
        before `plan`. Not a collective, but every rank should say it."""
        self._weights_changed = True

    def take_metrics(self) -> dict[str, float]:
        """This rank's counters since they were last taken. Not a collective.

        `transfer/exposed_s` are seconds that compute waited for replicas or their gradients, `transfer/cpu_s` CPU time
        of the thread that copies, `transfer/refresh_s` what bringing changed weights into mirrors took,
        `transfer/*_bytes` what this rank sent or copied, `moe/unplanned_micro_steps` those that ran without a plan,
        `moe/mixed_instances` calls in planned micro-steps that had unknown rows, whose numbers the ranks exchanged,
        `moe/live_layer_calls` calls of layers outside any micro-step while there was a plan, which follow the router's
        choice, `moe/abandoned_backwards` those that failed while gradients of replicas were under way.
        """
        metrics = self.counters.metrics()
        transfers = self._calls.transfers
        metrics["transfer/cpu_s"] = 0.0 if transfers is None else transfers.ring.take_cpu_s()
        metrics["moe/unplanned_micro_steps"] = self.unplanned_micro_steps
        self.counters.clear()
        self.unplanned_micro_steps = 0
        return metrics

    def logical_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's state with the experts of all ranks, in logical order, on every rank.

        This is what leaves the runtime: for checkpoints, and for the weights of a rollout engine.

        Raises:
            InputError: if a layer was added with `weights`.
        """
        self._lockstep.agree(LOGICAL)
        return dict(self.logical.weights(model, everywhere=True))

    @property
    def logical(self) -> LogicalState:
        """Weights and optimizer state in logical expert order, tensor by tensor, and the way back.

        Raises:
            InputError: if a layer was added with `weights`.
        """
        self.need_own_experts("collect or load them")
        return LogicalState(self.homes, self.topology)

    def close(self) -> None:
        """Give up threads and shared memory. Not needed before a process ends."""
        if self._calls.transfers is not None:
            self._calls.transfers.ring.close()

    # What stands behind it.

    @property
    def transfers(self) -> Transfers:
        """The ways of replicas, made when all layers are there."""
        if self._calls.transfers is None:
            self._calls.transfers = Transfers(
                self.topology,
                self.homes,
                slots=self.slots_per_rank,
                ring_layers=self.ring_layers,
                counters=self.counters,
                verify_weights=self.verify_weights,
            )
        return self._calls.transfers

    def need_own_experts(self, purpose: str) -> None:
        """Raises InputError if a layer was added with `weights`, since others then train its experts."""
        if any(layer.joins_in_backward for layer in self.homes):
            raise InputError(
                f"the session can't {purpose}: its experts belong to the framework that shards and trains them "
                "(FSDP), which has its own ways to do that"
            )

    # How a step is planned and bound.

    def _noted(self, activity: int) -> AbstractContextManager[None]:
        """What is done within is this activity, if somebody wants to know."""
        recorder = self.counters.recorder
        return nullcontext() if recorder is None else recorder.during(activity)

    @property
    def _device(self) -> torch.device:
        return self.homes[0].device

    def _expert_parameters(self) -> list[torch.nn.Parameter]:
        """Those whose gradients gather in `.grad`."""
        return [p for layer in self.homes if not layer.joins_in_backward for p in layer.parameters]

    def _planner(self, trace: RoutingTrace) -> SessionPlanner:
        """What plans for this session as it is now."""
        return SessionPlanner.of(
            self.topology,
            self.homes,
            top_k=trace.top_k,
            slots=self.slots_per_rank,
            paths=self.paths,
            mirror_bytes=self.mirror_bytes,
            least_gain=self.least_gain,
            rates=self.rates,
        )

    def _data_schedule(self, plan: StepPlan) -> Schedule:
        """The plan's schedule as the ranks of its group count themselves among all data ranks."""
        first = self.topology.group * self.num_ranks
        return replace(plan.schedule, rank=plan.rank + first, num_ranks=self.topology.num_data_ranks)

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.layers), self.num_experts

    @property
    def _settings(self) -> dict[str, object]:
        """What all ranks should have been told alike, since plans depend on it."""
        names = ("mode", "paths", "slots_per_rank", "ring_layers", "mirror_bytes", "least_gain")
        first = self.homes[0]
        return {name: getattr(self, name) for name in names} | {
            "optimizers are known": bool(self.optimizers),
            "ranks_per_node": self.topology.ranks_per_node,
            "layers": len(self.homes),
            "experts": ([tuple(shape) for shape in first.expert_shapes], first.dtype),
        }

    def _meet(self, call: int, same: Mapping[str, object], problem: Exception | None) -> None:
        """All data ranks make this call; see `Lockstep.agree`."""
        self._lockstep.agree(call, same=same, problem=problem, everywhere=True)

    def _begin(self, call: int, index: int, knows: bool = True, problem: Exception | None = None) -> bool:
        """All ranks begin the same micro-step; bring changed weights to their copies. Do all know its sequences?"""
        self._calls.need_to_be_between("a micro-step")
        if torch.is_grad_enabled():
            self._accumulation.begin_forward()
        changed, trained, broken = self.transfers.watch.look(self._weights_changed)
        same = {"gradients enabled": torch.is_grad_enabled(), "trained expert tensors": trained}
        votes = (changed, knows)
        votes_RV = self._lockstep.agree(call, micro_step=index, same=same, votes=votes, problem=problem or broken)
        if votes_RV[:, 0].any():
            start = time.perf_counter()
            with self._noted(REFRESHING), torch.inference_mode(False):
                self.transfers.refresh()
            self.counters.refresh_s += time.perf_counter() - start
            self._weights_changed = False
        return bool(votes_RV[:, 1].all())

    def _bind(self, step: RunningStep, micro_step: MicroStep) -> BoundRoutes:
        if not micro_step.is_known:
            return BoundRoutes(micro_step)
        return step.bind(micro_step, self.homes, self.topology)

    @contextmanager
    def _running(self, step: RunningStep, knows: bool, micro_step: MicroStep) -> Iterator[None]:
        index, recorder = micro_step.index, self.counters.recorder
        problem = step.problem(index)
        if step is not self._step:
            problem = RuntimeError(f"micro-step {index} is of an earlier plan; get it from micro_step() anew")
        micro_step.is_known = self._begin(MICRO_STEP, index, knows and problem is None, problem)
        with self._opened(micro_step) as routes, nullcontext() if recorder is None else recorder.micro_step(index):
            self.unplanned_micro_steps += not routes.layouts
            if routes.layouts:
                self.transfers.ring.begin(index)
            yield
            self.transfers.ring.end(index)

    @contextmanager
    def _running_live(self, micro_step: MicroStep) -> Iterator[None]:
        self._begin(LIVE_MICRO_STEP, -1)
        with self._opened(micro_step):
            yield

    @contextmanager
    def _opened(self, micro_step: MicroStep) -> Iterator[BoundRoutes]:
        self._backward.open(micro_step)
        try:
            self._calls.current = micro_step.routes()
            yield self._calls.current
        finally:
            self._calls.current = None
            self._backward.close()

    def _before_step(self, holds_experts: bool) -> None:
        if self._calls.transfers is not None:
            self._calls.transfers.ring.complete()
        if not holds_experts:
            return
        if self.topology.expert_dp_group is not None and self._accumulation.is_open:
            raise RuntimeError(
                "an optimizer steps while gradients of experts are not summed over expert-parallel groups; call "
                "finish_gradients() first"
            )
        # A rank that skips a step, as a gradient scaler may, is found when the ranks meet again.
        self._lockstep.note(STEP)

    def _after_step(self, holds_experts: bool) -> None:
        self._weights_changed = True
        if self._calls.transfers is not None:
            self._calls.transfers.watch.steps += holds_experts

    def _complete_gradients(self) -> None:
        """A backward ends: gradients of replicas that are under way belong to it."""
        if self._calls.transfers is not None:
            with self._lockstep.explaining():
                self._calls.transfers.returns.finish()

    def _drop_gradients(self) -> None:
        """A backward failed; what it has left is not to be added to what comes next."""
        self.counters.abandoned_backwards += 1
        if self._calls.transfers is not None:
            self._calls.transfers.returns.abandon()

    def _num_moved(self, plan: StepPlan) -> int:
        return int(np.count_nonzero(plan.home != self.placement.home)) if plan.home.shape == self._shape else 0

    def _check_plan(self, plan: StepPlan, trace: RoutingTrace) -> None:
        check_fits(trace, plan.schedule, self.rank, self.num_ranks, self._shape)
        if self.mode not in ("plan", "static"):
            return
        if plan.slots_per_rank > self.slots_per_rank:
            raise InputError(
                f"the plan is for {plan.slots_per_rank} slots a rank; this session has {self.slots_per_rank}"
            )
        moved = self._num_moved(plan)
        if moved and not self.optimizers:
            raise InputError(
                f"the plan moves {moved} experts to other homes; tell the session which optimizer trains them with "
                "train_with(), so that its state can move along"
            )
        self._check_move(plan.placement)


def _same(parameters: Sequence[ExpertTensor]) -> Sequence[ExpertTensor]:
    return parameters


def _problem(check: Callable[..., None], *args: Any) -> Exception | None:
    """What a check raises, to be raised on all ranks."""
    try:
        check(*args)
    except (InputError, RuntimeError) as error:
        return error
    return None


def _expert_shapes(layer: HomeExperts) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(shape), layer.dtype) for shape in layer.expert_shapes]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
