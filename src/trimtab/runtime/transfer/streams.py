"""Streams of a device, and `BackgroundCopies`: copies during compute, on a side stream or on a thread.

On CUDA streams keep the order: a copy starts after compute that was queued before it, which may still read the target,
and users of the target wait for the copy's event. Tests without a GPU check this order on simulated streams
(`tests/helpers/late_device.py`): they replace `has_streams` to run the CUDA branches of transfers on CPU tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

Wait = Callable[[], object]
"""Waits for a transfer: on the host, or on the current CUDA stream."""


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is queued on streams and runs beside the host."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Block the host until all work queued on the device is done. A device without streams has none."""
    if has_streams(device):
        torch.cuda.synchronize()


def release_cache(device: torch.device) -> None:
    """Give memory of the device back that torch keeps for later tensors. A device without streams has none."""
    if has_streams(device):
        torch.cuda.empty_cache()


def download(tensor: torch.Tensor) -> np.ndarray:
    """A tensor on the host. It waits for what the current stream computes, not for other streams."""
    return start_download(tensor)()


def start_download(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """Copy a tensor to the host. Returns a function that waits for the copy, and returns it."""
    if not has_streams(tensor.device):
        return tensor.numpy
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    target.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> np.ndarray:
        done.synchronize()
        return target.numpy()

    return wait


class BackgroundCopies:
    """Copies tensors in the order of the calls, without blocking the caller."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu_s = 0.0
        self._stream = torch.cuda.Stream(device, priority=-1) if has_streams(device) else None
        # One worker, so that copies keep their order.
        self._pool = ThreadPoolExecutor(1, "trimtab-copies") if self._stream is None else None

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Wait:
        """Copy (target, source) pairs of equal shape and dtype, after compute that was queued before this call.

        Returns:
            A function to call before the targets are used. On CUDA the current stream waits, not the host.
        """
        if self._stream is not None:
            return self._on_stream(self._stream, pairs)
        assert self._pool is not None
        return self._pool.submit(self._copy, [(_bytes(target), _bytes(source)) for target, source in pairs]).result

    def upload(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Wait]:
        """Copy tensors to new memory of the device. Returns the copies, and a function to call before they are used."""
        targets = [torch.empty_like(source, device=self._device) for source in sources]
        if self._stream is not None:
            for target in targets:
                # Nothing may ever wait for the copy.
                target.record_stream(self._stream)
        return targets, self.start([*zip(targets, sources, strict=True)])

    def take_cpu_s(self) -> float:
        """Seconds of CPU time of the copying thread since the last call."""
        spent, self._cpu_s = self._cpu_s, 0.0
        return spent

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _copy(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        # numpy copies without the interpreter's lock, on this thread only.
        start = time.thread_time()
        for target, source in pairs:
            np.copyto(target, source)
        self._cpu_s += time.thread_time() - start

    @staticmethod
    def _on_stream(stream: torch.cuda.Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Wait:
        # The targets may still be read by compute that was queued earlier.
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        done = stream.record_event()
        return lambda: torch.cuda.current_stream(stream.device).wait_event(done)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().view(-1).view(torch.uint8).numpy()
