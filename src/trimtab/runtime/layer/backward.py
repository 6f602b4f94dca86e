"""`Backward`: finds the micro-step of a layer that activation checkpointing recomputes, and calls back when a backward
pass ends.

Activation checkpointing recomputes a layer during backward. Autograd is then executing a node that the forward of the
checkpointed region created. A reentrant checkpoint is such a node itself: its forward is on the stack when the layer is
called, and the micro-step is noted on it. Others have numbers: each thread numbers its nodes in ascending order, from
0. The range of numbers that were assigned while a micro-step was open therefore identifies the micro-step, wherever
backward is called, together with the thread. Nodes that a reentrant checkpoint creates when it recomputes a layer
belong to the same micro-step.
"""

from __future__ import annotations

import bisect
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from trimtab.runtime.autograd.torch_engine import (
    call_after_backward,
    functions_in_forward,
    is_nested,
    next_node,
    running_backward,
    running_node,
)
from trimtab.runtime.layer.micro_step import BoundRoutes

# Micro-steps whose ranges are kept.
KEPT_FORWARDS = 512
# The attribute of a reentrant checkpoint's node: the `_NodeRange` of its forward, None outside of micro-steps.
MICRO_STEP = "_trimtab_micro_step"


class _Thread:
    """A thread for as long as it runs; identifiers of threads are used again."""


_of_thread = threading.local()


def _this_thread() -> _Thread:
    """The same object in all calls of a thread."""
    try:
        return _of_thread.thread
    except AttributeError:
        _of_thread.thread = _Thread()
        return _of_thread.thread


@dataclass(eq=False)
class _NodeRange:
    """The range of sequence numbers that were assigned while a micro-step was open.

    Attributes:
        start, end: the range, without `end`; infinite while the micro-step is open.
        index: the micro-step's number.
    """

    start: int
    end: float
    index: int


