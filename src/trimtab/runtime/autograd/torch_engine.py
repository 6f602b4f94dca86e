"""What torch's autograd engine is doing: the private names of torch that the runtime relies on, as of torch 2.13."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch


def running_backward() -> int | None:
    """The number of the backward that this thread is in, or None."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def running_node() -> int:
    """The sequence number of the node whose backward, hook or saved tensors this thread is working on; -1 if none."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def next_node() -> int:
    """The sequence number that the next node will have that this thread makes."""
    return torch._C._autograd._get_sequence_nr()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call something when the running backward ends without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def is_nested() -> bool:
    """Whether the running backward was called within another one, as a reentrant checkpoint does."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        calls += frame.f_code is torch.autograd.graph._engine_run_backward.__code__
        frame = frame.f_back  # type: ignore[assignment]
    # The engine's own threads, which have CUDA's nodes, did not call the outermost backward.
    is_engines = isinstance(threading.current_thread(), threading._DummyThread)
    return calls > (0 if is_engines else 1)


def will_run(node: torch.autograd.graph.Node) -> bool:
    """Does the running backward come to a node?

    Raises:
        RuntimeError: if the node stands for a tensor that `torch.autograd.grad` differentiates by.
    """
    return torch._C._will_engine_execute_node(node)
