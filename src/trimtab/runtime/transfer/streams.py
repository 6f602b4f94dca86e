"""Streams of a device. Tests replace `has_streams` to run the CUDA branches of transfers on CPU tensors."""

from __future__ import annotations

import torch


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is queued on streams and runs beside the host."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Block the host until all work queued on the device is done. A device without streams has none."""
    if has_streams(device):
        torch.cuda.synchronize()
