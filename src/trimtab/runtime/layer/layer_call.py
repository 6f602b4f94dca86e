"""`LayerCall`: one call of a layer on one rank, from its forward to the end of its backward.

`LayerCalls` is what all calls of a session share; see `bind` for how they are created.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.runtime.autograd.gradient_watch import Accumulation, GradientWatch
from trimtab.runtime.autograd.torch_engine import require_eager, running_backward, will_run
from trimtab.runtime.layer.backward import Backward
from trimtab.runtime.layer.micro_step import BoundRoutes
from trimtab.runtime.live.balancer import LiveCall
from trimtab.runtime.program.exchange import RowExchange
from trimtab.runtime.program.physical_experts import PhysicalExperts
from trimtab.runtime.program.program import Layout
from trimtab.runtime.ranks.lockstep import RETURNS, Lockstep, message_tag
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.returns import ReplicaGradients, accumulates
from trimtab.runtime.transfer.transfers import Transfers

# In errors.
A_MICRO_STEP = "a micro-step"


@dataclass(eq=False)
class LayerCalls:
    """State of a session that all calls of its layers share.

    Attributes:
        lockstep: the log of this rank.
        backward: tracks backwards, to complete gradients when they end.
        accumulation: detects gradients that were already summed.
        gradients: detects gradients that others change.
        experts: the physical experts.
        current: the routes of the open micro-step.
        is_planned: whether a plan was applied; calls outside of micro-steps are then counted.
    """

    topology: Topology
    lockstep: Lockstep
    counters: Counters
    backward: Backward
    accumulation: Accumulation
    gradients: GradientWatch
    experts: PhysicalExperts
    current: BoundRoutes | None = None
    is_planned: bool = False

    def require_outside_backward(self, what: str) -> None:
        """Raises RuntimeError within a backward."""
        if running_backward() is not None:
            raise RuntimeError(
                f"{what} can't begin within a backward; keep it out of hooks, and of functions that are checkpointed"
            )
        self.backward.leave_backward()

    def require_between_micro_steps(self, what: str) -> None:
        """Raises RuntimeError within a backward or a micro-step."""
        self.require_outside_backward(what)
        if self.current is not None:
            index = self.current.index
            raise RuntimeError(
                f"{what} can't begin while {f'micro-step {index}' if index >= 0 else 'a live micro-step'} is open; "
                "leave its context first"
            )

    def routes(self) -> BoundRoutes | None:
        """The routes for a layer that is called now: of the open micro-step; or within a backward, where a checkpoint
        recomputes a layer, of the micro-step of its forward.

        Raises:
            RuntimeError: if the layer is compiled, or captured in a CUDA graph.
        """
        require_eager()
        if running_backward() is not None:
            return self.backward.routes_of_rerun()
        self.backward.leave_backward()
        if not torch.is_grad_enabled():
            self.backward.note_checkpoints()
        return self.current


class LayerCall:
    """One call of a layer. Without a plan it has no replicas.

    Args:
        layout: kept until the forward ends.
        routes: routes of the micro-step; None outside of micro-steps. Kept until the backward ends, of a balanced live
            call as long as its graph.
        live: the choice of a balanced live call.

    Attributes:
        has_graph: whether a backward can follow.
        replicas: the instance's replicas on all ranks.
        positions: `[n]` int64, rows of the micro-step's tokens in `hidden`; None for all rows.
        index: the number of the planned micro-step; -1 if there is none.
        number: number of its replicas in transfers: that of the planned micro-step, or of the balanced live call.
        is_live: whether replicas were chosen when the call began, and their transfers have just started.
        is_recorded: whether activities are recorded.
        replica_node: the graph node whose backward sends gradients of replicas.
    """

    def __init__(
        self,
        calls: LayerCalls,
        homes: HomeExperts,
        layout: Layout,
        routes: BoundRoutes | None,
        live: LiveCall | None = None,
    ) -> None:
        self.homes, self.layout, self.routes = homes, layout, routes
        self.has_graph = torch.is_grad_enabled()
        self._splits = layout.send_splits, layout.recv_splits
        self.replicas, self.is_live = layout.replicas, live is not None
        self.index, self.positions, self._transfers, self._plan_number = -1, None, None, 0
        if routes is not None:
            self.index, self.positions = routes.index, routes.positions
            self._transfers, self._plan_number = routes.transfers, routes.plan_number
        self.number = self.index if live is None else live.number
        self._calls = calls
        # Identifies the forward in logs, if a micro-step has several. Equal on all ranks.
        self._forward = calls.lockstep.count
        self._recorder = calls.counters.recorder
        self.is_recorded = self._recorder is not None
        self.replica_node: weakref.ref[Any] | None = None
        # Where a product adds up gradients of replicas, for each tensor.
        self._gradients: list[torch.Tensor | None] = []
        # If so, a reentrant checkpoint recomputes the layer, and its backward is nested in a tracked backward.
        self._made_in_backward = running_backward() is not None

    def mark(self, activity: int, *, outside: bool = False) -> None:
        """Mark the start of an activity of this layer; recorded if a Recorder is active.

        Args:
            outside: the activity belongs to no layer.
        """
        if self._recorder is not None:
            self._recorder.mark(activity, -1 if outside else self.homes.index)

    def send(self, kind: int, rows: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Exchange rows with the other ranks: from tokens to experts, or back.

        Args:
            kind: the exchange, as an index into `lockstep.CALLS`.
        """
        send, receive = reversed(self._splits) if back else self._splits
        return self.exchange(kind, rows, send, receive, overlaps=False).finish()

    def exchange(
        self, kind: int, rows: torch.Tensor, send: list[int], receive: list[int], *, overlaps: bool
    ) -> RowExchange:
        """Start to exchange rows with the other ranks.

        Args:
            kind: as in `send`.
            send, receive: rows to and from each rank.
            overlaps: whether something is computed before its end.
        """
        tag = self._log(kind)
        group, wait = self._calls.topology.experts, self._calls.lockstep.wait
        return RowExchange(rows, send, receive, group, tag=tag, wait=wait, overlaps=overlaps)

    def begin_forward(self) -> None:
        """Call it when the layer's forward begins: prefetches replicas."""
        if self._transfers is not None:
            self._prefetch(self._transfers)

    def end_forward(self) -> None:
        """Call it when the layer's forward ends. Tensors of the layout that backward needs are saved in the graph.
        A planned call without replicas needs no routes there; a live one is found by its routes when it is recomputed.
        """
        del self.layout
        if not self.is_live and not self.replicas.count:
            self.routes = None

    def begin_backward(self) -> None:
        """Call it when the layer's backward begins: prefetches replicas.

        Raises:
            RuntimeError: if another plan was applied since the forward.
        """
        transfers = self._transfers
        if transfers and transfers.plan_number != self._plan_number:
            which = "a forward" if self.index < 0 else f"the forward of micro-step {self.index}"
            raise RuntimeError(
                f"MoE layer {self.homes.index}: another plan was applied between {which} and its backward; call "
                "backward() before plan(), apply_plan(), renumber() or suspend()"
            )
        if not self._calls.topology.has_groups:
            raise RuntimeError(
                f"MoE layer {self.homes.index}: the session was suspended between a forward and its backward; call "
                "backward() before suspend()"
            )
        self._calls.accumulation.begin_backward(running_backward())
        if not self.homes.joins_in_backward:
            if not self._made_in_backward:
                self._calls.backward.track()
            self._calls.gradients.expect(self.homes.index, self.homes.trained)
        replica_node = None if self.replica_node is None else self.replica_node()
        if replica_node is not None and not will_run(replica_node):
            self._check_excluded()
        # A framework's layer without replicas has a node on ranks that record, and on no others.
        if transfers is not None and (self.homes.sends_rows or self.replicas.count or self.is_live):
            self._prefetch(transfers)
        for memory in self._gradients:
            if memory is not None:
                memory.zero_()

    def end_backward(self) -> None:
        """Call it when the layer's backward ends. Choices of live calls are kept for another backward of the graph."""
        if not self.is_live:
            self.routes = None

    def join_gradients(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Add gradients of replicas to those of the home experts, `[E / R, ...]` for each stacked tensor."""
        if self._transfers is None or not self.replicas.count:
            return gradients
        return self._transfers.returns.join(self.homes, gradients)

    def replicated_parameters(self) -> list[torch.Tensor]:
        """The trained Parameters, of lists, of this rank's experts that have replicas."""
        homes, rank = self.homes, self._calls.topology.rank
        rows = dict.fromkeys(each.row for each in self.replicas.located(homes.places) if each.home == rank)
        return [one[row] for one in (homes.current if rows else ()) if one[0].requires_grad for row in rows]

    def join_parameters(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Add gradients of replicas to the parameters; see `GradientReturns.join_parameters`."""
        if self._transfers is None or not self.replicas.count:
            return []
        return self._transfers.returns.join_parameters(self.homes, parameters)

    def replica_weights(self) -> list[torch.Tensor]:
        """This rank's replicas, `[count, ...]` for each stacked tensor. Waits for their transfers."""
        assert self._transfers is not None
        return self._transfers.ring.replicas(self.number, self.homes.index)

    def gradient_memory(self, count: int, dtypes: Sequence[torch.dtype | None]) -> list[torch.Tensor | None]:
        """Memory `[count, ...]` to which the product of this rank's replicas adds their gradients, for each tensor that
        has a dtype. It is zeroed when the layer's backward begins, and sent in place of autograd's gradients.
        """
        assert self._transfers is not None
        returns = self._transfers.returns
        self._gradients = [
            None if dtype is None else returns.memory(self.homes, t, dtype, count) for t, dtype in enumerate(dtypes)
        ]
        return self._gradients

    def return_gradients(self, gradients: Sequence[ReplicaGradients]) -> None:
        """Start sending the gradients of `replica_weights` to home ranks."""
        assert self._transfers is not None
        if self._gradients:
            gradients = [
                given if memory is None else memory for given, memory in zip(gradients, self._gradients, strict=True)
            ]
        if not self._made_in_backward:
            self._calls.backward.track()
        self._log(RETURNS)
        tag = message_tag((self._plan_number, self.number, self.homes.index))
        self._transfers.returns.start(self.homes, gradients, self.replicas, tag)

    def _prefetch(self, transfers: Transfers) -> None:
        # Copies have the weights of the start of the micro-step.
        if self.replicas.count or self.homes.is_staged:
            transfers.watch.check_unchanged(self.homes)
        transfers.ring.prefetch(self.number, self.homes.index)

    def _check_excluded(self) -> None:
        """Raises RuntimeError if the running backward accumulates gradients of experts but not of their replicas."""
        if any(accumulates(self.homes, parameter) for parameter in self.homes.trained):
            raise RuntimeError(
                f"MoE layer {self.homes.index}: backward(inputs=...) with expert tensors alone would miss gradients "
                "of replicas; call backward() without inputs"
            )

    def _log(self, kind: int) -> int:
        return self._calls.lockstep.log(kind, self.homes.index, self.index, self._forward)
