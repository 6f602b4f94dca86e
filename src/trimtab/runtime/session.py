"""`Session`: the public face of the runtime. It plans a step, binds micro-steps, and brings gradients home."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from trimtab.cluster import ClusterSpec
from trimtab.errors import InputError
from trimtab.planner import Placement, PlanSettings, Schedule, StepPlan, Workload, plan_step
from trimtab.planner.workload import fully_routed, max_over_mean
from trimtab.runtime.experts import ApplyExperts
from trimtab.runtime.gradients import clip_gradients, sum_gradients
from trimtab.runtime.layer import ExpertLayer, Instance
from trimtab.runtime.layout import InstanceReplicas, Layout, build_layout
from trimtab.runtime.transfers import ReplicaTransfers
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts
from trimtab.trace.routing import Array

PolicyName = Literal["trimtab", "static", "off"]
# Every replica comes from its home rank alone, so that it has to be worth more than where two paths share the work.
THRESHOLD = 1.02


@dataclass(frozen=True)
class PlanReport:
    """What planning a step came to.

    Attributes:
        planning_s: seconds from counting to the plan being on every rank.
        max_vio_before, max_vio_after: max/mean - 1 of rank loads, mean over instances, at home and under the plan.
        replicas: in all instances together.
        micro_steps, unplanned_micro_steps: of the step, and those that run without a plan.
    """

    planning_s: float
    max_vio_before: float
    max_vio_after: float
    replicas: int
    micro_steps: int
    unplanned_micro_steps: int


@dataclass(eq=False)
class _PlannedStep:
    """A step that this rank can run: the plan, and this rank's own sequences of it."""

    plan: StepPlan
    workload: Workload
    trace: RoutingTrace
    micro_step: Array

    def trace_of(self, index: int) -> RoutingTrace:
        return self.trace.select(np.flatnonzero(self.micro_step == index))


@dataclass(eq=False)
class _MicroStep:
    """What the layers of a running micro-step look up.

    Attributes:
        positions: `[n]` where the tokens stand in the forward's rows, or None.
        recorded_LNK: recorded ids `[L, n, K]` int64, or None if the batch is not the one that was planned.
        known_N: `[n]` bool, tokens whose route is known; None if all are.
        layouts: one a layer if the micro-step is planned, else empty.
        fetches: transfers under way into each layer's slots.
    """

    positions: torch.Tensor | None
    recorded_LNK: torch.Tensor | None
    known_N: torch.Tensor | None
    layouts: list[Layout]
    fetches: dict[int, list[dist.Work]] = field(default_factory=dict)


class Session:
    """Balanced expert parallelism over the ranks of a process group.

    Add every MoE layer once. Then, for every step: `plan`, and around forward and backward of each micro-step
    `micro_step`; before the optimizer steps, `finish_gradients`. Outside a micro-step the layers work as ordinary
    expert parallelism on the router's live choice. All methods are collective unless they say otherwise.

    Args:
        num_experts: experts of a layer, E.
        group: the ranks that share the experts; all ranks by default.
        policy: `trimtab` balances, `static` plans no replicas, `off` replays routing without any plan.
        slots_per_rank: replicas that a rank has room for in every layer.
        ranks_per_node: neighbouring ranks that share a node; all by default.

    Raises:
        InputError: if the ranks don't divide the experts, or the nodes the ranks.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        group: dist.ProcessGroup | None = None,
        policy: PolicyName = "trimtab",
        slots_per_rank: int = 2,
        ranks_per_node: int | None = None,
    ) -> None:
        shared_by = group or dist.group.WORLD
        if shared_by is None:
            raise RuntimeError("a Session needs torch.distributed; call init_process_group first")
        self.group = shared_by
        self.rank = dist.get_rank(self.group)
        self.num_ranks = dist.get_world_size(self.group)
        self.num_experts = num_experts
        self.policy: PolicyName = policy
        self.cluster = ClusterSpec(self.num_ranks, ranks_per_node or self.num_ranks, slots_per_rank)
        self.home_E: Array = Placement.contiguous(1, num_experts, self.num_ranks).home[0]
        self.layers: list[ExpertLayer] = []
        self.unplanned_micro_steps = 0
        members = dist.get_process_group_ranks(self.group)
        self._control = dist.new_group(members, backend="gloo")
        transfer_group = dist.new_group(members)
        # NCCL wants every rank of a group in its first call.
        dist.barrier(group=transfer_group)
        self.transfers = ReplicaTransfers(transfer_group, self.rank)
        self._step: _PlannedStep | None = None
        self._current: _MicroStep | None = None

    @property
    def home_experts(self) -> Array:
        """Logical ids `[E / R]` of this rank's home experts, rising: the order of rows in the stacked tensors."""
        return np.flatnonzero(self.home_E == self.rank)

    def add_layer(self, parameters: Sequence[torch.nn.Parameter], apply: ApplyExperts) -> ExpertLayer:
        """Add the next MoE layer. Not a collective.

        Args:
            parameters: stacked tensors `[E / R, ...]` of this rank's `home_experts`. They stay the caller's: train
                them with any elementwise optimizer, and keep them out of FSDP.
            apply: computes experts on grouped rows; see `gated_experts`. It must take any number of rows, 0 too.

        Raises:
            InputError: if a tensor does not hold E / R experts.
        """
        for parameter in parameters:
            if len(parameter) != len(self.home_experts):
                raise InputError(
                    f"MoE layer {len(self.layers)}: an expert tensor has {len(parameter)} rows; this rank is home to "
                    f"{len(self.home_experts)} of {self.num_experts} experts"
                )
        layer = ExpertLayer(self, len(self.layers), parameters, apply, self.cluster.slots_per_rank)
        self.layers.append(layer)
        return layer

    def plan(self, trace: RoutingTrace, schedule: Schedule) -> PlanReport:
        """Plan a step from the routing that every rank recorded.

        Each rank counts its own sequences, rank 0 plans from the counts of all, and every rank gets the plan.

        Args:
            trace: this rank's sequences, as `schedule.sequences_of(rank)` orders them.
            schedule: the step's, the same on every rank.

        Raises:
            InputError: if trace, schedule and layers don't fit together.
        """
        self._check_fits(trace, schedule)
        start = time.perf_counter()
        micro_step = schedule.of_rank(self.rank)
        workload = self._gather_workload(trace, micro_step, schedule.num_micro_steps)
        data: list[bytes | None] = [None]
        if self.rank == 0:
            placement = Placement.contiguous(len(self.layers), self.num_experts, self.num_ranks)
            cluster = self.cluster if self.policy == "trimtab" else replace(self.cluster, slots_per_rank=0)
            settings = PlanSettings(threshold=THRESHOLD)
            data = [plan_step(workload, schedule, placement, cluster, settings).to_bytes()]
        dist.broadcast_object_list(data, group=self._control, group_src=0)
        assert data[0] is not None
        plan = StepPlan.from_bytes(data[0])
        return self.adopt(plan, workload, trace, planning_s=time.perf_counter() - start)

    def adopt(self, plan: StepPlan, workload: Workload, trace: RoutingTrace, *, planning_s: float = 0.0) -> PlanReport:
        """Take over a plan made elsewhere. Not a collective; every rank must adopt the same plan.

        Args:
            plan: for this group's ranks and layers, with the contiguous placement.
            workload: the whole step's.
            trace: this rank's sequences, as `plan.schedule.sequences_of(rank)` orders them.

        Raises:
            InputError: if the plan breaks one of its invariants (see `StepPlan.check`) or moves homes.
        """
        plan.check(workload)
        self._check_fits(trace, plan.schedule)
        if not np.array_equal(plan.home, np.broadcast_to(self.home_E, plan.home.shape)):
            raise InputError("the plan moves experts to other homes; this runtime keeps the contiguous placement")
        if plan.slots_per_rank > self.cluster.slots_per_rank:
            raise InputError(
                f"the plan is for {plan.slots_per_rank} slots a rank; this session has {self.cluster.slots_per_rank}"
            )
        self._step = _PlannedStep(plan, workload, trace, plan.schedule.of_rank(self.rank))
        unplanned = plan.num_micro_steps if self.policy == "off" else int(np.count_nonzero(~plan.plannable))
        return PlanReport(
            planning_s=planning_s,
            max_vio_before=float(max_over_mean(workload.home_loads(self.home_E)).mean() - 1),
            max_vio_after=float(max_over_mean(plan.rank_loads(workload)).mean() - 1),
            replicas=plan.num_replicas,
            micro_steps=plan.num_micro_steps,
            unplanned_micro_steps=unplanned,
        )

    @contextmanager
    def micro_step(
        self,
        index: int,
        *,
        positions: torch.Tensor | None = None,
        sequence_hashes: Array | None = None,
    ) -> Iterator[None]:
        """Bind a micro-step of the planned step around its forward and, in update, its backward.

        Args:
            index: the micro-step, 0 .. M-1. Any order, any number of times (recompute, then update).
            positions: `[n]` int64, where this rank's n planned tokens stand among the rows that the layers are given,
                if those hold more (padding). The others get zero from the experts.
            sequence_hashes: `hash_tokens` of this rank's sequences in the batch, in plan order. If they are not those
                that were planned, on any rank, the micro-step runs unplanned on live routing on all ranks.

        Raises:
            RuntimeError: if there is no plan, or another micro-step is running.
        """
        if self._step is None:
            raise RuntimeError("micro_step() needs a planned step")
        with self._running(self._bind_micro_step(self._step, index, positions, sequence_hashes)):
            yield

    @contextmanager
    def live_micro_step(self, *, positions: torch.Tensor) -> Iterator[None]:
        """Bind a micro-step that nothing is known of, to leave padding out of the experts. Needs no plan.

        Args:
            positions: `[n]` int64, where this rank's tokens stand among the rows that the layers are given.
        """
        with self._running(_MicroStep(positions, None, None, [])):
            yield

    def finish_gradients(self, replicated: Sequence[torch.nn.Parameter] = ()) -> None:
        """Complete the gradients of all micro-steps so far; call it before clipping and the optimizer step.

        Replica gradients still under way are added to their home experts. Gradients of `replicated` parameters, which
        every rank holds, are summed over the ranks.
        """
        self.transfers.finish()
        sum_gradients(replicated, self.group)

    def clip_gradients(self, replicated: Sequence[torch.nn.Parameter], max_norm: float) -> float:
        """Clip the gradients of replicated parameters and of all ranks' experts by their joint norm, and return it."""
        experts = [parameter for layer in self.layers for parameter in layer.parameters]
        return float(clip_gradients(replicated, experts, max_norm, self.group))

    def logical_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's state with the experts of all ranks, in logical order, on every rank.

        This is what leaves the runtime: for checkpoints, and for the weights of a rollout engine.
        """
        sharded = {id(parameter) for layer in self.layers for parameter in layer.parameters}
        names = [name for name, parameter in model.named_parameters() if id(parameter) in sharded]
        order = torch.from_numpy(np.argsort(np.argsort(self.home_E, kind="stable")))
        state = model.state_dict()
        for name in names:
            local = state[name].detach().contiguous()
            parts = [torch.empty_like(local) for _ in range(self.num_ranks)]
            dist.all_gather(parts, local, group=self.group)
            state[name] = torch.cat(parts).index_select(0, order.to(local.device))
        return state

    # What the layers ask for.

    @property
    def replays(self) -> bool:
        """Is a micro-step with recorded routing running?"""
        return self._current is not None and self._current.recorded_LNK is not None

    def replay(self, layer: int, live_ids: torch.Tensor) -> torch.Tensor:
        """Put the running micro-step's recorded ids into `live_ids [T, K]`; see `ExpertLayer.route`."""
        step = self._current
        ids = live_ids.to(torch.int64)
        if step is None or step.recorded_LNK is None:
            return ids
        recorded = step.recorded_LNK[layer]
        chosen = ids if step.positions is None else ids.index_select(0, step.positions)
        if len(chosen) != len(recorded):
            raise RuntimeError(
                f"MoE layer {layer} got {len(chosen)} tokens; the micro-step was planned with {len(recorded)}"
            )
        if step.known_N is not None:
            recorded = torch.where(step.known_N[:, None], recorded, chosen)
        return recorded.clone() if step.positions is None else ids.index_copy(0, step.positions, recorded)

    def bind(self, layer: ExpertLayer, expert_ids: torch.Tensor) -> Instance:
        """Everything that `layer` needs to run: from the plan, or from an exchange of counts if there is none."""
        step = self._current
        positions = step.positions if step else None
        if step is None or not step.layouts:
            chosen = expert_ids if positions is None else expert_ids.index_select(0, positions)
            layout = self._exchange_layout(chosen)
            return Instance(layout, positions, self.group, lambda: None, lambda _: None)
        self._fetch(layer.index + 1)
        layout = step.layouts[layer.index]

        def await_replicas() -> None:
            for work in step.fetches.pop(layer.index, []):
                work.wait()
            step.fetches[layer.index] = []

        def return_gradients(gradients: Sequence[torch.Tensor]) -> None:
            self.transfers.return_gradients(step, layer.parameters, gradients, layout.replicas, self.home_E)

        return Instance(layout, positions, self.group, await_replicas, return_gradients)

    # How a step is bound.

    @contextmanager
    def _running(self, micro_step: _MicroStep) -> Iterator[None]:
        if self._current is not None:
            raise RuntimeError("another micro-step is running")
        self._current = micro_step
        self._fetch(0)
        try:
            yield
        finally:
            self._current = None

    def _check_fits(self, trace: RoutingTrace, schedule: Schedule) -> None:
        if (trace.num_experts, trace.num_layers) != (self.num_experts, len(self.layers)):
            raise InputError(
                f"the trace has {trace.shape_text}; the model has {len(self.layers)} MoE layers, "
                f"{self.num_experts} experts"
            )
        mine = len(schedule.sequences_of(self.rank))
        if schedule.num_ranks != self.num_ranks or mine != trace.num_sequences:
            raise InputError(
                f"the schedule gives rank {self.rank} of {schedule.num_ranks} {mine} sequences; the session has "
                f"{self.num_ranks} ranks and this rank's trace {trace.num_sequences} sequences"
            )

    def _gather_workload(self, trace: RoutingTrace, micro_step: Array, num_micro_steps: int) -> Workload:
        counts = torch.from_numpy(count_experts(trace, micro_step, num_micro_steps))
        routed = torch.from_numpy(fully_routed(trace, micro_step, num_micro_steps).astype(np.uint8))
        counts_R = [torch.empty_like(counts) for _ in range(self.num_ranks)]
        dist.all_gather(counts_R, counts, group=self._control)
        dist.all_reduce(routed, dist.ReduceOp.MIN, group=self._control)
        return Workload(torch.stack(counts_R, dim=2).numpy(), routed.numpy().astype(bool))

    def _bind_micro_step(
        self,
        step: _PlannedStep,
        index: int,
        positions: torch.Tensor | None,
        sequence_hashes: Array | None,
    ) -> _MicroStep:
        if not 0 <= index < step.plan.num_micro_steps:
            raise IndexError(f"micro-step {index} of {step.plan.num_micro_steps}")
        trace = step.trace_of(index)
        if sequence_hashes is not None and not self._all_agree(np.array_equal(sequence_hashes, trace.sequence_hashes)):
            self.unplanned_micro_steps += 1
            return _MicroStep(positions, None, None, [])
        device = self.layers[0].parameters[0].device
        recorded_LNK = torch.from_numpy(trace.expert_ids.transpose(1, 0, 2).astype(np.int64)).to(device)
        if not step.plan.plannable[index]:
            self.unplanned_micro_steps += 1
            known_N = torch.from_numpy((trace.expert_ids[:, :, 0] != trace.no_route).all(axis=1)).to(device)
            return _MicroStep(positions, recorded_LNK, known_N, [])
        if self.policy == "off":
            self.unplanned_micro_steps += 1
            return _MicroStep(positions, recorded_LNK, None, [])
        layouts = [
            build_layout(
                np.ascontiguousarray(trace.expert_ids[:, layer]),
                step.workload.token_counts_MLRE[index, layer],
                self.home_E,
                self.rank,
                InstanceReplicas.of(step.plan, index, layer),
                self.cluster.slots_per_rank,
                device,
            )
            for layer in range(len(self.layers))
        ]
        return _MicroStep(positions, recorded_LNK, None, layouts)

    def _all_agree(self, mine: bool) -> bool:
        agree = torch.tensor(int(mine))
        dist.all_reduce(agree, dist.ReduceOp.MIN, group=self._control)
        return bool(agree)

    def _fetch(self, layer: int) -> None:
        """Start the transfers into a layer's slots, once a micro-step, one layer before they are needed."""
        step = self._current
        if step is None or layer >= len(step.layouts) or layer in step.fetches:
            return
        target = self.layers[layer]
        step.fetches[layer] = self.transfers.fetch(
            target.parameters, target.slots, step.layouts[layer].replicas, self.home_E
        )

    def _exchange_layout(self, expert_ids: torch.Tensor) -> Layout:
        ids_NK = expert_ids.cpu().numpy()
        counts = torch.from_numpy(np.bincount(ids_NK.reshape(-1), minlength=self.num_experts))
        counts_R = [torch.empty_like(counts) for _ in range(self.num_ranks)]
        dist.all_gather(counts_R, counts, group=self._control)
        return build_layout(
            ids_NK,
            torch.stack(counts_R).numpy(),
            self.home_E,
            self.rank,
            InstanceReplicas.none(self.num_ranks),
            self.cluster.slots_per_rank,
            expert_ids.device,
        )
