"""State of torch's autograd engine, from private functions of torch 2.13; and `SubstitutedValues`, a graph node."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's decorator, which takes 15 calls of Python in each backward also where no graph is made."""
    checked = torch.autograd.function.once_differentiable(backward)

    def run(ctx: Any, *gradients: Any) -> Any:
        return (checked if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


def running_backward() -> int | None:
    """The number of the backward that runs on this thread, or None."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def running_node() -> torch.autograd.graph.Node | None:
    """The graph node whose backward, hook or saved tensors run on this thread."""
    node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
    return node


def functions_in_forward() -> Iterator[Any]:
    """The `autograd.Function`s whose forward runs on this thread: their `ctx`, which is their node in backward."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals["ctx"]
            if isinstance(ctx, torch.autograd.function.BackwardCFunction):
                yield ctx
        frame = frame.f_back  # type: ignore[assignment]


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


def _is_within_compiled() -> bool:
    """Whether a function that torch.compile runs, in parts or as a whole, has called this one."""
    if "torch._dynamo" not in sys.modules:
        return False
    # None outside of compiled functions, False where compiling is disabled.
    return bool(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def require_eager() -> None:
    """Raises RuntimeError where calls are recorded to be repeated: each micro-step has other sizes and transfers."""
    if torch.compiler.is_compiling() or _is_within_compiled():
        raise RuntimeError(
            "MoE layers of a session can't run within torch.compile; compile the modules around them, or decorate the "
            "forward of the MoE block with torch.compiler.disable"
        )
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("MoE layers of a session can't be captured in a CUDA graph; capture the modules around them")


class SubstitutedValues(torch.autograd.Function):
    """`values` in the graph in place of `tensors` with equal values, perhaps of another dtype.

    The tensors are one of the shape of `values`, or with `is_list` one for each row of `values`.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, is_list: bool, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.is_list, ctx.dtype = is_list, tensors[0].dtype
        return values.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = grads[0].unbind() if ctx.is_list else [grads[0]]
        return None, None, *(part.to(ctx.dtype) for part in parts)
