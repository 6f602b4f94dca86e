"""A simulated accelerator: the runtime's CUDA branches on CPU tensors, with the least favourable timing.

Copies on side streams and messages run in one of four modes:

* `late`: as late as the runtime allows, when something waits for them. Until then their targets hold NaN, and their
  sources must not change. Messages of one process group match in the order in which they are posted, as with NCCL.
* `serial`: copies as before; every batch of messages is complete on both ends before the host goes on. A GPU does this
  if it runs one communication kernel at a time. Ranks that post batches in different orders block each other.
* `early`: compute runs late, see `helpers.late_compute`, and copies as soon as what they wait for has run.
* `lazy`: compute and copies run late, and freed memory is used again at once.

A missing wait gives NaN or `TransferRaceError`. In the first two modes compute runs at once; copies on a side stream
that has not waited for compute raise `TransferRaceError`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from helpers.late_compute import LateCompute, PendingReadError, addresses, alias, is_of_device, mark_late
from helpers.late_streams import Compute, Event, Stream, Work
from trimtab.array_type import Array
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.message_rounds import MOST_OPERATIONS
from trimtab.runtime.transfer.peer_memory import PeerMemory

MODES = ("late", "serial")
LATE_COMPUTE = ("early", "lazy")
# Tags of messages and of their acknowledgements in `serial`.
MESSAGE, ACKNOWLEDGEMENT = 0, 1


class TransferRaceError(RuntimeError):
    """Unordered work has used the same memory."""


class HostWaitError(RuntimeError):
    """The host has waited for the device where it must not."""


class LateDevice:
    """The device of one process.

    Attributes:
        compute: the default stream.
        copies, messages: how many there were.
        may_wait: whether the host may wait for it.
    """

    may_wait = True

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.compute = Stream(self) if mode in LATE_COMPUTE else Compute(self)
        self.late = LateCompute(self.compute) if mode in LATE_COMPUTE else None
        self.copies = self.messages = 0
        self._entered: list[Stream] = []
        self._streams: list[Stream] = []
        self._streams_of_groups: dict[int, Stream] = {}

    @property
    def current(self) -> Stream:
        """The stream that is current on the host."""
        return self._entered[-1] if self._entered else self.compute

    def make_stream(self) -> Stream:
        self._streams.append(Stream(self))
        return self._streams[-1]

    @contextmanager
    def enter(self, stream: Stream) -> Iterator[None]:
        """Make a side stream current, for copies only."""
        self._entered.append(stream)
        try:
            with _Copies(self, stream):
                yield
        finally:
            self._entered.pop()
            stream.has_waited = False

    def wait_on_host(self) -> None:
        """Raises HostWaitError within `unwaited`, unless a framework waits."""
        frame = None if self.may_wait else sys._getframe()
        while frame is not None and "/src/trimtab/" not in (path := frame.f_code.co_filename):
            if "/site-packages/" in path and "/torch/" not in path:
                return
            frame = frame.f_back
        if frame is not None:
            raise HostWaitError("the host waits for the device")

    def complete(self) -> None:
        """Run everything that is queued."""
        for stream in (self.compute, *self._streams):
            stream.run(stream.length)

    def synchronize(self) -> None:
        self.wait_on_host()
        self.complete()

    def to_host(self, plain: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        """As `Tensor.cpu`, or `Tensor.to` of the name of the host, for which the host waits."""
        if not is_of_device(tensor) or (args[:1] != ("cpu",) and plain is TO) or named.get("non_blocking"):
            return plain(tensor, *args, **named)
        self.synchronize()
        with _disable_current_modes():
            return plain(tensor, *args, **named)

    def to_list(self, tensor: torch.Tensor) -> Any:
        """As `Tensor.tolist`, for which the host waits."""
        self.synchronize()
        return TOLIST(tensor)

    def checked(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that the host is about to read. Raises PendingReadError if queued work writes it."""
        if any(stream.writes(addresses(tensor)) for stream in (self.compute, *self._streams)):
            raise PendingReadError(f"the host reads a tensor {list(tensor.shape)} that is not computed yet")
        return tensor

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between tensors of the same dtype."""
        if not stream.has_waited:
            raise TransferRaceError("a copy begins before compute that may still read its target")
        self.copies += 1
        if self.late is not None:
            self._copy_late(stream, alias(target), alias(source))
            return
        self._write(stream, target, _Unchanged(source, "a copy").check)

    def _copy_late(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy. Compute that is queued from now on sees NaN until then."""
        done: list[bool] = []

        def copy() -> None:
            done.append(True)
            _numpy(target)[:] = _numpy(source)

        mark_late(target)
        if self.mode == "lazy":
            self.compute.push(lambda: None if done else _numpy(target).fill(0xFF))
        stream.push(copy, _range(target))

    def post_late(self, operations: Sequence[dist.P2POp]) -> list[Work]:
        """As `batch_isend_irecv`; messages arrive when they are waited for."""
        _check_size(operations)
        # Messages wait for compute that was queued before.
        self.compute.run(self.compute.length)
        group = id(operations[0].group)
        stream = self._streams_of_groups.get(group) or self.make_stream()
        self._streams_of_groups[group] = stream
        for operation in operations:
            self.messages += 1
            if operation.op is dist.irecv:
                self._write(stream, operation.tensor, _receive_aside(operation))
            else:
                stream.push(_send_aside(operation))
        return [Work(stream.record_event(), self)]

    def post_serially(self, operations: Sequence[dist.P2POp]) -> list[Work]:
        """As `batch_isend_irecv`; returns when all messages are complete, on the other ends, too."""
        _check_size(operations)
        self.messages += len(operations)
        works = [_post(o.op, o.tensor, o, MESSAGE) for o in operations]
        for work in works:
            work.wait()
        other = {dist.isend: dist.irecv, dist.irecv: dist.isend}
        empty = torch.zeros(1)
        works = [_post(other[o.op], empty.clone(), o, ACKNOWLEDGEMENT) for o in operations]
        for work in works:
            work.wait()
        return [Work(self.compute.record_event(), self)]

    def _write(self, stream: Stream, target: torch.Tensor, read: Callable[[], Array]) -> None:
        """Queue writing the bytes that `read` returns. The target holds NaN until then."""
        if any(other.writes(_range(target)) for other in self._streams if other is not stream):
            raise TransferRaceError("two transfers write the same memory at a time")
        mark_late(target)
        # All bits set are NaN in every floating-point dtype. The version stays, as after a receive.
        _bytes(target).fill(0xFF)
        stream.push(lambda: np.copyto(_bytes(target), read()), _range(target))


