"""Torch's symmetric memory without a GPU: host memory that the ranks of a node share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.transfer import peer_memory
from trimtab.runtime.transfer.mirror import share_memory
from trimtab.runtime.transfer.peer_memory import NO_MULTICAST, OVERLAPPING, Place


@dataclass
class FakeSymmetric:
    """GPUs of one node, one for each rank. Each process sees only its own, as number 0.

    Attributes:
        failing: name of the function that fails, and on which rank.
        unreachable: whether the process of rank 0 also sees the GPU of rank 1, and can't read its memory.
        shared_gpu: whether all ranks have one GPU.
        sizes_R: free and total bytes of each rank's GPU; enough by default.
        hosts: name of each rank's machine; one machine by default.
    """

    topology: Topology
    failing: tuple[str, int] | None = None
    unreachable: bool = False
    shared_gpu: bool = False
    sizes_R: tuple[tuple[int, int], ...] = ((1 << 30, 1 << 30),) * 8
    hosts: tuple[str, ...] = ()

    def place(self, device: torch.device) -> Place:
        rank = self.topology.rank
        return Place(self.hosts[rank] if self.hosts else "node", "gpu" if self.shared_gpu else f"gpu {rank}", 0)

    def visible(self) -> dict[str, int]:
        own = {self.place(torch.device("cpu")).uuid: 0}
        return own | {"gpu 1": 1} if self.unreachable and self.topology.rank == 0 else own

    def reaches(self, device: torch.device, index: int) -> bool:
        return not self.unreachable

    def sizes(self, device: torch.device) -> tuple[int, int]:
        return self.sizes_R[self.topology.rank]

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        parts = share_memory(nbytes * self.topology.ranks_per_node, self.topology).split(nbytes)
        self._call("allocate")
        return parts[self.topology.rank % self.topology.ranks_per_node]

    def map_all(self, memory: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], object]:
        self._call("map_all")
        # As torch reads them at the first rendezvous.
        assert os.environ[NO_MULTICAST] == os.environ[OVERLAPPING] == "1"
        whole = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
        return [*whole.split(memory.nbytes)], object()

    def _call(self, name: str) -> None:
        if self.failing == (name, self.topology.rank):
            raise RuntimeError(f"CUDA driver error: {name}\nmore lines")


@contextmanager
def fake(topology: Topology | None = None, **arguments: Any) -> Iterator[FakeSymmetric]:
    with pytest.MonkeyPatch.context() as patch:
        for name in (NO_MULTICAST, OVERLAPPING):
            patch.setenv(name, "")
        made = FakeSymmetric(topology or Topology.build(None, 1, None), **arguments)
        patch.setattr(peer_memory, "Symmetric", made)
        yield made
