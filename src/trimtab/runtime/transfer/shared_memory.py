"""`share_memory`: host memory that all ranks of a node map."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from trimtab.errors import InputError
from trimtab.launch.shared_files import free_shared_memory, new_shared_file
from trimtab.runtime.ranks.first_rank import on_first_rank
from trimtab.runtime.ranks.topology import Topology


def share_memory(nbytes: int, topology: Topology) -> torch.Tensor:
    """Host memory `[nbytes]` uint8 that this node's ranks share. Collective over them.

    The file is unlinked as soon as all ranks have mapped it, so a crash leaves no file.

    Raises:
        InputError: if shared memory is too small, or the ranks are not on one machine.
    """
    group = topology.node_control
    name = on_first_rank(partial(_create, nbytes), group)
    try:
        return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError:
        raise InputError(
            f"rank {topology.rank} can't open {name}, which another rank of its node created; ranks of a "
            "node should share memory: check ranks_per_node"
        ) from None
    finally:
        dist.barrier(group=group)
        if dist.get_rank(group) == 0:
            Path(name).unlink(missing_ok=True)


def _create(nbytes: int) -> str:
    """Create a file in shared memory. Returns its name. Raises InputError if there is not enough room."""
    path = new_shared_file()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Reserves the memory: a write to memory that does not exist would kill the process.
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        path.unlink()
        raise InputError(
            f"the host mirror needs {nbytes / 1e6:.0f} MB of {path.parent}, which has "
            f"{free_shared_memory() / 1e6:.0f} MB left; lower mirror_bytes or make it larger"
        ) from None
    finally:
        os.close(descriptor)
    return str(path)
