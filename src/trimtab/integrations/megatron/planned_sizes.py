"""Planned sizes for DeepEP: dispatches for which the host does not wait.

DeepEP's `Buffer.dispatch` returns as many rows as tokens arrive, and the host waits for their number. With
`num_worst_tokens` it returns that many rows and no counts: padding follows, with experts -1, and the host does not
wait. DeepEP allows it within a node, of at most 8 ranks. Megatron does not pass it.

This follows from DeepEP's source (commit dd758ca, `deep_ep/buffers/legacy.py` and `csrc/legacy/buffer.hpp`). It was
tested with a replacement of `deep_ep` on a CPU, never with DeepEP on a GPU.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe import fused_a2a

_MOST = "num_worst_tokens"


class _Dispatch:
    """In the place of `dispatch` of the buffer that all of Megatron's dispatchers in a process share.

    Every dispatch writes its counts to the same host memory, when it runs on the device. A later one that waits for its
    own would read those of an earlier one that has not run yet, so it first waits for that.

    Attributes:
        most: rows of the next dispatch; 0 for as many as tokens arrive, and after it.
        unread: recorded after the last dispatch that did not wait; None if the host has waited for it.
    """

    most: int
    unread: torch.cuda.Event | None = None

    def __init__(self, buffer: Any) -> None:
        # A buffer that Megatron replaces is freed at once, since the ranks do that together.
        self._buffer = weakref.ref(buffer)

    def __call__(self, x: Any, handle: Any = None, *args: Any, **options: Any) -> Any:
        buffer: Any = self._buffer()
        # With a handle nothing is counted.
        if handle is None:
            # The tokens of each node, if there are several.
            if self.most and options.get("num_tokens_per_rdma_rank") is None:
                options[_MOST], self.most = self.most, 0
            elif self.unread is not None:
                self.unread.synchronize()
                self.unread = None
        return type(buffer).dispatch(buffer, x, handle, *args, **options)


@contextmanager
def planned_rows(group: Any, hidden: torch.Tensor, rows: int) -> Iterator[None]:
    """The context of a dispatch by Megatron's DeepEP manager, after which the host does not wait, if DeepEP can do so.

    Without rows it waits: fused kernels of Transformer Engine leave out the padding of an empty tensor.

    Args:
        group: the manager's group.
        hidden: what it sends.
        rows: rows of experts that arrive on this rank; so many tokens at most.
    """
    buffer: Any = fused_a2a.get_buffer(group, fused_a2a.get_hidden_bytes(hidden))
    if not isinstance(buffer.dispatch, _Dispatch):
        if _MOST not in inspect.signature(buffer.dispatch).parameters:
            yield
            return
        buffer.dispatch = _Dispatch(buffer)
    dispatch: _Dispatch = buffer.dispatch
    dispatch.most = rows
    try:
        yield
    finally:
        is_used, dispatch.most = dispatch.most != rows, 0
        if is_used:
            dispatch.unread = torch.cuda.Event()
            dispatch.unread.record()


def multihot(indices: torch.Tensor, probs: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As Megatron's `_indices_to_multihot`, which waits for the number of indices that are not -1.

    Args:
        indices: `[n, K]` experts of this rank; -1 for those of others.
        probs: `[n, K]`, of any value where `indices` is -1.
        experts: experts of this rank, L.

    Returns:
        `[n, L]` bool and `[n, L]`.
    """
    shape = len(indices), experts + 1
    places = indices.masked_fill(indices < 0, experts)
    routing_map = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter_(1, places, value=True)
    probs = torch.zeros(shape, dtype=probs.dtype, device=indices.device).scatter(1, places, probs)
    return routing_map[:, :experts].contiguous(), probs[:, :experts].contiguous()
