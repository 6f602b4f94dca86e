"""Symmetric memory of GPUs, replaced by shared host memory: who reaches whom, and what happens if a rank fails."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.rank_tests import runs_on_ranks
from trimtab.runtime.ranks.gpu_variables import wrong_variables
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import peer_memory
from trimtab.runtime.transfer.peer_memory import NO_MULTICAST, OVERLAPPING, PeerMemory, Place
from trimtab.runtime.transfer.shared_memory import share_memory


@dataclass
class FakeSymmetric:
    """GPUs of one node, one for each rank. Each process sees only its own, as number 0.

    Attributes:
        failing: name of the function that fails, and on which rank.
        unreachable: whether the process of rank 0 also sees the GPU of rank 1, and can't read its memory.
        shared_gpu: whether all ranks have one GPU.
        hosts: name of each rank's machine; one machine by default.
    """

    topology: Topology
    failing: tuple[str, int] | None = None
    unreachable: bool = False
    shared_gpu: bool = False
    hosts: tuple[str, ...] = ()
    _parts: list[torch.Tensor] = field(default_factory=list)

    def place(self, device: torch.device) -> Place:
        rank = self.topology.rank
        return Place(self.hosts[rank] if self.hosts else "node", "gpu" if self.shared_gpu else f"gpu {rank}", 0)

    def visible(self) -> dict[str, int]:
        own = {self.place(torch.device("cpu")).uuid: 0}
        return own | {"gpu 1": 1} if self.unreachable and self.topology.rank == 0 else own

    def reaches(self, device: torch.device, index: int) -> bool:
        return not self.unreachable

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self._parts = [*share_memory(nbytes * self.topology.num_ranks, self.topology).split(nbytes)]
        self._call("allocate")
        return self._parts[self.topology.rank]

    def map_all(self, memory: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], object]:
        self._call("map_all")
        # As torch reads them at the first rendezvous.
        assert os.environ[NO_MULTICAST] == os.environ[OVERLAPPING] == "1"
        return [*self._parts], object()

    def _call(self, name: str) -> None:
        if self.failing == (name, self.topology.rank):
            raise RuntimeError(f"CUDA driver error: {name}\nmore lines")


@contextmanager
def fake(**arguments: Any) -> Iterator[FakeSymmetric]:
    with pytest.MonkeyPatch.context() as patch:
        for name in (NO_MULTICAST, OVERLAPPING):
            patch.setenv(name, "")
        made = FakeSymmetric(Topology.build(None, 1, None), **arguments)
        patch.setattr(peer_memory, "Symmetric", made)
        yield made


def make_homes(rank: int, ranks: int) -> list[HomeExperts]:
    def layer(index: int) -> HomeExperts:
        values = [torch.nn.Parameter(torch.full((2, 3), 10.0 * rank + index))]
        return HomeExperts(index, lambda: values, rank=rank, home_E=np.repeat(np.arange(ranks), 2).astype(np.int16))

    return [layer(index) for index in range(2)]


@runs_on_ranks(3)
def test_ranks_that_see_one_gpu_each_read_each_other() -> None:
    with fake() as symmetric:
        topology = symmetric.topology
        homes = make_homes(topology.rank, topology.num_ranks)
        peers = PeerMemory.across(topology, homes)
        assert peers is not None
        peers.fill(homes)
        for rank in range(topology.num_ranks):
            assert peers.row(1, rank, 1)[0].tolist() == [10.0 * rank + 1] * 3
        dist.barrier()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"failing": ("map_all", 1)}, "rank 1: CUDA driver error: map_all"),
        ({"failing": ("allocate", 2)}, "rank 2: CUDA driver error: allocate"),
        ({"unreachable": True}, "rank 0: its GPU can't read the memory of GPU 1"),
        ({"shared_gpu": True}, "rank 0: ranks of its node share a GPU"),
        ({"hosts": ("one", "one", "other")}, "rank 0: ranks of its node are on machines one, other"),
    ],
)
@runs_on_ranks(3)
def test_all_ranks_send_messages_if_one_fails(arguments: dict[str, Any], reason: str) -> None:
    told: list[str] = []
    with fake(**arguments) as symmetric, pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("trimtab"), "warning", lambda text, *values: told.append(text % values))
        topology = symmetric.topology
        assert PeerMemory.across(topology, make_homes(topology.rank, topology.num_ranks)) is None
    assert [reason in text for text in told] == [True] * (topology.rank == 0)


@pytest.mark.parametrize(
    ("nccl", "variables", "wrong"),
    [
        ((2, 27, 5), {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, []),
        ((2, 26), {}, ["set NCCL_LAUNCH_ORDER_IMPLICIT=1"]),
        ((2, 26), {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, ["set NCCL_LAUNCH_ORDER_IMPLICIT=1"]),
        ((2, 25, 1), {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, ["use 2.26 or later"]),
        (
            (2, 27, 5),
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            ["set NCCL_LAUNCH_ORDER_IMPLICIT=1", "CUDA_DEVICE_MAX_CONNECTIONS=1 lets transfers wait"],
        ),
        ((2, 27, 5), {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, []),
    ],
)
def test_variables_that_hang_or_slow(nccl: tuple[int, ...], variables: dict[str, str], wrong: list[str]) -> None:
    found = wrong_variables(nccl, variables)
    assert len(found) == len(wrong)
    assert all(text in line for text, line in zip(wrong, found, strict=True))