class Backward:
    """Tracks a session's micro-steps and backward passes.

    A backward is *tracked* from the first MoE layer in it until it ends.

    Args:
        at_end: called when a tracked backward ends.
        at_failure: called after a tracked backward failed, by the next micro-step, plan, layer call or tracked
            backward.
    """

    def __init__(self, at_end: Callable[[], None], at_failure: Callable[[], None]) -> None:
        self._at_end, self._at_failure = at_end, at_failure
        # Those of threads that have ended are dropped, but for the present one's.
        self._forwards_of = weakref.WeakKeyDictionary[_Thread, list[_NodeRange]]()
        self._forwards: list[_NodeRange] = []
        # Of micro-steps of this plan: returns the routes.
        self._routes = weakref.WeakKeyDictionary[_NodeRange, Callable[[], BoundRoutes]]()
        # The largest sequence number of this thread's ranges that are not kept any more.
        self._dropped = -1
        self._thread = _this_thread()
        self._is_open = False
        self._tracked: int | None = None
        # The last backward in which a layer was recomputed, and the routes of its micro-step.
        self._rerun: tuple[int | None, BoundRoutes | None] | None = None

    def open(self, index: int, routes: Callable[[], BoundRoutes]) -> None:
        """Call it when a micro-step begins.

        Args:
            index: the micro-step's number.
            routes: returns its routes, as the ranks agreed on them.

        Raises:
            RuntimeError: if another thread began earlier micro-steps of the plan; sequence numbers are per thread.
        """
        thread = _this_thread()
        if thread is not self._thread:
            if any(forward in self._routes for forward in self._forwards):
                raise RuntimeError(
                    "micro-steps of one plan were begun by different threads; use one thread for a session"
                )
            self._thread, self._dropped = thread, -1
            self._forwards = self._forwards_of.get(thread, [])
        self._forwards_of[thread] = self._forwards
        self.leave_backward()
        if len(self._forwards) == KEPT_FORWARDS:
            self._dropped = int(self._forwards.pop(0).end)
        self._forwards.append(_NodeRange(next_node(), math.inf, index))
        self._routes[self._forwards[-1]] = routes
        self._is_open = True

    def close(self) -> None:
        """Call it when the open micro-step ends."""
        self._is_open = False
        self._forwards[-1].end = next_node()
        if self._forwards[-1].start == self._forwards[-1].end:
            self._forwards.pop()

    def end_plan(self) -> None:
        """Call it when another plan is applied. Micro-steps of the plan before can't be recomputed."""
        self._routes.clear()

    def note_checkpoints(self) -> None:
        """Call it in a layer's forward without gradients: reentrant checkpoints around it belong to its micro-step."""
        micro_step = self._forwards[-1] if self._is_open else None
        for checkpoint in functions_in_forward():
            setattr(checkpoint, MICRO_STEP, micro_step)

    def leave_backward(self) -> None:
        """Call it outside of any backward. A tracked backward that has not ended has failed.

        Raises:
            RuntimeError: if another thread has a micro-step open.
        """
        if self._is_open and _this_thread() is not self._thread:
            raise RuntimeError("a layer was called by another thread than the one that opened the micro-step")
        self._rerun = None
        if self._tracked is not None:
            self._fail()

    def routes_of_rerun(self) -> BoundRoutes | None:
        """Routes of the micro-step in which the layer now being recomputed had its forward.

        None if that was outside any micro-step.

        Raises:
            RuntimeError: if that micro-step can't be recomputed.
        """
        running, node = running_backward(), running_node()
        number = -1 if node is None else node._sequence_nr()
        noted = hasattr(node, MICRO_STEP)
        if not noted and self._rerun is not None and self._rerun[0] != running and is_nested():
            # The running node was created by the forward, or when a reentrant checkpoint recomputed the layer.
            routes = self._find(number) if self._created_in_closed_micro_step(number) else None
            return self._rerun[1] if routes is None else routes
        routes = self._routes_of(getattr(node, MICRO_STEP)) if noted else self._find(number)
        self.track()
        self._rerun = running, routes
        return routes

    def track(self) -> None:
        """Track the running backward: call `at_end` when it ends.

        Raises:
            RuntimeError: if it was called within another tracked backward.
        """
        running = running_backward()
        if running == self._tracked:
            return
        if self._tracked is not None:
            if is_nested():
                raise RuntimeError(
                    "backward() through MoE layers was called within another backward through MoE layers; call one "
                    "after the other"
                )
            self._rerun = None
            self._fail()
        self._tracked = running
        call_after_backward(self._end)

    def _fail(self) -> None:
        self._tracked = None
        self._at_failure()

    def _created_in_closed_micro_step(self, number: int) -> bool:
        """Whether a node was created in a micro-step of this thread that is closed now."""
        if _this_thread() is not self._thread:
            return False
        return any(forward.start <= number < forward.end < math.inf for forward in self._forwards)

    def _find(self, number: int) -> BoundRoutes | None:
        """The routes of the micro-step in which a node was created; None if it was outside of micro-steps."""
        place = bisect.bisect_right(self._forwards, number, key=lambda forward: forward.start) - 1
        if number <= self._dropped:
            raise RuntimeError(f"a layer is recomputed that had its forward more than {KEPT_FORWARDS} micro-steps ago")
        if place < 0 or number >= self._forwards[place].end:
            self._check_other_threads(number)
            return None
        return self._routes_of(self._forwards[place])

    def _routes_of(self, micro_step: _NodeRange | None) -> BoundRoutes | None:
        """The routes of a micro-step, None outside of any. Raises RuntimeError after another plan was applied."""
        if micro_step is None:
            return None
        if micro_step not in self._routes:
            raise RuntimeError(
                f"a checkpointed MoE layer of micro-step {micro_step.index} is recomputed after another plan was "
                "applied; call backward() for all micro-steps of a plan before the next one"
            )
        return self._routes[micro_step]()

    def _check_other_threads(self, number: int) -> None:
        """Raises RuntimeError if the node may be of a micro-step that another thread began, perhaps one that ended."""
        if _this_thread() is self._thread and number >= next_node():
            raise RuntimeError(
                "a checkpointed layer is recomputed whose forward ran under an earlier plan, on a thread that has "
                "ended; call backward() before the next plan"
            )
        for thread, forwards in self._forwards_of.items():
            if thread is not self._thread and any(forward.start <= number < forward.end for forward in forwards):
                raise RuntimeError(
                    "a checkpointed layer is recomputed that may be of a micro-step which another thread began under "
                    "an earlier plan; use one thread for a session"
                )

    def _end(self) -> None:
        self._tracked = self._rerun = None
        self._at_end()
