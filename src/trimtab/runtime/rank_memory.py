"""`RankMemory`: memory of one rank, by owner."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trimtab.figures import by_key, computed, measured, with_documented_figures
from trimtab.runtime.ranks.process_groups import communicator_bytes
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer.transfers import Transfers


@with_documented_figures
@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank for its experts, by owner; on its device, except for the mirror.

    After `Session.suspend` only the parameters are left.
    """

    parameter_bytes: int = measured(
        "of the parameters of this rank's experts, which belong to the framework", "bytes",
        key="memory/parameter_bytes",
    )  # fmt: skip
    staging_bytes: int = measured(
        "of copies of the experts in the compute dtype, where it is another one; 0 if other ranks read these copies",
        "bytes", key="memory/staging_bytes",
    )  # fmt: skip
    peer_memory_bytes: int = measured(
        "of memory that the other ranks of the node read replicas from; 0 if these are sent as messages, as on CPUs, "
        "where GPUs can't read each other's memory, and above the limit `peer_memory_bytes`", "bytes",
        key="memory/peer_bytes",
    )  # fmt: skip
    ring_bytes: int = measured("of slots for replicas, independent of the number of layers", "bytes",
        key="memory/ring_bytes",
    )  # fmt: skip
    return_bytes: int = measured("of arriving gradients of replicas", "bytes", key="memory/return_bytes")
    table_bytes: int = measured(
        "of row tables: on a GPU those of micro-steps that are open or wait for their backward, on a CPU all that are "
        "kept", "bytes", key="memory/table_bytes",
    )  # fmt: skip
    communicator_bytes: int = measured(
        "of the NCCL communicators that Trimtab created; an estimate from the default size of NCCL's buffers", "bytes",
        key="memory/communicator_bytes",
    )  # fmt: skip
    mirror_bytes: int = measured("of host memory, of the mirror of this rank's node", "bytes",
        key="memory/mirror_bytes",
    )  # fmt: skip
    free_bytes: int = measured("free memory of the device", "bytes", key="memory/free_bytes")

    @computed("bytes", key="memory/pool_bytes")
    def pool_bytes(self) -> int:
        """of `ring_bytes` and `return_bytes`"""
        return self.ring_bytes + self.return_bytes

    @classmethod
    def of(cls, layers: Sequence[HomeExperts], transfers: Transfers | None, table_bytes: int) -> RankMemory:
        """The present memory. Not a collective.

        Args:
            transfers: None if there are none yet, or no more.
        """
        return cls(
            parameter_bytes=sum(parameter.nbytes for layer in layers for parameter in layer.parameters),
            staging_bytes=sum(layer.staging_bytes for layer in layers),
            peer_memory_bytes=0 if transfers is None else transfers.peer_memory_bytes,
            ring_bytes=0 if transfers is None else transfers.ring.nbytes,
            return_bytes=0 if transfers is None else transfers.returns.nbytes,
            table_bytes=table_bytes,
            communicator_bytes=communicator_bytes(),
            mirror_bytes=0 if transfers is None else transfers.ring.mirror.nbytes,
            free_bytes=_free_bytes(layers[0].device) if layers else 0,
        )

    def metrics(self) -> dict[str, float]:
        """Its figures by their names in metrics."""
        return by_key(self)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
