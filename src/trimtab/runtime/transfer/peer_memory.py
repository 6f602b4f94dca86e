"""`PeerMemory`: the home experts of a node's ranks, in memory that all of them can read.

A rank copies replicas from another rank's memory on a side stream: a one-sided copy by the GPU's copy engine, without
work for the home rank.

On CUDA it is torch's symmetric memory (`across`). If a rank can't get it, all ranks send messages instead. Tests
without a GPU replace `Symmetric`. `in_host_memory` is the same with shared memory of the host, for live micro-steps on
CPUs. Plans on CPUs use the mirror, which is as fast.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from trimtab.rank_variables import can_share_gpus
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.flat_memory import carve, packed_bytes
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.mirror import share_memory

# Environment variables of torch: no multicast object, which some GPUs and boxes without NVSwitch can't make; and
# several processes with the same device index, each of which sees one GPU of its own.
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

# Of a GPU's memory, unless `peer_memory_bytes` says more.
DEFAULT_PART = 0.2

T = TypeVar("T")


class Place(NamedTuple):
    """Where a rank computes.

    Attributes:
        host: name of its machine.
        uuid: of its GPU.
        number: of its GPU among those that its process sees.
    """

    host: str
    uuid: str
    number: int


class Symmetric:
    """torch's symmetric memory, which is a private module of it."""

    @staticmethod
    def place(device: torch.device) -> Place:
        """Where this rank computes."""
        index = torch.cuda.current_device() if device.index is None else device.index
        return Place(socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid), index)

    @staticmethod
    def reaches(device: torch.device, index: int) -> bool:
        """Whether the device reads the memory of the device at an index that this process sees."""
        return torch.cuda.can_device_access_peer(device, index)

    @staticmethod
    def visible() -> dict[str, int]:
        """Index of each GPU that this process sees, by its UUID."""
        return {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}

    @staticmethod
    def sizes(device: torch.device) -> tuple[int, int]:
        """Free and total bytes of the device. torch's cache counts as free."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory `[nbytes]` uint8 that other ranks can map."""
        from torch.distributed import _symmetric_memory as symmetric

        memory: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        return memory

    @staticmethod
    def map_all(memory: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], object]:
        """The memory of all ranks, and an object that keeps them mapped. Collective."""
        from torch.distributed import _symmetric_memory as symmetric

        handle = symmetric.rendezvous(memory, group)
        ranks = range(dist.get_world_size(group))
        return [handle.get_buffer(rank, tuple(memory.shape), torch.uint8) for rank in ranks], handle


