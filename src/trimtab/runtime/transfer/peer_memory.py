"""`PeerMemory`: the home experts of a node's ranks, in memory that all of them can read.

A rank pulls the replica of a neighbour's expert from there by itself, on a stream beside the compute: a one-sided copy,
as from host memory, that a GPU's copy engines do while the home rank goes on undisturbed.

On CUDA the memory is torch's symmetric memory. What tests without a GPU reach is all but `across` and what it asks the
driver: `in_host_memory` is the same with shared memory of the host. It is there for them and for `trimtab bench
transfer`; a CPU session has its mirror, which is no slower.
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

# torch's word for letting several processes of one GPU share symmetric memory.
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class PeerMemory:
    """Staging memory of a node's ranks: all layers' home experts of each, in the dtype that is computed in.

    Layers that stage their parameters in another dtype do it here, so that it costs them nothing. Where parameters are
    in that dtype already, it is one more copy of them.

    Args:
        parts_N: uint8, the memory of every rank of the node as this rank sees it, in rank order.
        keeps: what has to live as long as the memory is used.
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
        """In the GPUs' memory. None if the ranks of a node can't reach each other's. Collective."""
        device = layers[0].device
        if topology.ranks_per_node == 1 or not _within_reach(topology, device):
            return None
        # A private module of torch, which only CUDA needs.
        from torch.distributed import _symmetric_memory as symmetric

        nbytes = packed_bytes(_like(layers))
        mine = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(mine, topology.node_control)
        parts_N = [handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(topology.ranks_per_node)]
        # The others are bare addresses; this one owns the memory, for as long as a layer stages in it.
        parts_N[topology.rank % topology.ranks_per_node] = mine
        return cls(topology, layers, parts_N, keeps=(mine, handle))

    @classmethod
    def in_host_memory(cls, topology: Topology, layers: Sequence[HomeExperts]) -> PeerMemory:
        """In the host's memory, for ranks that compute there. Collective."""
        nbytes = packed_bytes(_like(layers))
        memory = share_memory(nbytes * topology.ranks_per_node, topology)
        return cls(topology, layers, memory.split(nbytes))

    def row(self, layer: int, home: int, row: int) -> list[torch.Tensor]:
        """The tensors of one expert of a layer, row `row` of rank `home`, which is on this node."""
        return [stack[row] for stack in self._stacks_NL[self._place(home)][layer]]

    def fill(self, layers: Sequence[HomeExperts]) -> None:
        """Bring this rank's present weights in. Collective over the node; no rank may still be reading."""
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
    reached = len(set(places)) == len(places) or os.environ.get(OVERLAPPING) == "1"
    for there, index in places:
        is_peer = index < torch.cuda.device_count() and (
            index == device.index or torch.cuda.can_device_access_peer(device, index)
        )
        reached = reached and there == host and is_peer
    verdict = torch.tensor(int(reached))
    dist.all_reduce(verdict, dist.ReduceOp.MIN, group=topology.expert_control)
    return bool(verdict)
