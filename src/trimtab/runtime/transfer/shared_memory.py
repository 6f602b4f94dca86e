"""`share_memory`: host memory that all ranks of a node map."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from trimtab.errors import InputError
from trimtab.launch.shared_files import free_shared_memory, new_shared_file
from trimtab.runtime.ranks.rank_calls import on_first_rank
from trimtab.runtime.ranks.topology import Topology


def share_memory(nbytes: int, topology: Topology) -> torch.Tensor:
    """Host memory `[nbytes]` uint8 that this node's ranks share. Collective over them.

    The n-th rank is the first to touch the n-th part of equal size, which the system therefore takes from the NUMA node
    of that rank's cores. The file is unlinked as soon as all ranks have mapped it, so a crash leaves no file.

    Raises:
        InputError: if shared memory is too small, or the ranks are not on one machine.
    """
    group = topology.node_control
    name = on_first_rank(partial(_create, nbytes), group)
    try:
        problems: list[str] = [""] * topology.ranks_per_node
        dist.all_gather_object(problems, _touch(name, nbytes, topology), group=group)
        for problem in problems:
            if problem:
                raise InputError(problem)
        memory = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
        dist.barrier(group=group)
        return memory
    finally:
        if dist.get_rank(group) == 0:
            Path(name).unlink(missing_ok=True)


def _create(nbytes: int) -> str:
    """Create a file in shared memory, without memory yet. Returns its name."""
    path = new_shared_file()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, nbytes)
    os.close(descriptor)
    return str(path)


def _touch(name: str, nbytes: int, topology: Topology) -> str:
    """Reserve this rank's part: a write to missing memory would kill the process. Returns a problem, or ""."""
    place, parts = topology.rank % topology.ranks_per_node, topology.ranks_per_node
    start, end = nbytes * place // parts, nbytes * (place + 1) // parts
    try:
        descriptor = os.open(name, os.O_RDWR)
    except OSError:
        return (
            f"rank {topology.rank} can't open {name}, which another rank of its node created; ranks of a "
            "node should share memory: check ranks_per_node"
        )
    try:
        if end > start:
            os.posix_fallocate(descriptor, start, end - start)
    except OSError:
        return (
            f"the host mirror needs {nbytes / 1e6:.0f} MB of {Path(name).parent}, which has "
            f"{free_shared_memory() / 1e6:.0f} MB left; lower mirror_bytes or make it larger"
        )
    finally:
        os.close(descriptor)
    return ""
