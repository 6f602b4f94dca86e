"""Memory of a rank that others of its node read replicas from, in host memory: as peers, and as symmetric memory."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.fake_symmetric import fake
from helpers.rank_tests import runs_on_ranks
from trimtab.runtime.ranks.process_groups import wrong_variables
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer.peer_memory import PeerMemory


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


LARGE, NBYTES = (1 << 30, 1 << 30), 128


@pytest.mark.parametrize(
    ("most", "sizes_R", "reason"),
    [
        (NBYTES, (LARGE,) * 3, ""),
        (NBYTES - 1, (LARGE,) * 3, r"rank 0: they need 1.28e-07 GB of a GPU, and peer_memory_bytes allows 1.27e-07 GB"),
        (0, (LARGE,) * 3, "rank 0: they need .* allows 0 GB"),
        # Also of one rank.
        (None, (LARGE, LARGE, (LARGE[0], 5 * NBYTES)), ""),
        (None, (LARGE, LARGE, (LARGE[0], 5 * NBYTES - 5)), "rank 2: they need .* and peer_memory_bytes allows"),
        (5 * NBYTES, (LARGE, (NBYTES, 2 * NBYTES), LARGE), ""),
        (5 * NBYTES, (LARGE, (NBYTES - 1, 2 * NBYTES), LARGE), "rank 1: they need .* of its GPU, which has .* free"),
    ],
)
@runs_on_ranks(3)
def test_sizes_decide_before_anything_is_allocated(
    most: int | None, sizes_R: tuple[tuple[int, int], ...], reason: str
) -> None:
    told: list[str] = []
    with fake(sizes_R=sizes_R, failing=("allocate", 0) if reason else None) as symmetric:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logging.getLogger("trimtab"), "warning", lambda text, *values: told.append(text % values))
            topology = symmetric.topology
            peers = PeerMemory.across(topology, make_homes(topology.rank, topology.num_ranks), most)
        assert (peers is None) == bool(reason)
        assert [re.search(reason, text) is not None for text in told] == [True] * (bool(reason) * (topology.rank == 0))
        dist.barrier()


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
