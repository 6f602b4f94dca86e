"""State of torch's autograd engine, from private functions of torch 2.13."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch


def running_backward() -> int | None:
    """The number of the backward that runs on this thread, or None."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def running_node() -> int:
    """The sequence number of the graph node whose backward, hook or saved tensors run on this thread; -1 if none."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def next_node() -> int:
    """The sequence number of the next graph node that this thread will create."""
    return torch._C._autograd._get_sequence_nr()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward ends without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def is_nested() -> bool:
    """Whether the running backward was called within another backward, as reentrant checkpoints do."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        calls += frame.f_code is torch.autograd.graph._engine_run_backward.__code__
        frame = frame.f_back  # type: ignore[assignment]
    # The stack of the engine's own threads, which run CUDA nodes, does not contain the call of the outermost backward.
    on_engine_thread = isinstance(threading.current_thread(), threading._DummyThread)
    return calls > (0 if on_engine_thread else 1)


def will_run(node: torch.autograd.graph.Node) -> bool:
    """Whether the running backward will execute a graph node.

    Raises:
        RuntimeError: if the node is that of a tensor passed to `torch.autograd.grad`.
    """
    return torch._C._will_engine_execute_node(node)


def is_within_compiled() -> bool:
    """Whether a function that torch.compile runs, in parts or as a whole, has called this one."""
    if "torch._dynamo" not in sys.modules:
        return False
    # None outside of compiled functions, False where compiling is disabled.
    return bool(torch._C._dynamo.eval_frame.get_eval_frame_callback())
