"""`Backward`: which micro-step a layer belongs to that runs again in a backward, and when that backward ends.

A checkpointed layer runs again while autograd works on a node of its region, which was made as the region first ran.
Nodes have ascending sequence numbers. So the range of numbers in which a micro-step was open tells the micro-step,
wherever backward is called. Nodes that a reentrant checkpoint makes as it runs again belong to the micro-step that runs
again.
"""

from __future__ import annotations

import bisect
import math
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trimtab.runtime.micro_step import MicroStep

# Private names of torch, of its autograd engine, as of 2.13.
_running_backward = torch._C._current_graph_task_id
_running_node = torch._C._current_autograd_node
_sequence_number = torch._C._autograd._get_sequence_nr

# Micro-steps of one plan that are remembered.
REMEMBERED = 4096


@dataclass(eq=False)
class _Forward:
    """A range of sequence numbers in which a micro-step was open.

    Attributes:
        bound: the micro-step, as long as something else needs it.
        bind: makes it again, without communication; None once another plan was applied.
    """

    start: int
    end: float
    index: int
    bound: weakref.ref[MicroStep]
    bind: Callable[[], MicroStep] | None


def running_backward() -> int | None:
    """The number of the backward that this thread is in, or None."""
    number = _running_backward()
    return None if number == -1 else number


class Backward:
    """Follows a session's forwards and backwards.

    Args:
        at_end: called as a backward ends that is followed.
        at_failure: called some time after it failed.
    """

    def __init__(self, at_end: Callable[[], None], at_failure: Callable[[], None]) -> None:
        self._at_end, self._at_failure = at_end, at_failure
        self._forwards: list[_Forward] = []
        self._forgotten = -1
        self._thread = 0
        self._last_forward = 0
        self._followed: int | None = None
        self._again: tuple[int, MicroStep | None] | None = None

    def open(self, micro_step: MicroStep, bind: Callable[[], MicroStep]) -> None:
        """Say that a micro-step begins.

        Raises:
            RuntimeError: if it is begun by another thread than those before it.
        """
        thread = threading.get_ident()
        if self._forwards and thread != self._thread:
            raise RuntimeError("micro-steps of one plan were begun by different threads; use one thread for a session")
        self._thread = thread
        self.forward()
        if len(self._forwards) == REMEMBERED:
            self._forgotten = int(self._forwards.pop(0).end)
        start = _sequence_number()
        self._forwards.append(_Forward(start, math.inf, micro_step.index, weakref.ref(micro_step), bind))

    def close(self) -> None:
        """Say that the open micro-step ends."""
        self.forward()
        self._forwards[-1].end = _sequence_number()

    def forget(self) -> None:
        """Another plan is applied: micro-steps of the one before can't run again."""
        for forward in self._forwards:
            forward.bind = None

    def forward(self) -> None:
        """Note that the host is outside of any backward; one that did not end has failed."""
        if self._followed is not None:
            self._fail()
        self._again = None
        self._last_forward = _sequence_number()

    def runs_again(self) -> MicroStep | None:
        """The micro-step of a layer that is called within a backward; None if it ran outside any.

        Raises:
            RuntimeError: if that micro-step can't run again.
        """
        running, node = _running_backward(), _running_node()
        number = -1 if node is None else node._sequence_nr()
        if self._again is not None and self._again[0] != running and self._made_by_rerun(number):
            return self._again[1]
        micro_step = self._find(number)
        self._again = running, micro_step
        if micro_step is not None:
            self.follow()
        return micro_step

    def follow(self) -> None:
        """Call `at_end` when the running backward ends.

        Raises:
            RuntimeError: if it was called within another backward that is followed.
        """
        running = running_backward()
        if running == self._followed:
            return
        if self._followed is not None:
            if self._is_nested():
                raise RuntimeError(
                    "backward() through MoE layers was called within another backward through MoE layers; call one "
                    "after the other"
                )
            self._fail()
        self._followed = running
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def _fail(self) -> None:
        """The backward that was followed did not end."""
        self._followed = self._again = None
        self._at_failure()

    def _is_nested(self) -> bool:
        """Was the running backward called within another one? On CUDA, backwards run on threads of their own."""
        frame, calls = sys._getframe(), 0
        while frame is not None:
            calls += frame.f_code is torch.autograd.graph._engine_run_backward.__code__
            frame = frame.f_back  # type: ignore[assignment]
        return calls > (threading.get_ident() == self._thread)

    def _made_by_rerun(self, number: int) -> bool:
        """Was a node made while a layer ran again? Other threads count on their own, so that they tell nothing."""
        return threading.get_ident() != self._thread or number > self._last_forward

    def _find(self, number: int) -> MicroStep | None:
        place = bisect.bisect_right(self._forwards, number, key=lambda forward: forward.start) - 1
        if number <= self._forgotten:
            raise RuntimeError(f"a layer runs again that first ran more than {REMEMBERED} micro-steps ago")
        if place < 0 or number >= self._forwards[place].end:
            return None
        forward = self._forwards[place]
        if forward.bind is None:
            raise RuntimeError(
                f"a checkpointed MoE layer of micro-step {forward.index} runs again after another plan was applied; "
                "call backward() for all micro-steps of a plan before the next one"
            )
        micro_step = forward.bound()
        if micro_step is None:
            micro_step = forward.bind()
            forward.bound = weakref.ref(micro_step)
        return micro_step

    def _end(self) -> None:
        self._followed = self._again = None
        self._at_end()
