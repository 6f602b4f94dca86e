"""`Instance`: one call of a layer on one rank, from its forward to the end of its backward.

`LayerCalls` makes them: from the plan where the micro-step has one, else from an exchange of counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trimtab.errors import InputError
from trimtab.runtime.accumulation import Accumulation
from trimtab.runtime.backward import Backward
from trimtab.runtime.counters import Counters
from trimtab.runtime.engine import running_backward, will_run
from trimtab.runtime.exchange import exchange_rows
from trimtab.runtime.home_experts import HomeExperts
from trimtab.runtime.layout import InstanceReplicas, Layout, place_rows, upload_layouts
from trimtab.runtime.lockstep import COUNTS, RETURNS, Lockstep
from trimtab.runtime.micro_step import MicroStep
from trimtab.runtime.returns import accumulates
from trimtab.runtime.topology import Topology
from trimtab.runtime.transfers import Transfers


@dataclass(eq=False)
class LayerCalls:
    """What calls of layers have in common in a session.

    Attributes:
        lockstep: the journal of this rank.
        backward: follows backwards, to complete gradients as they end.
        accumulation: whether gradients were summed already.
        current: the open micro-step.
        transfers: None before the first plan or micro-step.
        is_planned: whether there is a plan, so that calls outside of micro-steps are counted.
    """

    topology: Topology
    lockstep: Lockstep
    counters: Counters
    backward: Backward
    accumulation: Accumulation
    current: MicroStep | None = None
    transfers: Transfers | None = None
    is_planned: bool = False

    def need_to_be_outside(self, what: str) -> None:
        """Raises RuntimeError within a backward."""
        if running_backward() is not None:
            raise RuntimeError(
                f"{what} can't begin within a backward; keep it out of hooks, and of functions that are checkpointed"
            )
        self.backward.forward()

    def need_to_be_between(self, what: str) -> None:
        """Raises RuntimeError within a backward or a micro-step."""
        self.need_to_be_outside(what)
        if self.current is not None:
            index = self.current.index
            raise RuntimeError(
                f"{what} can't begin while {f'micro-step {index}' if index >= 0 else 'a live micro-step'} is open; "
                "leave its context first"
            )

    def micro_step(self) -> MicroStep | None:
        """The micro-step that a layer belongs to which is called now.

        It is the open one; within a backward, where a checkpointed layer runs again, that of its first run.
        """
        if running_backward() is not None:
            return self.backward.runs_again()
        self.backward.forward()
        return self.current

    def bind(self, homes: HomeExperts, expert_ids: torch.Tensor, micro_step: MicroStep | None) -> Instance:
        """Everything that a call needs. Collective if the micro-step has no plan.

        Args:
            expert_ids: `[T, K]` of this rank's rows.
        """
        if micro_step is None or not micro_step.layouts:
            self.counters.live_calls += micro_step is None and self.is_planned
            if torch.is_grad_enabled() and running_backward() is None:
                self.accumulation.begin_forward()
            positions = None if micro_step is None else micro_step.positions
            chosen = expert_ids if positions is None else expert_ids.index_select(0, positions)
            layout = exchange_layout(homes, chosen, self.topology, self.lockstep)
            return Instance(self, homes, layout, micro_step, torch.is_grad_enabled())
        assert self.transfers is not None
        if not micro_step.visited:
            micro_step.with_backward = torch.is_grad_enabled()
        layout = micro_step.layouts[homes.index]
        return PlannedInstance(self, homes, layout, micro_step, torch.is_grad_enabled(), self.transfers)


def exchange_layout(homes: HomeExperts, expert_ids: torch.Tensor, topology: Topology, lockstep: Lockstep) -> Layout:
    """The layout of an instance that nothing is known of, from an exchange of counts. Collective.

    Args:
        expert_ids: `[n, K]` of this rank's tokens.

    Raises:
        InputError: on all ranks, if one of them has an id that no expert has.
    """
    ids_NK, num_experts = expert_ids.cpu().numpy(), len(homes.home_E)
    problem = None
    if ids_NK.size and not 0 <= ids_NK.min() <= ids_NK.max() < num_experts:
        wrong = ids_NK.min() if ids_NK.min() < 0 else ids_NK.max()
        problem = InputError(
            f"MoE layer {homes.index} was given expert id {wrong}; ids should be from 0 to {num_experts - 1}"
        )
    counts_E = np.zeros(num_experts, np.int64) if problem else np.bincount(ids_NK.reshape(-1), minlength=num_experts)
    counts_RE = lockstep.agree(COUNTS, layer=homes.index, votes=counts_E, problem=problem)
    replicas = InstanceReplicas.none(topology.num_ranks)
    rows = place_rows(ids_NK, counts_RE, homes.home_E, topology.rank, replicas)
    return upload_layouts([rows], expert_ids.device)[0]


class Instance:
    """A call whose layout all ranks have agreed on as it was made.

    Args:
        layout: where rows go.
        micro_step: None outside of any.
        has_graph: whether a backward can follow.
    """

    def __init__(
        self, calls: LayerCalls, homes: HomeExperts, layout: Layout, micro_step: MicroStep | None, has_graph: bool
    ) -> None:
        self.homes = homes
        self.layout = layout
        self.micro_step = micro_step
        self.has_graph = has_graph
        self._calls = calls
        self._home_E = homes.home_E
        # Tells backwards of several forwards of one micro-step apart, on all ranks alike.
        self._forward = calls.lockstep.count
        self._recorder = calls.counters.recorder

    @property
    def positions(self) -> torch.Tensor | None:
        """`[n]` int64, where the micro-step's tokens stand among the rows of `hidden`; None if they are all."""
        return None if self.micro_step is None else self.micro_step.positions

    def mark(self, activity: int, *, outside: bool = False) -> None:
        """From here on the rank does something else; recorded if a Recorder is active.

        Args:
            outside: it belongs to no layer.
        """
        if self._recorder is not None:
            self._recorder.turn_to(activity, -1 if outside else self.homes.index)

    def send(self, kind: int, rows: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Exchange rows with the other ranks: from tokens to experts, or back.

        Args:
            kind: which of the layer's exchanges it is; see `lockstep.CALLS`.
        """
        tag = self._note(kind)
        send, receive = self.layout.send_splits, self.layout.recv_splits
        if back:
            send, receive = receive, send
        group, wait = self._calls.topology.experts, self._calls.lockstep.wait
        return exchange_rows(rows, send, receive, group, tag=tag, wait=wait)

    def begin_forward(self) -> None:
        """The layer's forward begins."""

    def begin_backward(self) -> None:
        """The layer's backward begins.

        Raises:
            RuntimeError: if what the forward used is gone: experts have moved, or another plan was applied.
        """
        if self._is_out_of_date():
            which = "a forward" if self.micro_step is None else f"the forward of micro-step {self.micro_step.index}"
            raise RuntimeError(
                f"MoE layer {self.homes.index}: another plan was applied between {which} and its backward; call "
                "backward() before plan(), adopt() or move()"
            )
        self._calls.accumulation.begin_backward(running_backward())

    def join_gradients(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Gradients of the home experts, `[E / R, ...]` for each stacked tensor, with those of all their replicas."""
        return gradients

    def _is_out_of_date(self) -> bool:
        return self._home_E is not self.homes.home_E

    def _note(self, kind: int) -> int:
        number = -1 if self.micro_step is None else self.micro_step.index
        return self._calls.lockstep.note(kind, self.homes.index, number, self._forward)


class PlannedInstance(Instance):
    """A call in a planned micro-step, which may have replicas.

    Args:
        transfers: bring the replicas' weights and return their gradients.

    Attributes:
        borrowing: the node of the graph that returns gradients of replicas.
    """

    def __init__(
        self,
        calls: LayerCalls,
        homes: HomeExperts,
        layout: Layout,
        micro_step: MicroStep,
        has_graph: bool,
        transfers: Transfers,
    ) -> None:
        super().__init__(calls, homes, layout, micro_step, has_graph)
        self.borrowing: weakref.ref[Any] | None = None
        self._step = micro_step
        self._transfers = transfers
        # A reentrant checkpoint's own backward lies within the one in which the layer runs again.
        self._made_in_backward = running_backward() is not None

    def begin_forward(self) -> None:
        """The layer's forward begins: bring what comes next."""
        self._approach()

    def begin_backward(self) -> None:
        """The layer's backward begins: bring what comes next."""
        super().begin_backward()
        borrowing = None if self.borrowing is None else self.borrowing()
        if borrowing is not None and not will_run(borrowing):
            self._check_left_out()
        self._approach()

    def replica_weights(self) -> list[torch.Tensor]:
        """This rank's replicas, `[count, ...]` for each stacked tensor. Waits until they are there."""
        return self._transfers.ring.replicas(self._step, self.homes.index)

    def return_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Start sending the gradients of `replica_weights` to their home ranks."""
        if not self._made_in_backward:
            self._calls.backward.follow()
        self._note(RETURNS)
        self._transfers.returns.start(self.homes, gradients, self.layout.replicas, self._step)

    def join_gradients(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Gradients of the home experts, `[E / R, ...]` for each stacked tensor, with those of all their replicas."""
        if not self.layout.replicas.count:
            return gradients
        return self._transfers.returns.join(self.homes, gradients)

    def _approach(self) -> None:
        # Copies are made of the weights as they were when the micro-step began.
        if self.layout.replicas.count or self.homes.is_staged:
            self._transfers.watch.check_unchanged(self.homes)
        self._transfers.ring.approach(self._step, self.homes.index, self._transfers.layers)

    def _is_out_of_date(self) -> bool:
        return super()._is_out_of_date() or self._step.plan_number != self._transfers.plan_number

    def _check_left_out(self) -> None:
        """Raises RuntimeError if the running backward leaves out gradients of replicas of experts that it is for."""
        if any(accumulates(self.homes, parameter) for parameter in self.homes.trained):
            raise RuntimeError(
                f"MoE layer {self.homes.index}: backward(inputs=...) with expert tensors alone would miss gradients "
                "of replicas; call backward() without inputs"
            )
