"""`PeerMemory`: the home experts of a node's ranks, in memory that all of them can read.

A rank copies replicas from another rank's memory on a side stream: a one-sided copy by the GPU's copy engine, without
work for the home rank.

On CUDA it is torch's symmetric memory (`across`), which tests without a GPU do not cover. `in_host_memory` is the same
with shared memory of the host, for tests and `trimtab bench transfer`. CPU sessions use the mirror, which is as fast.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.flat_memory import carve, packed_bytes
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.shared_memory import share_memory

# Environment variable of torch that allows several processes of one GPU to share symmetric memory.
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class PeerMemory:
    """Memory of a node's ranks with all layers' home experts of each rank, in the compute dtype.

    For staged layers it is also the staging memory. For others it is one more copy of their parameters.

    Args:
        parts_N: uint8, the memory of every rank of the node as mapped on this rank, in rank order.
        keeps: an object that must live as long as the memory is used.
    """

    def __init__(
        self, topology: Topology, layers: Sequence[HomeExperts], parts_N: Sequence[torch.Tensor], keeps: object = None
    ) -> None:
        self._topology = topology
        self._keeps = keeps
        per_layer = len(layers[0].likes)
        carved_N = [carve(part, _like(layers)) for part in parts_N]
        self._stacks_NL = [[some[i : i + per_layer] for i in range(0, len(some), per_layer)] for some in carved_N]
        for layer, stacks in zip(layers, self._stacks_NL[self._place(topology.rank)], strict=True):
            layer.stage_in(stacks)

    @classmethod
    def across(cls, topology: Topology, layers: Sequence[HomeExperts]) -> PeerMemory | None:
        """Allocate it in GPU memory. None if the ranks of a node can't map each other's memory. Collective."""
        device = layers[0].device
        if topology.ranks_per_node == 1 or not _within_reach(topology, device):
            return None
        # Imported here, since it is a private module of torch that only CUDA needs.
        from torch.distributed import _symmetric_memory as symmetric

        nbytes = packed_bytes(_like(layers))
        mine = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(mine, topology.node_control)
        parts_N = [handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(topology.ranks_per_node)]
        # The other buffers are addresses only. This tensor owns the memory while a layer stages in it.
        parts_N[topology.rank % topology.ranks_per_node] = mine
        return cls(topology, layers, parts_N, keeps=(mine, handle))

    @classmethod
    def in_host_memory(cls, topology: Topology, layers: Sequence[HomeExperts]) -> PeerMemory:
        """Allocate it in host memory, for ranks on CPUs. Collective."""
        nbytes = packed_bytes(_like(layers))
        memory = share_memory(nbytes * topology.ranks_per_node, topology)
        return cls(topology, layers, memory.split(nbytes))

    def row(self, layer: int, home: int, row: int) -> list[torch.Tensor]:
        """The tensors of one expert of a layer: row `row` of rank `home`, which must be on this node."""
        return [stack[row] for stack in self._stacks_NL[self._place(home)][layer]]

    def fill(self, layers: Sequence[HomeExperts]) -> None:
        """Copy this rank's present weights to it. Collective over the node; no rank may still be reading."""
        for layer, stacks in zip(layers, self._stacks_NL[self._place(self._topology.rank)], strict=True):
            layer.copy_to(stacks)
        streams.synchronize(layers[0].device)
        dist.barrier(group=self._topology.node_control)

    def _place(self, rank: int) -> int:
        return rank % self._topology.ranks_per_node


def _like(layers: Sequence[HomeExperts]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(shape, layer.dtype) for layer in layers for shape, _ in layer.likes]


def _within_reach(topology: Topology, device: torch.device) -> bool:
    """Whether the ranks of every node can map each other's GPU memory. The same on all ranks."""
    host = socket.gethostname()
    places: list[tuple[str, int]] = [("", 0)] * topology.ranks_per_node
    dist.all_gather_object(places, (host, device.index), group=topology.node_control)
    is_reached = (len(set(places)) == len(places) or os.environ.get(OVERLAPPING) == "1") and all(
        there == host
        and index < torch.cuda.device_count()
        and (index == device.index or torch.cuda.can_device_access_peer(device, index))
        for there, index in places
    )
    verdict = torch.tensor(int(is_reached))
    dist.all_reduce(verdict, dist.ReduceOp.MIN, group=topology.expert_control)
    return bool(verdict)
