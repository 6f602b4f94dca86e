"""What the layers of a running micro-step look up: recorded routing, layouts, and the transfers they need."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from trimtab.errors import InputError
from trimtab.planner import StepPlan, Workload
from trimtab.runtime.backward import Backward, running_backward
from trimtab.runtime.exchange import exchange_rows
from trimtab.runtime.layout import InstanceReplicas, Layout, place_rows, upload_layouts
from trimtab.runtime.lockstep import COUNTS, RETURNS, Lockstep
from trimtab.runtime.memory import upload
from trimtab.runtime.recorder import Recorder
from trimtab.runtime.returns import accumulates
from trimtab.runtime.topology import Topology
from trimtab.trace import RoutingTrace
from trimtab.trace.routing import Array

if TYPE_CHECKING:
    from trimtab.runtime.accumulation import Accumulation
    from trimtab.runtime.layer import ExpertLayer
    from trimtab.runtime.transfers import Transfers


@dataclass(eq=False)
class MicroStep:
    """One micro-step, bound around its forward and backward.

    Attributes:
        positions: `[n]` where the tokens stand in the forward's rows, or None.
        recorded_LNK: recorded ids `[L, n, K]` int64, or None if the batch is not the one that was planned.
        known_N: `[n]` bool, tokens whose route is known; None if all are.
        layouts: one a layer if the micro-step is planned, else empty.
        index: its number in the step; -1 if nothing is known of it.
        plan_number: which of the session's plans it belongs to.
        visited: layers in the order in which they ran, forward and backward.
        with_backward: whether the first of them built a graph.
        routed: for each layer, the address of the ids that its `route` returned last.
    """

    positions: torch.Tensor | None
    recorded_LNK: torch.Tensor | None = None
    known_N: torch.Tensor | None = None
    layouts: Sequence[Layout] = ()
    index: int = -1
    plan_number: int = 0
    visited: list[int] = field(default_factory=list)
    with_backward: bool = False
    routed: dict[int, int] = field(default_factory=dict)

    @property
    def replays(self) -> bool:
        """Has it recorded routing?"""
        return self.recorded_LNK is not None

    def replay(self, layer: int, live_ids: torch.Tensor) -> torch.Tensor:
        """Put the recorded ids into `live_ids [T, K]` int64; see `ExpertLayer.route`."""
        if self.recorded_LNK is None:
            return live_ids
        recorded = self.recorded_LNK[layer]
        chosen = live_ids if self.positions is None else live_ids.index_select(0, self.positions)
        if chosen.shape != recorded.shape:
            raise RuntimeError(
                f"MoE layer {layer} got {len(chosen)} tokens with {chosen.shape[1]} experts each; the micro-step was "
                f"planned with {len(recorded)} tokens with {recorded.shape[1]}"
            )
        if self.known_N is not None:
            recorded = torch.where(self.known_N[:, None], recorded, chosen)
        return recorded.clone() if self.positions is None else live_ids.index_copy(0, self.positions, recorded)


@dataclass(eq=False)
class RunningStep:
    """A step that this rank can run.

    Attributes:
        plan, workload: of the expert-parallel group.
        trace: this rank's own sequences, ordered by micro-step.
        runs: whether the plan is carried out, or micro-steps only replay their routing.
        number: which of the session's plans it is.
        has_moved: whether experts have moved to other homes since.
    """

    plan: StepPlan
    workload: Workload
    trace: RoutingTrace
    runs: bool
    number: int
    has_moved: bool = False

    def problem(self, index: int) -> Exception | None:
        """What is wrong with binding a micro-step of this number."""
        if self.runs and self.has_moved:
            return RuntimeError("experts have moved since the plan was applied; plan the step again")
        if 0 <= index < self.plan.num_micro_steps:
            return None
        return IndexError(f"micro-step {index} of {self.plan.num_micro_steps}")

    def knows(self, index: int, sequence_hashes: Array | None, rank: int) -> bool:
        """Are these the sequences that were planned for a rank?"""
        if sequence_hashes is None:
            return True
        return np.array_equal(sequence_hashes, self.trace.sequence_hashes[self._sequences_of(index, rank)])

    def bind(
        self, index: int, layers: Sequence[ExpertLayer], topology: Topology, positions: torch.Tensor | None
    ) -> MicroStep:
        """One micro-step, of which all ranks have the sequences that were planned. Not a collective."""
        trace = self.trace.select(self._sequences_of(index, topology.rank))
        device = layers[0].parameters[0].device
        (recorded_LNK,) = upload([trace.expert_ids.transpose(1, 0, 2).astype(np.int64)], device)
        if not self.plan.plannable[index]:
            (known_N,) = upload([(trace.expert_ids[:, :, 0] != trace.no_route).all(axis=1)], device)
            return MicroStep(positions, recorded_LNK, known_N, index=index, plan_number=self.number)
        if not self.runs:
            return MicroStep(positions, recorded_LNK, index=index, plan_number=self.number)
        placed = [
            place_rows(
                np.ascontiguousarray(trace.expert_ids[:, layer.index]),
                self.workload.token_counts_MLRE[index, layer.index],
                layer.home_E,
                topology.rank,
                InstanceReplicas.of(self.plan, index, layer.index),
            )
            for layer in layers
        ]
        layouts = upload_layouts(placed, device)
        return MicroStep(positions, recorded_LNK, None, layouts, index=index, plan_number=self.number)

    def _sequences_of(self, index: int, rank: int) -> Array:
        return np.flatnonzero(self.plan.schedule.of_rank(rank) == index)


def exchange_layout(layer: ExpertLayer, expert_ids: torch.Tensor, topology: Topology, lockstep: Lockstep) -> Layout:
    """The layout of an instance that nothing is known of, from an exchange of counts. Collective.

    Args:
        expert_ids: `[n, K]` of this rank's tokens.

    Raises:
        InputError: on all ranks, if one of them has an id that no expert has.
    """
    ids_NK, num_experts = expert_ids.cpu().numpy(), len(layer.home_E)
    problem = None
    if ids_NK.size and not 0 <= ids_NK.min() <= ids_NK.max() < num_experts:
        wrong = ids_NK.min() if ids_NK.min() < 0 else ids_NK.max()
        problem = InputError(
            f"MoE layer {layer.index} was given expert id {wrong}; ids should be from 0 to {num_experts - 1}"
        )
    counts_E = np.zeros(num_experts, np.int64) if problem else np.bincount(ids_NK.reshape(-1), minlength=num_experts)
    counts_RE = lockstep.agree(COUNTS, layer=layer.index, votes=counts_E, problem=problem)
    replicas = InstanceReplicas.none(topology.num_ranks)
    rows = place_rows(ids_NK, counts_RE, layer.home_E, topology.rank, replicas)
    return upload_layouts([rows], expert_ids.device)[0]


@dataclass(eq=False)
class Instance:
    """One layer of one micro-step on one rank, bound at forward and looked up again in backward.

    Attributes:
        layer: whose experts.
        layout: where rows go.
        positions: `[n]` int64, where the micro-step's tokens stand among the rows of `hidden`; None if they are all.
        group: the ranks that share the experts.
        lockstep: the calls of this rank.
        backward: follows backwards, to complete gradients as they end.
        accumulation: whether gradients were summed already.
        home_E: the layer's homes, as the instance was bound.
        has_graph: whether a backward can follow.
        made_in: the backward in which the instance was bound, if a checkpointed layer runs again.
        micro_step: None outside of any.
        transfers: of a planned instance, else None.
        recorder: takes notes while somebody wants them.
        borrowing: the node of the graph that returns gradients of replicas.
    """

    layer: ExpertLayer
    layout: Layout
    positions: torch.Tensor | None
    group: dist.ProcessGroup
    lockstep: Lockstep
    backward: Backward
    accumulation: Accumulation
    home_E: Array
    has_graph: bool
    made_in: int | None
    micro_step: MicroStep | None = None
    transfers: Transfers | None = None
    recorder: Recorder | None = None
    borrowing: weakref.ref[Any] | None = None

    def turn_to(self, activity: int) -> None:
        """This rank turns to something else; noted if somebody wants to know."""
        if self.recorder is not None:
            self.recorder.turn_to(activity, self.layer.index)

    def leave(self, activity: int) -> None:
        """This rank turns to something outside the layer; noted if somebody wants to know."""
        if self.recorder is not None:
            self.recorder.turn_to(activity)

    def send(self, kind: int, rows: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Exchange rows with the other ranks: from tokens to experts, or back.

        Args:
            kind: which of the layer's exchanges it is; see `lockstep.CALLS`.
        """
        index = -1 if self.micro_step is None else self.micro_step.index
        tag = self.lockstep.note(kind, self.layer.index, index)
        splits = self.layout.send_splits, self.layout.recv_splits
        return exchange_rows(rows, *(splits[::-1] if back else splits), self.group, tag=tag, wait=self.lockstep.wait)

    def begin_backward(self) -> None:
        """The layer's backward begins.

        Raises:
            RuntimeError: if what the forward used is gone: experts have moved, or another plan was applied.
        """
        if self.home_E is not self.layer.home_E or self._is_replaced():
            which = "a forward" if self.micro_step is None else f"the forward of micro-step {self.micro_step.index}"
            raise RuntimeError(
                f"MoE layer {self.layer.index}: another plan was applied between {which} and its backward; call "
                "backward() before plan(), adopt() or move()"
            )
        borrowing = None if self.borrowing is None else self.borrowing()
        if borrowing is not None and not torch._C._will_engine_execute_node(borrowing):
            self._check_left_out()
        self.accumulation.begin_backward(running_backward())
        self.approach()

    def _check_left_out(self) -> None:
        """Raises RuntimeError if the running backward leaves out gradients of replicas of experts that it is for."""
        if any(accumulates(self.layer, parameter) for parameter in self.layer.parameters if parameter.requires_grad):
            raise RuntimeError(
                f"MoE layer {self.layer.index}: backward(inputs=...) with expert tensors alone would miss gradients "
                "of replicas; call backward() without inputs"
            )

    def _is_replaced(self) -> bool:
        micro_step, transfers = self.micro_step, self.transfers
        return micro_step is not None and transfers is not None and micro_step.plan_number != transfers.plan_number

    def approach(self) -> None:
        """The layer is about to run, forward or backward. Its replicas need the weights that copies were made of."""
        if self.micro_step is not None and self.transfers is not None:
            if self.layout.replicas.count or self.layer.is_staged:
                self.transfers.watch.check_unchanged(self.layer)
            self.transfers.ring.approach(self.micro_step, self.layer.index, self.transfers.layers)

    def replica_weights(self) -> list[torch.Tensor]:
        """This rank's replicas, `[count, ...]` for each stacked tensor. Waits until they are there."""
        assert self.micro_step is not None
        assert self.transfers is not None
        return self.transfers.ring.replicas(self.micro_step, self.layer.index)

    def return_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients of `replica_weights` on their way home."""
        assert self.transfers is not None
        assert self.micro_step is not None
        # A reentrant checkpoint's own backward lies within the one in which the layer runs again.
        if self.made_in is None:
            self.backward.follow()
        self.lockstep.note(RETURNS, self.layer.index, self.micro_step.index)
        self.transfers.returns.start(self.layer, gradients, self.layout.replicas, self.micro_step)

    def join_gradients(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Gradients of the home experts, `[E / R, ...]` for each stacked tensor, with those of all their replicas."""
        if self.transfers is None or not self.layout.replicas.count:
            return gradients
        return self.transfers.returns.join(self.layer, gradients)
