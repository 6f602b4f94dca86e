"""`Session`: the public face of the runtime. It plans a step, binds micro-steps, and brings gradients home."""

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
from trimtab.runtime.layer.instance import LayerCalls
from trimtab.runtime.layer.layer import ExpertLayer, HomeWeights
from trimtab.runtime.layer.micro_step import MicroStep
from trimtab.runtime.planning import Mode, Paths, PlannedStep, PlanReport
from trimtab.runtime.rank_experts import RankExperts
from trimtab.runtime.ranks.lockstep import LOGICAL, Lockstep
from trimtab.runtime.ranks.recorder import Recorder
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.rows.expert_compute import ApplyExperts
from trimtab.runtime.settings import Settings
from trimtab.runtime.state.home_experts import ExpertTensor, HomeExperts, ReadParameters, read_tensors
from trimtab.runtime.state.logical_state import LogicalState
from trimtab.runtime.state.parameter_checks import check_new_parameters
from trimtab.runtime.steps import Steps
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.transfers import Transfers
from trimtab.trace import RoutingTrace


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
        ring_layers: int = RING_LAYERS,
        ranks_per_node: int | None = None,
        paths: Paths = "both",
        mirror_bytes: int | None = None,
        least_gain: float = 0.005,
        rates: ClusterSpec | None = None,
        verify_weights: bool | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.settings = Settings(
            num_experts=num_experts, mode=mode, slots_per_rank=slots_per_rank, ring_layers=ring_layers, paths=paths,
            mirror_bytes=mirror_bytes, least_gain=least_gain, rates=rates, verify=verify_weights,
        )  # fmt: skip
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
        self._initial_E: Array = self.topology.initial_placement(1, num_experts).home[0]
        self._lockstep = Lockstep(self.topology, most_votes=max(num_experts, 2))
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
        """What is done with a plan; see `Session`."""
        return self.settings.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self.settings.mode = mode

    @property
    def paths(self) -> Paths:
        """How replicas' weights may come; see `Session`."""
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
        """Replicas of one layer that a rank has room for."""
        return self.settings.slots_per_rank

    @property
    def homes(self) -> list[HomeExperts]:
        """This rank's experts of each layer."""
        return self._experts.layers

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that train the experts; see `register_optimizers`."""
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
        """The homes of all experts now."""
        return self._experts.placement

    @property
    def home_experts(self) -> Array:
        """Logical ids `[E / R]` of the experts that this rank is home to as a layer is added, ascending."""
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
        check_new_parameters(index, tensors, self.homes, self.home_experts)
        if weights is not None and not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise InputError(f"MoE layer {index}: experts that others train (`weights`) should be stacked tensors")
        homes = HomeExperts(
            index, read, rank=self.rank, home_E=self._initial_E, compute_dtype=compute_dtype,
            joins_in_backward=weights is not None,
        )  # fmt: skip
        if self.layers and homes.expert_like != self.homes[0].expert_like:
            raise InputError(
                f"MoE layer {index} has experts of {homes.expert_like}, layer 0 {self.homes[0].expert_like}. "
                "All layers share slots, so their experts should have equal shapes"
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

    def register_optimizers(self, *optimizers: torch.optim.Optimizer) -> None:
        """Say which optimizers train the experts. Not a collective.

        Experts then move between steps, with their rows of optimizer state, where a plan wants them. Without this,
        homes stay where they are.

        Raises:
            InputError: if a layer was added with `weights`.
        """
        self._experts.need_own("move experts with their optimizer state")
        self._experts.optimizers.registered = list(optimizers)

    def move(self, placement: Placement) -> None:
        """Bring all experts to given homes, with their rows of optimizer state; between steps. Plans do it themselves.

        Raises:
            InputError: if the homes are not even, an optimizer keeps state that can't move, or a layer was added with
                `weights`.
            RuntimeError: if gradients wait for an optimizer step.
        """
        self._steps.move(placement)

    def plan(self, trace: RoutingTrace, schedule: Schedule) -> PlanReport:
        """Plan a step whose schedule is given, and take the plan over.

        Args:
            trace: this rank's sequences, as `schedule.sequences_of(rank)` orders them.
            schedule: the step's, on all data ranks, the same on every rank.

        Raises:
            InputError: if trace, schedule and layers don't fit together.
        """
        return self._steps.plan(trace, schedule)

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
        return self._steps.plan_micro_steps(rows)

    def complete_plan(self) -> PlanReport:
        """Plan the step again where it has unknown routes, with those that its tokens took since.

        The routes are those of micro-steps that ran without gradients, as the recompute of log-probabilities does. The
        update then needs no exchange of counts for them. Homes stay as they are.

        Raises:
            RuntimeError: if there is no step that was planned here.
        """
        return self._steps.complete_plan()

    def plan_sequences(self, trace: RoutingTrace, *, token_budget: int, mini_batch: Array | None = None) -> PlannedStep:
        """Plan a step with its schedule, from the sequences that each rank happens to have.

        Bring every sequence to the rank that `schedule` of the result gives it, then `apply_plan` the result.

        Args:
            trace: this rank's sequences. In the schedule, those of all ranks follow one another in rank order.
            token_budget: most tokens of a rank in a micro-step.
            mini_batch: `[S]` mini-batch of every rank's sequences, the same on every rank; all in one by default.

        Raises:
            InputError: if the trace is not of this model, or a sequence exceeds the budget.
        """
        return self._steps.plan_sequences(trace, token_budget=token_budget, mini_batch=mini_batch)

    def apply_plan(self, planned: PlannedStep, trace: RoutingTrace) -> PlanReport:
        """Take over a plan that `plan_sequences` made. Experts move to the homes that it wants.

        Args:
            planned: the plan.
            trace: this rank's sequences, as `planned.schedule.sequences_of(rank)` orders them.

        Raises:
            InputError: as `apply_step_plan`.
        """
        return self._steps.apply_plan(planned, trace)

    def apply_step_plan(self, plan: StepPlan, trace: RoutingTrace) -> PlanReport:
        """Take over a plan that was made elsewhere. Experts move to the homes that it wants.

        Args:
            plan: for this rank's expert-parallel group.
            trace: this rank's sequences, as `plan.schedule.sequences_of(rank)` orders them.

        Raises:
            InputError: if the ranks hold different plans, a plan breaks one of its invariants (see `StepPlan.check`),
                has more slots than this session, or moves homes although no optimizer is known.
        """
        return self._steps.apply_step_plan(plan, trace)

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
        return self._steps.micro_step(index, positions, sequence_hashes)

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Note what this rank does, and when, as long as this is open. To compare ranks, let them begin together."""
        recorder = self.counters.recorder = Recorder(self._experts.device)
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
        return self._steps.need("step_plan").plan

    @property
    def rank_loads(self) -> Array:
        """Tokens `[M, L, R]` int64 that each rank computes in the planned step, if the plan is carried out.

        Raises:
            RuntimeError: if there is no plan.
        """
        step = self._steps.need("rank_loads")
        return step.plan.rank_loads(step.workload)

    def live_micro_step(self, *, positions: torch.Tensor) -> MicroStep:
        """A micro-step that nothing is known of, to leave padding out of the experts. Needs no plan.

        Args:
            positions: `[n]` int64, where this rank's tokens stand among the rows that the layers are given.
        """
        return self._steps.live_micro_step(positions)

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
        self._gradients.finish(replicated)

    def clip_gradients(self, replicated: Iterable[torch.nn.Parameter], max_norm: float) -> float:
        """Clip the gradients of replicated parameters and of all ranks' experts by their joint norm, and return it.

        Raises:
            InputError: if a layer was added with `weights`, or `replicated` has experts of the session.
            RuntimeError: if gradients are not finished.
        """
        return self._gradients.clip(replicated, max_norm)

    def weights_changed(self) -> None:
        """Say that parameters were changed other than by an optimizer step after `finish_gradients`, or by loading them
        before `plan`. Not a collective, but every rank should say it."""
        self._experts.changed = True

    def take_metrics(self) -> dict[str, float]:
        """This rank's counters since they were last taken. Not a collective.

        `transfer/exposed_s` are seconds that compute waited for replicas or their gradients, `transfer/cpu_s` CPU time
        of the thread that copies, `transfer/refresh_s` what bringing changed weights into mirrors took,
        `transfer/*_bytes` what this rank sent or copied, `moe/unplanned_micro_steps` those that ran without a plan,
        `moe/mixed_instances` calls in planned micro-steps that had unknown rows, whose numbers the ranks exchanged,
        `moe/live_layer_calls` calls of layers outside any micro-step while there was a plan, which follow the router's
        choice, `moe/abandoned_backwards` those that failed while gradients of replicas were under way.
        """
        metrics = self.counters.metrics() | {"transfer/cpu_s": self._experts.take_cpu_s()}
        self.counters.clear()
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
        self._experts.need_own("collect or load them")
        return LogicalState(self.homes, self.topology)

    def close(self) -> None:
        """Give up threads and shared memory. Not needed before a process ends."""
        self._experts.close()

    @property
    def transfers(self) -> Transfers:
        """Replica transfers; created on first use, when all layers have been added."""
        return self._experts.transfers


def _same(parameters: Sequence[ExpertTensor]) -> Sequence[ExpertTensor]:
    return parameters
