"""Backward on a thread of its own, as torch runs the nodes of CUDA tensors.

On a CPU autograd runs nodes on the thread that calls `backward`. On a GPU it runs them on a thread of the engine, which
Python has not started: `threading.current_thread()` is a `_DummyThread` there, its stack does not contain the call of
the outermost backward, and it counts graph nodes by itself. `make test-backward-thread` runs tests of ranks with it.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.autograd import Variable
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Call = tuple[Callable[[], Any], list[Any], Any]
"""What to run, where its result or error goes, and the lock that is released then."""

calls: queue.SimpleQueue[Call] = queue.SimpleQueue()


class EngineOnThread:
    """torch's engine, whose outermost backwards run on one thread.

    Attributes:
        count: backwards that ran there.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._thread: int | None = None
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **options: Any) -> Any:
        """`_ImperativeEngine.run_backward`."""
        if self._thread is None:
            # Not by `threading`, of which the engine's threads know nothing.
            self._thread = _thread.start_new_thread(_work, ())
        if threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1:
            return self._engine.run_backward(*args, **options)
        self.count += 1
        with_gradients = torch.is_grad_enabled()
        # Torch hands the state of the caller's thread on.
        modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]

        def run() -> Any:
            with ExitStack() as stack:
                for mode in (torch.set_grad_enabled(with_gradients), *modes):
                    stack.enter_context(mode)
                return self._engine.run_backward(*args, **options)

        results: list[Any] = []
        done = _thread.allocate_lock()
        done.acquire()
        calls.put((run, results, done))
        done.acquire()
        value, error = results[0]
        if error is not None:
            raise error
        return value


def _work() -> None:
    while True:
        run, results, done = calls.get()
        try:
            results.append((run(), None))
        except BaseException as error:
            results.append((None, error))
        # The graph is freed on the thread of the caller.
        del run
        done.release()


ENGINE: Any = EngineOnThread(Variable._execution_engine)  # type: ignore[attr-defined]


@contextmanager
def backward_on_thread() -> Iterator[None]:
    """A context in which outermost backwards run on the thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Variable, "_execution_engine", ENGINE)
        yield
