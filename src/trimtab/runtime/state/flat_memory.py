"""Several tensors in one piece of memory, for one copy or one mapping of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class Packed:
    """Tensors in one piece of host memory, for one copy to a device.

    Attributes:
        memory: `[N]` uint8, pinned for CUDA. torch does not reuse pinned memory before copies from it are complete.
        like: of the tensors, one after the other.
    """

    memory: torch.Tensor
    like: Sequence[Like]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], device: torch.device) -> Packed:
        """Copies of tensors, for a device."""
        like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        packed = cls(torch.empty(packed_bytes(like), dtype=torch.uint8, pin_memory=device.type == "cuda"), like)
        for target, tensor in zip(packed.tensors, tensors, strict=True):
            target.copy_(tensor)
        return packed

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors, as views of `memory`."""
        return carve(self.memory, self.like)


def upload(arrays: Sequence[Array | torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays from the host to a device in one copy; on CUDA the host does not wait for it."""
    hosts = [torch.as_tensor(array) for array in arrays]
    if device.type == "cpu":
        return [host.clone(memory_format=torch.contiguous_format) for host in hosts]
    packed = Packed.of(hosts, device)
    return carve(packed.memory.to(device, non_blocking=True), packed.like)


def _aligned(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT
