"""`Session`: the public interface of the runtime: plans of steps, micro-steps, gradients, weights in logical order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.cluster.specs import RING_LAYERS
from trimtab.errors import InputError
from trimtab.planner import Placement, Schedule, StepPlan
from trimtab.runtime.argument_checks import at_least
from trimtab.runtime.gradients import Gradients
from trimtab.runtime.layer.dispatch import Dispatcher, RowDispatcher
from trimtab.runtime.layer.framework_layer import FrameworkLayer
from trimtab.runtime.layer.instance import MEASURED, LayerCalls
from trimtab.runtime.layer.layer import ExpertLayer, HomeWeights
from trimtab.runtime.layer.micro_step import MicroStep
from trimtab.runtime.live.policies import LivePolicy, Predictor
from trimtab.runtime.planned_step import PlannedStep, PlanReport
from trimtab.runtime.rank_experts import RankExperts
from trimtab.runtime.ranks.gpu_variables import tell_wrong_variables
from trimtab.runtime.ranks.lockstep import LOGICAL, Lockstep
from trimtab.runtime.ranks.recorder import Recorder
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.rows.expert_compute import ApplyExperts
from trimtab.runtime.rows.step_slices import COMPARED
from trimtab.runtime.settings import Mode, Paths, Settings
from trimtab.runtime.state.home_experts import ExpertTensor, HomeExperts, ReadParameters, read_tensors
from trimtab.runtime.state.logical_state import LogicalState
from trimtab.runtime.state.optimizer_rows import ExpertState
from trimtab.runtime.steps import Steps
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.transfers import Transfers
from trimtab.trace import RoutingTrace


class Session:
    """Balanced expert parallelism over the ranks of a process group.

    Add every MoE layer once, and register the optimizers that train the experts. In every step, call `plan`, enter
    `micro_step` around forward and backward of each micro-step, and call `finish_gradients` before the optimizer steps.
    Outside micro-steps the layers are ordinary expert parallelism on the router's live choice. All methods are
    collective unless their docstring says otherwise.

    Args:
        num_experts: experts of a layer, E.
        group: the data ranks; all ranks by default.
        groups: number of expert-parallel groups, each of neighbouring data ranks that together hold all experts.
        expert_group: a framework's process group of any ranks that together hold all experts; instead of `group`,
            `groups` and `ranks_per_node`. The rank at position i of R in it is home to experts i * E / R up to
            (i + 1) * E / R at the start. Creating the session is then a collective over the ranks of all
            expert-parallel groups that `expert_dp_group` joins: the data ranks.
        expert_dp_group: with `expert_group`, the process group of the ranks that hold the same experts as this one. A
            rank's position in it is the number of its expert-parallel group. None for one expert-parallel group.
        nodes: with `expert_group`, the node number of each of its ranks, in its order; one node by default.
        mode: `plan` balances; `rehome` only moves experts to other homes between steps, without replicas; `static` is
            expert parallelism on contiguous homes without replicas, on the planned path; `live` balances without
            recorded routing, see `live_micro_step`; `shadow` plans and reports, but runs as `off`; `off` replays
            routing in ordinary expert parallelism.
        slots_per_rank: most replicas of one layer on a rank.
        ring_layers: layers that replicas are kept for at the same time, one in use and the others prefetched.
        ranks_per_node: neighbouring ranks that share a node; all ranks of a group by default.
        paths: sources of replicas' weights: home ranks (`peer`), host memory (`host`), or both; `message` is `peer`
            with messages also between GPUs of one node, which otherwise read each other's memory if they can.
        mirror_bytes: most host memory of a node for mirrored experts; unlimited by default.
        least_gain: a plan with a smaller predicted saving, as a fraction of the step, is not executed.
        max_rows_per_rank: rows, (token, expert) pairs, that no rank may exceed in any layer of a micro-step, in mode
            `plan`. A step that can't keep to it is refused when it is planned, with the smallest possible value.
            Micro-steps with other rows than planned are not limited; `moe/unplanned_micro_steps` counts them.
        exact: in mode `plan`, no rank gets more rows of a layer than the mean, rounded up, as static shapes need. A
            step that can't be spread so evenly is refused.
        rates: rates of compute and links, from which the planner computes costs, such as `trimtab calibrate` measures;
            by default those of an H100 cluster, or of a CPU machine, and moves of experts as this session measures
            them. With rates, plans don't depend on measured times. Its numbers of ranks and slots are ignored.
        policy: in mode `live`, how replicas are chosen in `live_micro_step`: `quota`, replicas and split from the
            counts of the layer; `feplb`, whole experts that move within a node after the dispatch; `predict`, replicas
            from earlier counts, which are there before the router chooses, and the split from those of the layer;
            `off`, none; `auto`, for every layer the fastest of `off`, `quota` and `predict`, by measured time.
        predictor: the counts that `predict` uses: of the `last` micro-step, an exponential `average`, or those of the
            `same` micro-step after the weight change before.
        verify_weights: compare sampled elements of every expert when a micro-step begins, to detect weight changes that
            address and version do not show. By default on in mode `shadow` and if `TRIMTAB_VERIFY_WEIGHTS=1` is set. On
            CUDA the host then waits for the device.
        timeout: most time for which a rank waits for others; by default that of `group`, but at most 10 minutes.

    Raises:
        InputError: if the ranks don't divide the experts, the groups the ranks, or the nodes a group; if the groups of
            a framework don't line up or don't include this rank; if an argument is out of its range.
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
        ring_layers: int = RING_LAYERS,
        ranks_per_node: int | None = None,
        paths: Paths = "both",
        mirror_bytes: int | None = None,
        least_gain: float = 0.005,
        max_rows_per_rank: int | None = None,
        exact: bool = False,
        rates: ClusterSpec | None = None,
        policy: LivePolicy = "auto",
        predictor: Predictor = "last",
        verify_weights: bool | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.settings = Settings(
            num_experts=num_experts, mode=mode, slots_per_rank=slots_per_rank, ring_layers=ring_layers, paths=paths,
            mirror_bytes=mirror_bytes, least_gain=least_gain, max_rows_per_rank=max_rows_per_rank, exact=exact,
            rates=rates, policy=policy, predictor=predictor, verify=verify_weights,
        )  # fmt: skip
        if expert_group is None:
            if expert_dp_group is not None or nodes is not None:
                raise InputError(
                    "expert_dp_group and nodes go with expert_group; for groups that the session creates, use groups "
                    "and ranks_per_node"
                )
            self.topology = Topology.build(group, at_least("groups", groups, 1), ranks_per_node, timeout)
        else:
            if group is not None or groups != 1 or ranks_per_node is not None:
                raise InputError(
                    "group, groups and ranks_per_node are for groups that the session creates; with expert_group, use "
                    "expert_dp_group for several expert-parallel groups and nodes for several nodes"
                )
            self.topology = Topology.given(expert_group, expert_dp_group, nodes, timeout)
        if self.topology.rank == 0 and "nccl" in dist.get_backend(self.topology.experts):
            tell_wrong_variables()
        self.layers: list[ExpertLayer] = []
        self._initial_E: Array = self.topology.initial_placement(1, num_experts).home[0]
        self._lockstep = Lockstep(
            self.topology, num_experts=num_experts, max_values=max(num_experts + MEASURED, 3 + COMPARED)
        )
        self.counters = Counters(lockstep=self._lockstep)
        self._experts = RankExperts(self.settings, self.topology, self._lockstep, self.counters)
        self._calls = LayerCalls(
            self.topology, self._lockstep, self.counters, self._experts.backward, self._experts.accumulation,
            self.settings.slots_per_rank,
        )  # fmt: skip
        self._steps = Steps(self.settings, self._experts, self._calls)
        self._gradients = Gradients(self._calls, self._experts, with_values=self.settings.verify_weights)

    @property
    def mode(self) -> Mode:
        """The mode; see `Session`. It can be changed between steps."""
        return self.settings.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self.settings.mode = mode

    @property
    def paths(self) -> Paths:
        """Sources of replicas' weights; see `Session`. It can be changed between steps."""
        return self.settings.paths

    @paths.setter
    def paths(self, paths: Paths) -> None:
        self.settings.paths = paths

    @property
    def num_experts(self) -> int:
        """Experts of a layer, E."""
        return self.settings.num_experts

    @property
    def slots_per_rank(self) -> int:
        """Most replicas of one layer on a rank."""
        return self.settings.slots_per_rank

    @property
    def homes(self) -> list[HomeExperts]:
        """This rank's experts of each layer."""
        return self._experts.layers

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The registered optimizers; see `register_optimizers`."""
        return self._experts.optimizers.registered

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
        """The present homes of all experts."""
        return self._experts.placement

    @property
    def home_experts(self) -> Array:
        """Logical ids `[E / R]` of this rank's home experts when a layer is added, ascending."""
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
                called whenever they are needed. Train them with an elementwise optimizer, and keep them out of FSDP.
                Their memory may be replaced at any time outside micro-steps. Sequences are never stacked.
            apply: computes experts on grouped rows; see `gated_experts`.
            compute_dtype: compute dtype; that of the parameters by default (float32 masters, bfloat16 compute).
            weights: returns the same experts `[E / R, ...]`, in the graph, each time that the layer runs, for experts
                that a framework trains, such as FSDP. Their gradients, including those of replicas, are complete when
                the layer's backward ends. `parameters` are then only read, and experts do not move.
            dispatcher: sends rows to physical experts and back; `RowDispatcher` by default.

        Raises:
            InputError: if a tensor does not hold E / R experts, experts differ in shape from other layers' or within a
                sequence, another layer has one of the tensors, or `weights` is given with sequences.
        """
        read: ReadParameters = parameters if callable(parameters) else partial(_same, parameters)
        if weights is not None and not all(isinstance(tensor, torch.Tensor) for tensor in read_tensors(read)):
            raise InputError(
                f"MoE layer {len(self.homes)}: experts that a framework trains (`weights`) should be stacks"
            )
        homes = self._experts.add_layer(
            read, self._initial_E, compute_dtype=compute_dtype, joins_in_backward=weights is not None
        )
        layer = ExpertLayer(self._calls, homes, apply, weights, dispatcher or RowDispatcher())
        self.layers.append(layer)
        return layer

    def add_framework_layer(self, parameters: ReadParameters) -> FrameworkLayer:
        """Add the next MoE layer, which a framework's own dispatcher and matrix products run. Not a collective.

        Live micro-steps balance it with any policy but `feplb`, whose second dispatch a framework does not have.
        Experts move only after `set_framework_state`. Gradients of replicas are joined to those of `parameters` in
        backward; the framework sums and clips them.

        Args:
            parameters: returns the tensors of this rank's `home_experts`, each a sequence of E / R Parameters `[...]`;
                called whenever they are needed.

        Raises:
            InputError: as `add_layer`, and if the policy is `feplb`.
        """
        if self.settings.policy == "feplb":
            raise InputError(
                "policy 'feplb' sends rows in a second dispatch, which a framework's own dispatcher does not have; use "
                "'quota', 'predict', 'auto' or 'off'"
            )
        return FrameworkLayer(self._calls, self._experts.add_layer(parameters, self._initial_E, joins_in_backward=True))

    def set_framework_state(self, state: ExpertState) -> None:
        """Let plans move the experts of framework layers. Not a collective.

        Args:
            state: what a framework's optimizers keep of the experts.
        """
        self._experts.state = state

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
                f"the model has {found} of the session's {len(experts)} expert tensors; if they were replaced, as by "
                "load_state_dict(assign=True), add layers with a function that returns them"
            )
        return others

    def register_optimizers(self, *optimizers: torch.optim.Optimizer) -> None:
        """Register the optimizers that train the experts. Not a collective.

        Plans then move experts to other homes between steps, with their rows of optimizer state. Without it homes don't
        change.

        Raises:
            InputError: if a layer was added with `weights`.
        """
        self._experts.need_own("move experts with their optimizer state")
        self._experts.optimizers.registered = list(optimizers)

    def move(self, placement: Placement) -> None:
        """Move all experts to given homes, with their rows of optimizer state, between steps. Plans include moves.

        Raises:
            InputError: if ranks have different numbers of experts, an optimizer has state that can't move, or a layer
                was added with `weights`.
            RuntimeError: if gradients are not zero.
        """
        self._steps.move(placement)

    def plan(self, trace: RoutingTrace, schedule: Schedule) -> PlanReport:
        """Plan a step with a given schedule, and apply the plan.

        Args:
            trace: this rank's sequences, in the order of `schedule.sequences_of(rank)`.
            schedule: the schedule of all data ranks, the same on every rank.

        Raises:
            InputError: if trace, schedule and layers are inconsistent.
        """
        return self._steps.plan(trace, schedule)

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
        return self._steps.plan_micro_steps(rows, problem, may_move=may_move)

    def complete_plan(self) -> PlanReport:
        """Plan the step again, with routes in place of the unknown ones.

        These are the routes of micro-steps that ran without gradients, as in the recompute of log-probabilities. The
        update then needs no exchange of counts for them. Homes do not change.

        Raises:
            RuntimeError: if the session has not planned the step.
        """
        return self._steps.complete_plan()

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
        self._steps.plan_ahead(trace, token_budget)

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
        return self._steps.plan_sequences(trace, token_budget=token_budget, mini_batch=mini_batch)

    def apply_plan(self, planned: PlannedStep, trace: RoutingTrace) -> PlanReport:
        """Apply a plan of `plan_sequences`. Experts move to the plan's homes.

        Args:
            planned: the plan.
            trace: this rank's sequences, in the order of `planned.schedule.sequences_of(rank)`.

        Raises:
            InputError: as `apply_step_plan`.
        """
        return self._steps.apply_plan(planned, trace)

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
        return self._steps.apply_step_plan(plan, trace)

    def micro_step(
        self,
        index: int,
        *,
        positions: torch.Tensor | None = None,
        sequence_hashes: Array | None = None,
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

        Raises:
            RuntimeError: if there is no plan; when it is entered, if another micro-step is open.
            InputError: when it is entered, on all ranks, if a rank's index is not in the plan, or its positions have a
                row twice.
        """
        return self._steps.runs.planned(index, positions, sequence_hashes)

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """A context that records this rank's activities over time. Ranks that are compared should enter it together."""
        recorder = self.counters.recorder = Recorder(self._experts.device)
        try:
            yield recorder
        finally:
            self.counters.recorder = None

    @property
    def step_plan(self) -> StepPlan:
        """The last applied plan of this rank's expert-parallel group; waits for all of its replicas.

        Raises:
            RuntimeError: if there is no plan.
        """
        return self._steps.runs.need("step_plan").whole_plan

    @property
    def rank_loads(self) -> Array:
        """Tokens `[M, L, R]` int64 that each rank computes in the planned step, if the plan is executed.

        Raises:
            RuntimeError: if there is no plan.
        """
        step = self._steps.runs.need("rank_loads")
        return step.whole_plan.rank_loads(step.workload)

    def live_micro_step(self, *, positions: torch.Tensor | None = None) -> MicroStep:
        """A micro-step without plan or recorded routing. In mode `live` its layers are balanced, as `policy` says.

        Args:
            positions: `[n]` int64, rows of this rank's tokens among the rows that the layers are given, which keeps
                padding out of the experts; all rows by default.
        """
        return self._steps.runs.live(positions)

    def finish_gradients(self, replicated: Iterable[torch.nn.Parameter] = ()) -> None:
        """Complete the gradients of all micro-steps since the last call; call it before clipping and optimizer steps.

        Gradients of experts are summed over expert-parallel groups, those of `replicated` parameters, which every rank
        has, over all ranks. Gradients of layers that were added with `weights` are not touched. A gradient that no rank
        has stays None.

        Raises:
            InputError: if `replicated` has experts of the session.
            RuntimeError: if it has summed these gradients already, and they were not zeroed since; within a backward.
            RanksDisagreeError: if the ranks made different calls before, or pass different parameters.
        """
        self._gradients.finish(replicated)

    def clip_gradients(self, replicated: Iterable[torch.nn.Parameter], max_norm: float) -> float:
        """Clip the gradients of replicated parameters and of all ranks' experts by their joint norm, and return it.

        Raises:
            InputError: if a layer was added with `weights`, or `replicated` has experts of the session.
            RuntimeError: if `finish_gradients` was not called.
        """
        return self._gradients.clip(replicated, max_norm)

    def weights_changed(self) -> None:
        """Announce writes to parameters that address and version do not show: through `.data`, or to a flat buffer.

        Not a collective. Optimizer steps need no call.
        """
        self._experts.changed = True

    def take_metrics(self) -> dict[str, float]:
        """This rank's counters since the last call. Not a collective.

        Returns:
            `transfer/exposed_s`: seconds for which compute waited for replicas or their gradients; `transfer/cpu_s`:
            CPU seconds of copying threads; `transfer/refresh_s`: seconds of copying changed weights;
            `transfer/*_bytes`: bytes that this rank sent or copied, but `transfer/peer_memory_bytes`: memory of this
            rank that others of its node read replicas from, 0 if they get messages; `moe/unplanned_micro_steps`:
            micro-steps that ran without a plan; `moe/late_micro_steps`: micro-steps that ran without replicas, since
            these were not planned yet; `plan/waited_s`: seconds for which micro-steps waited for them. If replicas are
            planned while the step
            runs: `plan/background_s`: seconds of planning and exchanging on the thread; `moe/planned_replicas`: of all
            slices so far; if all are there, `moe/planned_max_vio`: max/mean - 1 of rank loads, mean over instances, and
            `moe/max_vio_error`: that above the expectation in `PlanReport`. Of the last complete step:
            `plan/predicted_s` and `plan/measured_s`, without moves and optimizer; `plan/cost_scale`: factor of the
            planner's costs for the next; `plan/measured_gain`: of the best strategy over doing nothing, if that was
            measured;
            in mode `live`: `live/calls` of layers; `live/replicas` in them, and `live/used_replicas`, the part with
            rows; `live/max_vio_before` and `live/max_vio_after`, max/mean - 1 of rank loads without and with them, mean
            over calls; `live/choosing_s`, seconds of choosing; of calls with replicas on this rank, `live/homes_s`,
            seconds of home experts, and `live/covered`, the part in which compute then waited less than 5% of that
            time for weights;
            `moe/mixed_instances`: planned instances with unknown rows; `moe/live_layer_calls`: calls of layers outside
            micro-steps while there was a plan; `moe/abandoned_backwards`: failed backwards with replica gradients in
            transfer.
        """
        metrics = self.counters.metrics() | {"transfer/cpu_s": self._experts.take_cpu_s()}
        metrics |= self._steps.feedback.metrics() | {"transfer/peer_memory_bytes": self._experts.peer_memory_bytes}
        metrics |= self._steps.runs.live_metrics()
        running = self._steps.runs.step
        if running is not None and running.slices is not None:
            metrics |= running.slices.metrics()
        self.counters.clear()
        return metrics

    def logical_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's state with the experts of all ranks in logical order, on every rank: for checkpoints, and for the
        weights of a rollout engine.

        Raises:
            InputError: if a layer was added with `weights`.
        """
        self._lockstep.agree(LOGICAL)
        return dict(self.logical.weights(model, everywhere=True))

    @property
    def logical(self) -> LogicalState:
        """Weights and optimizer state in logical expert order, tensor by tensor, and loading of them.

        Raises:
            InputError: if a layer was added with `weights`.
        """
        self._experts.need_own("collect or load them")
        return LogicalState(self.homes, self.topology)

    def close(self) -> None:
        """Release threads and shared memory. Not needed before a process ends."""
        self._steps.runs.close()
        self._experts.close()

    @property
    def transfers(self) -> Transfers:
        """Replica transfers; created on first use, when all layers have been added."""
        return self._experts.transfers


def _same(parameters: Sequence[ExpertTensor]) -> Sequence[ExpertTensor]:
    return parameters