class _Copies(TorchDispatchMode):
    """Queues copies on a side stream."""

    def __init__(self, device: LateDevice, stream: Stream) -> None:
        super().__init__()
        self._device, self._stream = device, stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        assert func is torch.ops.aten.copy_.default, f"{func} on a side stream is not simulated"
        target, source = args[:2]
        self._device.copy(self._stream, target, source)
        return target


class _Unchanged:
    """The bytes of a tensor that must not change while it is read."""

    def __init__(self, tensor: torch.Tensor, what: str) -> None:
        self._tensor, self._what = tensor, what
        self._before = _bytes(tensor).copy()

    def check(self) -> Array:
        if not np.array_equal(_bytes(self._tensor), self._before):
            raise TransferRaceError(f"the source of {self._what} changed while it was under way")
        return self._before


def _send_aside(operation: dist.P2POp) -> Callable[[], object]:
    """Send the present bytes of the tensor. Returns a function that ends the send."""
    source = _Unchanged(operation.tensor, "a message")
    work = _post(dist.isend, operation.tensor.detach().clone(), operation, MESSAGE)

    def end() -> None:
        source.check()
        work.wait()

    return end


def _receive_aside(operation: dist.P2POp) -> Callable[[], Array]:
    """Receive into other memory. Returns a function that waits for the bytes."""
    buffer = torch.empty_like(operation.tensor)
    work = _post(dist.irecv, buffer, operation, MESSAGE)

    def read() -> Array:
        work.wait()
        return _bytes(buffer)

    return read


