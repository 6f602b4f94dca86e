"""`Backward`: which micro-step a layer belongs to that runs again in a backward, and when that backward ends.

A checkpointed layer runs again while autograd works on a node of its region, which was made as the region first ran.
Nodes have ascending sequence numbers. So the range of numbers in which a micro-step was open tells the micro-step,
wherever backward is called. Nodes that a reentrant checkpoint makes as it runs again belong to the micro-step that runs
again.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from trimtab.runtime.autograd.torch_engine import (
    call_after_backward,
    is_nested,
    next_node,
    running_backward,
    running_node,
)
from trimtab.runtime.layer.micro_step import BoundRoutes, MicroStep

# Micro-steps that are remembered.
REMEMBERED = 4096


@dataclass(eq=False)
class _Forward:
    """A range of sequence numbers in which a micro-step was open.

    Attributes:
        index: the micro-step's number.
        is_known: see `MicroStep.routes`.
        micro_step: None once another plan was applied.
    """

    start: int
    end: float
    index: int
    is_known: bool
    micro_step: MicroStep | None


class Backward:
    """Follows a session's forwards and backwards.

    Args:
        at_end: called as a backward ends that is followed.
        at_failure: called some time after it failed.
    """

    def __init__(self, at_end: Callable[[], None], at_failure: Callable[[], None]) -> None:
        self._at_end, self._at_failure = at_end, at_failure
        # By thread, since each counts its nodes from 0.
        self._forwards_of: dict[int, list[_Forward]] = {}
        self._forgotten = -1
        self._thread = threading.get_ident()
        self._is_open = False
        self._followed: int | None = None
        # The backward in which a layer ran again last, and the routes of its micro-step.
        self._again: tuple[int | None, BoundRoutes | None] | None = None

    def open(self, micro_step: MicroStep, is_known: bool) -> None:
        """Note that a micro-step begins; see `MicroStep.routes`.

        Raises:
            RuntimeError: if it is begun by another thread than those before it, whose sequence numbers differ.
        """
        thread = threading.get_ident()
        if thread != self._thread and any(forward.micro_step is not None for forward in self._forwards):
            raise RuntimeError("micro-steps of one plan were begun by different threads; use one thread for a session")
        self._thread = thread
        self._forwards_of.setdefault(thread, [])
        self.forward()
        if len(self._forwards) == REMEMBERED:
            self._forgotten = int(self._forwards.pop(0).end)
        self._forwards.append(_Forward(next_node(), math.inf, micro_step.index, is_known, micro_step))
        self._is_open = True

    def close(self) -> None:
        """Note that the open micro-step ends."""
        self._is_open = False
        self._forwards[-1].end = next_node()
        if self._forwards[-1].start == self._forwards[-1].end:
            self._forwards.pop()

    def forget(self) -> None:
        """Another plan is applied: micro-steps of the one before can't run again."""
        for forward in itertools.chain.from_iterable(self._forwards_of.values()):
            forward.micro_step = None

    def forward(self) -> None:
        """Note that the host is outside of any backward; one that did not end has failed.

        Raises:
            RuntimeError: if another thread has a micro-step open.
        """
        if self._is_open and threading.get_ident() != self._thread:
            raise RuntimeError("a layer was called by another thread than the one that opened the micro-step")
        self._again = None
        if self._followed is not None:
            self._fail()

    def runs_again(self) -> BoundRoutes | None:
        """The routes of a layer that is called within a backward, as it ran first; None if that was outside any.

        Raises:
            RuntimeError: if that micro-step can't run again.
        """
        running, number = running_backward(), running_node()
        if self._again is not None and self._again[0] != running and is_nested():
            # A node that a checkpoint made as it ran again, unless it was made by the first run.
            first_run = self._find(number) if self._made_in_closed(number) else None
            return self._again[1] if first_run is None else first_run
        routes = self._find(number)
        self.follow()
        self._again = running, routes
        return routes

    def follow(self) -> None:
        """Call `at_end` when the running backward ends.

        Raises:
            RuntimeError: if it was called within another backward that is followed.
        """
        running = running_backward()
        if running == self._followed:
            return
        if self._followed is not None:
            if is_nested():
                raise RuntimeError(
                    "backward() through MoE layers was called within another backward through MoE layers; call one "
                    "after the other"
                )
            self._again = None
            self._fail()
        self._followed = running
        call_after_backward(self._end)

    def _fail(self) -> None:
        """The backward that was followed did not end."""
        self._followed = None
        self._at_failure()

    def _made_in_closed(self, number: int) -> bool:
        """Whether a node was made in a micro-step that is closed now. Each thread has its own sequence numbers."""
        if threading.get_ident() != self._thread:
            return False
        return any(forward.start <= number < forward.end < math.inf for forward in self._forwards)

    def _find(self, number: int) -> BoundRoutes | None:
        place = bisect.bisect_right(self._forwards, number, key=lambda forward: forward.start) - 1
        if number <= self._forgotten:
            raise RuntimeError(f"a layer runs again that first ran more than {REMEMBERED} micro-steps ago")
        if place < 0 or number >= self._forwards[place].end:
            self._check_other_threads(number)
            return None
        forward = self._forwards[place]
        if forward.micro_step is None:
            raise RuntimeError(
                f"a checkpointed MoE layer of micro-step {forward.index} runs again after another plan was applied; "
                "call backward() for all micro-steps of a plan before the next one"
            )
        return forward.micro_step.routes(forward.is_known)

    def _check_other_threads(self, number: int) -> None:
        """Raises RuntimeError if a node may be of a micro-step that another thread began; its plan was replaced."""
        for thread, forwards in self._forwards_of.items():
            if thread != self._thread and any(forward.start <= number < forward.end for forward in forwards):
                raise RuntimeError(
                    "a checkpointed layer runs again that may be of a micro-step which another thread began under an "
                    "earlier plan; use one thread for a session"
                )

    @property
    def _forwards(self) -> list[_Forward]:
        return self._forwards_of.get(self._thread, [])

    def _end(self) -> None:
        self._followed = self._again = None
        self._at_end()