class PeerMemory:
    """Memory of a node's ranks with all layers' home experts of each rank, in the compute dtype.

    For staged layers it is also the staging memory. For others it is one more copy.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._keeps: list[object] = []
        self._layers: list[HomeExperts] = []
        self._stacks_NL: list[list[list[torch.Tensor]]] = [[] for _ in range(topology.ranks_per_node)]

    def _add(self, layers: Sequence[HomeExperts], parts_N: Sequence[torch.Tensor], keeps: object = None) -> None:
        """Use memory for the next layers.

        Args:
            parts_N: uint8, the memory of every rank of the node as mapped on this rank, in rank order.
            keeps: an object that must live as long as the memory is used.
        """
        self._keeps.append(keeps)
        self._layers += layers
        per_layer = len(layers[0].likes)
        for stacks_L, part in zip(self._stacks_NL, parts_N, strict=True):
            some = carve(part, _like(layers))
            stacks_L += [some[i : i + per_layer] for i in range(0, len(some), per_layer)]
        for layer, stacks in zip(layers, self._own_L[-len(layers) :], strict=True):
            layer.stage_in(stacks)

    @classmethod
    def across(
        cls, topology: Topology, layers: Sequence[HomeExperts], most_bytes: int | None = None
    ) -> PeerMemory | None:
        """Allocate it in GPU memory. None on all ranks, with the reason in the log, if a rank can't. Collective.

        Args:
            most_bytes: most memory of a rank; `DEFAULT_PART` by default.
        """
        device = layers[0].device
        if topology.ranks_per_node == 1:
            return None
        peers = cls(topology)
        try:
            _on_all_ranks(lambda: _prepare(topology, device), topology)
            peers._allocate(layers, device, most_bytes)
        except _OutOfReachError as problem:
            for layer in layers:
                layer.drop_staging()
            if topology.data_rank == 0:
                logging.getLogger("trimtab").warning(
                    "replicas from ranks of the same node are sent as messages, which is slower: %s", problem
                )
            return None
        return peers

    def _allocate(self, layers: Sequence[HomeExperts], device: torch.device, most_bytes: int | None) -> None:
        """Add GPU memory of the next layers. Raises _OutOfReachError on all ranks, if a rank can't. Collective."""
        topology, nbytes = self._topology, packed_bytes(_like(layers))
        _on_all_ranks(lambda: _check_size(nbytes, device, most_bytes), topology)
        mine = _on_all_ranks(lambda: Symmetric.allocate(nbytes, device), topology)
        parts_N, handle = _on_all_ranks(lambda: Symmetric.map_all(mine, topology.node_control), topology)
        # The other buffers are addresses only. This tensor owns the memory while a layer stages in it.
        parts_N[self._place(topology.rank)] = mine
        self._add(layers, parts_N, keeps=(mine, handle))

    @classmethod
    def in_host_memory(cls, topology: Topology, layers: Sequence[HomeExperts]) -> PeerMemory:
        """Allocate it in host memory, for ranks on CPUs. Collective."""
        nbytes = packed_bytes(_like(layers))
        memory = share_memory(nbytes * topology.ranks_per_node, topology)
        peers = cls(topology)
        peers._add(layers, memory.split(nbytes))
        return peers

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return sum(stack.nbytes for stacks in self._own_L for stack in stacks)

    def row(self, layer: int, home: int, row: int) -> list[torch.Tensor]:
        """The tensors of one expert of a layer: row `row` of rank `home`, which must be on this node."""
        return [stack[row] for stack in self._stacks_NL[self._place(home)][layer]]

    def fill(self, layers: Sequence[HomeExperts]) -> None:
        """Copy this rank's present weights to it. Collective over the node; no rank may still be reading."""
        for layer, stacks in zip(layers, self._own_L, strict=True):
            layer.copy_to(stacks)
        streams.synchronize(layers[0].device)
        dist.barrier(group=self._topology.node_control)

    @property
    def _own_L(self) -> list[list[torch.Tensor]]:
        return self._stacks_NL[self._place(self._topology.rank)]

    def _place(self, rank: int) -> int:
        return rank % self._topology.ranks_per_node


def _like(layers: Sequence[HomeExperts]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(shape, layer.dtype) for layer in layers for shape, _ in layer.likes]


class _OutOfReachError(Exception):
    """A rank can't map the memory of others, and why."""


def _on_all_ranks(call: Callable[[], T], topology: Topology) -> T:
    """The result of a call that all ranks of the expert-parallel group make. Raises _OutOfReachError on all of them if
    it failed on one."""
    problem = ""
    try:
        result = call()
    except Exception as error:
        problem = str(error).strip().split("\n", 1)[0] or type(error).__name__
    problems: list[str] = [""] * topology.num_ranks
    dist.all_gather_object(problems, problem, group=topology.expert_control)
    for rank, problem in enumerate(problems):
        if problem:
            raise _OutOfReachError(f"rank {rank}: {problem}")
    return result


def _check_size(nbytes: int, device: torch.device, most_bytes: int | None) -> None:
    """Raise if the memory is larger than the limit or the free memory, before anything is allocated."""
    free, total = Symmetric.sizes(device)
    most = int(DEFAULT_PART * total) if most_bytes is None else most_bytes
    if nbytes > most:
        raise RuntimeError(f"they need {_text(nbytes)} of a GPU, and peer_memory_bytes allows {_text(most)}")
    if nbytes > free:
        raise RuntimeError(f"they need {_text(nbytes)} of its GPU, which has {_text(free)} free")


def _text(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _prepare(topology: Topology, device: torch.device) -> None:
    """Check what can be known before, and set torch's environment variables. Collective over the node."""
    mine = Symmetric.place(device)
    places: list[Place] = [mine] * topology.ranks_per_node
    dist.all_gather_object(places, mine, group=topology.node_control)
    if {place.host for place in places} != {mine.host}:
        raise RuntimeError(f"ranks of its node are on machines {', '.join(sorted({p.host for p in places}))}")
    if len({place.uuid for place in places}) < len(places) and not can_share_gpus():
        raise RuntimeError("ranks of its node share a GPU")
    # What a process does not see can only be tried.
    visible = Symmetric.visible()
    for place in places:
        index = visible.get(place.uuid)
        if index is not None and place.uuid != mine.uuid and not Symmetric.reaches(device, index):
            raise RuntimeError(f"its GPU can't read the memory of GPU {index}")
    os.environ[NO_MULTICAST] = "1"
    if len({place.number for place in places}) < len(places):
        os.environ[OVERLAPPING] = "1"
