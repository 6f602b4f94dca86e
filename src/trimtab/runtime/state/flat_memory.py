"""Several tensors in one piece of memory, for one copy or one mapping of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trimtab.array_type import Array

# Bytes; tensors start on cache lines.
ALIGNMENT = 64

Like = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a tensor."""


def packed_bytes(like: Sequence[Like]) -> int:
    """Bytes of memory for tensors, one after the other."""
    return sum(_aligned(shape, dtype) for shape, dtype in like)


def carve(memory: torch.Tensor, like: Sequence[Like]) -> list[torch.Tensor]:
    """Tensors, one after the other, that are views of `memory [N]` uint8, N at least their `packed_bytes`."""
    tensors, start = [], 0
    for shape, dtype in like:
        nbytes = math.prod(shape) * dtype.itemsize
        tensors.append(memory[start : start + nbytes].view(dtype).view(tuple(shape)))
        start += _aligned(shape, dtype)
    return tensors


def upload(arrays: Sequence[Array | torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays from the host to a device in one copy; on CUDA the host does not wait for it."""
    hosts = [torch.as_tensor(array) for array in arrays]
    if device.type == "cpu":
        return [host.clone(memory_format=torch.contiguous_format) for host in hosts]
    like = [(host.shape, host.dtype) for host in hosts]
    # torch does not reuse pinned memory before the copy is complete.
    packed = torch.empty(packed_bytes(like), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for target, host in zip(carve(packed, like), hosts, strict=True):
        target.copy_(host)
    return carve(packed.to(device, non_blocking=True), like)


def _aligned(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT
