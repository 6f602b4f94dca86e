"""`NodeMirror`: expert weights in host memory that the ranks of a node share; and `share_memory`, such memory.

The mirror holds the experts of the plan's host-path replicas on this node. Home ranks on the node write their experts
after every optimizer step; home ranks on other nodes send them to a rank of this node.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.ranks.rank_calls import on_first_rank
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.flat_memory import Like, carve, packed_bytes
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.message_rounds import Message, post_round, rounds_of_rank
from trimtab.shared_files import free_shared_memory, new_shared_file


class NodeMirror:
    """Mirror of one node. Collective methods are collective over the ranks of the expert-parallel group.

    Args:
        like: shapes and dtypes of one expert's tensors.
        device: the device of the experts.
        most_bytes: most memory, of which the plans' experts are a part; unlimited by default.
    """

    def __init__(
        self, topology: Topology, like: Sequence[Like], device: torch.device, most_bytes: int | None = None
    ) -> None:
        self._topology = topology
        self._like = list(like)
        self._expert_bytes = packed_bytes(self._like)
        self._device = device
        # For copies to the device.
        self._pinned = streams.has_streams(device)
        self._most = math.inf if most_bytes is None else most_bytes // self._expert_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._entries_N: list[Array] = []
        self._rows: dict[tuple[int, int], list[torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use on this node."""
        return self._memory.nbytes

    @property
    def is_used(self) -> bool:
        """Whether any node's mirror holds an expert."""
        return any(len(entries) for entries in self._entries_N)

    def hold(self, entries_N: Sequence[Array]) -> None:
        """Allocate memory for the experts of a plan, in place of those held before. Collective.

        Args:
            entries_N: for every node the `[N, 2]` (layer, expert) pairs of its host-path replicas, each once.

        Raises:
            InputError: if the node's shared memory is too small.
        """
        self._entries_N = list(entries_N)
        mine = self._entries_N[self._topology.node]
        held = self.nbytes // self._expert_bytes
        if len(mine) > held:
            # Half more than before, since every growth registers all memory again.
            room = min(held * 3 // 2, self._most, free_shared_memory() // self._expert_bytes)
            room = on_first_rank(lambda: max(len(mine), int(room)), self._topology.node_control)
            self.close()
            nbytes = room * self._expert_bytes
            self._memory = share_memory(nbytes, self._topology)
            if self._pinned:
                status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), nbytes, 0)
                if int(status):
                    raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed with status {int(status)}")
        self._rows = {
            (layer, expert): carve(self._memory[place * self._expert_bytes :], self._like)
            for place, (layer, expert) in enumerate(mine.tolist())
        }

    def row(self, layer: int, expert: int) -> list[torch.Tensor]:
        """The tensors of an expert that the plan has in this mirror."""
        return self._rows[layer, expert]

    def refresh(self, layers: Sequence[HomeExperts]) -> int:
        """Copy the present weights to all nodes' mirrors. Collective; no rank may still be reading.

        Args:
            layers: this rank's home experts of all layers.

        Returns:
            Bytes that this rank sent to other nodes.
        """
        if not self.is_used:
            return 0
        here, per_node = self._topology, self._topology.ranks_per_node
        messages: list[Message] = []
        for node, entries in enumerate(self._entries_N):
            for number, (layer, expert) in enumerate(entries.tolist()):
                places = layers[layer].places
                home, row = int(places.home_E[expert]), int(places.rows_E[expert])
                receiver = node * per_node + number % per_node
                if home // per_node == node:
                    if home == here.rank:
                        for target, tensor in zip(self._rows[layer, expert], layers[layer].source(row), strict=True):
                            target.copy_(tensor, non_blocking=True)
                elif receiver == here.rank:
                    messages += [Message(home, receiver, target) for target in self._rows[layer, expert]]
                else:
                    sent = layers[layer].source(row) if home == here.rank else [None] * len(self._like)
                    messages += [Message(home, receiver, tensor) for tensor in sent]
        rounds = rounds_of_rank(messages, here.rank)
        staging = self._staging(rounds)
        for messages in rounds:
            self._exchange(messages, staging)
        if self._pinned:
            torch.cuda.synchronize()
        dist.barrier(group=here.expert_control)
        return sum(_tensor(m).nbytes for messages in rounds for m in messages if m.sender == here.rank)

    def _staging(self, rounds: Sequence[Sequence[Message]]) -> torch.Tensor | None:
        """Device memory for what arrives in one round; None if messages arrive in the mirror itself."""
        if not streams.has_streams(self._device):
            return None
        most = max((packed_bytes(_like(self._arriving(messages))) for messages in rounds), default=0)
        return torch.empty(most, dtype=torch.uint8, device=self._device)

    def _arriving(self, messages: Sequence[Message]) -> list[torch.Tensor]:
        return [_tensor(message) for message in messages if message.receiver == self._topology.rank]

    def _exchange(self, messages: Sequence[Message], staging: torch.Tensor | None) -> None:
        """Send and receive one round."""
        rank, targets = self._topology.rank, self._arriving(messages)
        arrived = iter(targets if staging is None else carve(staging, _like(targets)))
        posted = [
            message._replace(tensor=next(arrived)) if message.receiver == rank else message for message in messages
        ]
        for _, work in post_round(posted, rank, self._topology.weights):
            work.wait()
        if staging is not None:
            # The next round overwrites the staging memory after these copies.
            for target, tensor in zip(targets, carve(staging, _like(targets)), strict=True):
                target.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Release the memory."""
        if self.nbytes and self._pinned:
            # Copies from the mirror may still run.
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._rows, self._memory = {}, torch.empty(0, dtype=torch.uint8)


def _tensor(message: Message) -> torch.Tensor:
    assert message.tensor is not None
    return message.tensor


def _like(tensors: Sequence[torch.Tensor]) -> list[Like]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


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