def _check_size(operations: Sequence[dist.P2POp]) -> None:
    """Large NCCL groups can hang; see `message_rounds.py`."""
    if len(operations) > MOST_OPERATIONS:
        raise TransferRaceError(f"{len(operations)} operations in one batch would hang")


def _post(kind: Any, tensor: torch.Tensor, like: dist.P2POp, tag: int) -> dist.Work:
    """Post a message to or from the peer of an operation. Its tag is ignored, since NCCL has none."""
    peer = {"group_dst" if kind is dist.isend else "group_src": like.group_peer}
    work = kind(tensor, group=like.group, tag=tag, **peer)
    assert isinstance(work, dist.Work)
    return work


def _bytes(tensor: torch.Tensor) -> Array:
    return _numpy(tensor)


def _range(tensor: torch.Tensor) -> range:
    """The addresses of a contiguous tensor."""
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


NUMPY, TOLIST, CPU, TO = torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.to


def _numpy(tensor: torch.Tensor) -> Array:
    """The bytes of a contiguous tensor."""
    with _disable_current_modes():
        return NUMPY(tensor.detach().view(-1).view(torch.uint8))


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """Memory of the tensor is free when the stream has run what is queued when the tensor is dropped."""
    storage: Any = tensor.untyped_storage()
    if hasattr(storage, "streams"):
        storage.streams.append(stream)


@contextmanager
def install(mode: str, *, peers: bool = False, device: LateDevice | None = None) -> Iterator[LateDevice]:
    """A context in which CPU tensors are treated as those of a device with streams. At its end all queued work runs.

    Args:
        mode: one of `MODES` or `LATE_COMPUTE`.
        peers: ranks of a node can read each other's memory.
        device: one that was installed before, with the same mode; a new one by default.
    """
    assert mode in MODES + LATE_COMPUTE
    device = device or LateDevice(mode)

    def across(topology: Topology, layers: Sequence[HomeExperts], _: int | None = None) -> PeerMemory | None:
        return PeerMemory.in_host_memory(topology, layers)

    # Annotations of other packages name them.
    cuda = {
        "Stream": type("_Stream", (Stream,), {"__new__": lambda *_, **__: device.make_stream()}),
        "Event": type("_Event", (Event,), {"__new__": lambda *_, **__: Event(device)}),
        "stream": device.enter,
        "current_stream": lambda device_=None: device.current,
        "synchronize": device.synchronize,
        "empty_cache": lambda: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "has_streams", lambda device: True)
        patch.setattr(torch.Tensor, "record_stream", record_stream)
        for name, simulated in cuda.items():
            patch.setattr(torch.cuda, name, simulated)
        patch.setattr(dist, "batch_isend_irecv", device.post_serially if mode == "serial" else device.post_late)
        patch.setattr(PeerMemory, "across", across if peers else lambda *_: None)
        with device.late or nullcontext():
            if device.late is not None:
                patch.setattr(torch.Tensor, "numpy", lambda t, **_: NUMPY(device.checked(t)))
                patch.setattr(torch.Tensor, "tolist", lambda t: device.to_list(t))
                patch.setattr(torch.Tensor, "cpu", lambda t: device.to_host(CPU, t))
                patch.setattr(torch.Tensor, "to", lambda t, *args, **named: device.to_host(TO, t, *args, **named))
            _installed.append(device)
            try:
                yield device
            finally:
                _installed.remove(device)
            device.complete()


_installed: list[LateDevice] = []


@contextmanager
def unwaited() -> Iterator[None]:
    """A context in which Trimtab must not let the host wait for simulated devices, if any is installed."""
    devices = [device for device in _installed if device.may_wait]
    for device in devices:
        device.may_wait = False
    try:
        yield
    finally:
        for device in devices:
            device.may_wait = True
