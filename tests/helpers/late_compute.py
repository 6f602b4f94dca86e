"""Compute that runs late, and memory that is used again at once: what `late_device` lets tensors of its device do.

`LateCompute` queues every operation on tensors of the device until an event, a collective or a read on the host needs
it. As on CUDA, `item()`, and operations whose output sizes depend on values, wait. `numpy()` of a tensor that is not
computed yet raises `PendingReadError`.

Results are in blocks of a `BlockPool`. A block is free when the host drops its last tensor, although queued work may
still use it, as with CUDA's caching allocator: it is overwritten with NaN in the order of the compute stream, and the
next tensor of its size gets it. Only streams that `record_stream` named are waited for.

Tensors of the device are parameters, what is computed from tensors of the device, and `*_like` with a device argument.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_any, tree_map

from trimtab.array_type import Array

aten: Any = torch.ops.aten
EMPTY = {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.empty, aten.empty_strided}
# Their results on a CPU have other sizes than on CUDA and `meta`.
ON_HOST = {aten.log_sigmoid_forward, aten._embedding_bag, aten._embedding_bag_forward_only}
# They change sizes or memory, not values.
AT_ONCE = {aten.resize_, aten.set_, aten.detach_}


class PendingReadError(RuntimeError):
    """The host has read a tensor that is not computed yet."""


class BlockPool:
    """Memory of the device.

    Args:
        poison: called with a freed block, which queued compute may still use.
    """

    def __init__(self, poison: Callable[[Array], None]) -> None:
        self._poison = poison
        self._free: defaultdict[int, list[Array]] = defaultdict(list)
        self._dropped: deque[tuple[Array, list[Any]]] = deque()
        self.reused = 0

    def tensor(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the block that was freed last, if there is one of its size class, else in a new one."""
        self._take_dropped()
        elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
        nbytes = 1 << max(6, (elements * dtype.itemsize - 1).bit_length())
        self.reused += bool(self._free[nbytes])
        block = self._free[nbytes].pop() if self._free[nbytes] else np.full(nbytes, 0xFF, np.uint8)
        tensor = torch.from_numpy(block).view(dtype).as_strided(size, stride)
        storage: Any = tensor.untyped_storage()
        storage.block, storage.streams = block, []
        weakref.finalize(storage, self._dropped.append, (block, storage.streams)).atexit = False
        return tensor

    def _take_dropped(self) -> None:
        waiting = []
        while self._dropped:
            block, events = self._dropped.popleft()
            # Streams become the events of what they have queued now.
            events[:] = [each if hasattr(each, "query") else each.record_event() for each in events]
            if all(event.query() for event in events):
                self._poison(block)
                self._free[len(block)].append(block)
            else:
                waiting.append((block, events))
        self._dropped.extend(waiting)


def is_of_device(value: Any) -> bool:
    """Whether a value is a tensor of the device."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    return isinstance(value, torch.nn.Parameter) or hasattr(value.untyped_storage(), "is_late")


def alias(value: Any) -> Any:
    """A tensor of the same memory, which does not keep a block of the pool in use; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    block = getattr(value.untyped_storage(), "block", None)
    if block is None:
        return value.detach()
    whole = torch.from_numpy(block).view(value.dtype)
    return whole.as_strided(value.size(), value.stride(), value.storage_offset())


def addresses(tensor: torch.Tensor) -> range:
    start = tensor.untyped_storage().data_ptr()
    return range(start, start + tensor.untyped_storage().nbytes())


class LateCompute(TorchDispatchMode):
    """Queues operations on a stream. See the module.

    Args:
        stream: the compute stream, with `push` and `synchronize`.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream
        self.pool = BlockPool(lambda block: stream.push(lambda: block.fill(0xFF)))
        self.queued = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made_here = func.overloadpacket in EMPTY and "like" in func._schema.name and kwargs.get("device") is not None
        if not (made_here or tree_any(is_of_device, (args, kwargs))):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            self._run()
            mark_late(args)
            return func(*args, **kwargs)
        if func.is_view or func.overloadpacket in AT_ONCE:
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            # A GPU has random numbers of its own: late ones would be drawn after later ones of the host.
            self._run()
            return self._compute_now(func, args, kwargs)
        if func._schema.is_mutable:
            return self._change(func, args, kwargs)
        if not all(str(each.type) in ("Tensor", "List[Tensor]") for each in func._schema.returns):
            self._stream.synchronize()
            return func(*args, **kwargs)
        return self._compute(func, args, kwargs)

    def _change(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Queue an operation in place."""
        changed = [kwargs.get(a.name, args[i] if i < len(args) else None)
                   for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]  # fmt: skip
        mark_late(changed)
        self._queue(func, args, kwargs, changed, lambda _: None)
        return None if not func._schema.returns else changed[0] if len(changed) == 1 else tuple(changed)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Queue an operation with new results, whose sizes are those of the operation on `meta` tensors."""
        if func.overloadpacket in ON_HOST:
            self._run()
            return self._compute_now(func, args, kwargs)
        try:
            shapes = func(*tree_map(_to_meta, args), **{**tree_map(_to_meta, kwargs), **_on_meta(kwargs)})
        except (NotImplementedError, RuntimeError):
            # The sizes depend on values.
            self._stream.synchronize()
            return self._compute_now(func, args, kwargs)
        results = tree_map(self._allocate, shapes)
        mark_late(results)
        if func.overloadpacket not in EMPTY:
            targets = tree_map(alias, results)

            def store(values: Any) -> None:
                tree_map(lambda target, value: target.copy_(value) if value is not None else None, targets, values)

            self._queue(func, args, kwargs, results, store)
        return results

    def _run(self) -> None:
        """All work, for which the host of a GPU would not wait."""
        self._stream.run(self._stream.length)

    def _compute_now(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation at once."""
        results = func(*args, **kwargs)
        mark_late(results)
        return results

    def _queue(self, func: Any, args: Any, kwargs: Any, written: Any, store: Callable[[Any], object]) -> None:
        inputs = tree_map(alias, (args, kwargs))
        self.queued += 1

        def run() -> None:
            with _disable_current_modes(), torch._C._AutoDispatchBelowADInplaceOrView():
                store(func(*inputs[0], **inputs[1]))

        ranges: list[range] = []
        tree_map(lambda each: ranges.append(addresses(each)) if isinstance(each, torch.Tensor) else None, written)
        self._stream.push(run, *ranges)

    def _allocate(self, like: Any) -> Any:
        if not isinstance(like, torch.Tensor):
            return like
        return self.pool.tensor(like.size(), like.stride(), like.dtype)


def mark_late(values: Any) -> None:
    """Make tensors those of the device."""

    def mark(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage: Any = value.untyped_storage()
            storage.is_late = True

    tree_map(mark, values)


def _to_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _on_meta(kwargs: Any) -> dict[str, Any]:
    return {"device": "meta"} if kwargs.get("device") is not None else {}
