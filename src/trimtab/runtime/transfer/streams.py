"""Streams of a device. Tests replace `has_streams` to run the CUDA branches of transfers on CPU tensors."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is queued on streams and runs beside the host."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Block the host until all work queued on the device is done. A device without streams has none."""
    if has_streams(device):
        torch.cuda.synchronize()


def start_timer(device: torch.device) -> Callable[[], Callable[[], float | None]]:
    """Time what is queued on the current stream from now on.

    Returns:
        A function that ends the time. It returns another one, for the seconds: None while the device is not done. On a
        device without streams they are those of the host.
    """
    if not has_streams(device):
        start = time.perf_counter()

        def stop_host() -> Callable[[], float | None]:
            seconds = time.perf_counter() - start
            return lambda: seconds

        return stop_host
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()

    def stop() -> Callable[[], float | None]:
        after.record()
        return lambda: before.elapsed_time(after) / 1e3 if after.query() else None

    return stop


def download(tensor: torch.Tensor) -> np.ndarray:
    """A tensor on the host. It waits for what the current stream computes, not for other streams."""
    if not has_streams(tensor.device):
        return tensor.numpy()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    target.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    return target.numpy()
