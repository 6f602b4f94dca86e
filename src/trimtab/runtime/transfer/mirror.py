"""`NodeMirror`: expert weights in host memory that the ranks of a node share.

It holds the experts of the plan's host-path replicas on this node. Home ranks on the node write their experts after
every optimizer step; home ranks on other nodes send them to a rank of this node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.flat_memory import Like, carve, packed_bytes
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer.shared_memory import share_memory


class NodeMirror:
    """Mirror of one node. Collective methods are collective over the ranks of the expert-parallel group.

    Args:
        like: shapes and dtypes of one expert's tensors.
        pinned: pin the memory for copies to CUDA.
    """

    def __init__(self, topology: Topology, like: Sequence[Like], *, pinned: bool) -> None:
        self._topology = topology
        self._like = list(like)
        self._expert_bytes = packed_bytes(self._like)
        self._pinned = pinned
        self._memory: torch.Tensor | None = None
        self._entries_N: list[Array] = []
        self._rows: dict[tuple[int, int], list[torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use on this node."""
        return 0 if self._memory is None else self._memory.nbytes

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
        needed = len(mine) * self._expert_bytes
        if needed > self.nbytes:
            self.close()
            self._memory = share_memory(needed, self._topology)
            if self._pinned:
                status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), needed, 0)
                if int(status):
                    raise RuntimeError(f"cudaHostRegister of {needed} bytes failed with status {int(status)}")
        self._rows = {}
        for place, (layer, expert) in enumerate(mine.tolist()):
            assert self._memory is not None
            self._rows[layer, expert] = carve(self._memory[place * self._expert_bytes :], self._like)

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
        operations: list[dist.P2POp] = []
        arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []
        sent = 0
        sources = [layer.sources for layer in layers]
        for node, entries in enumerate(self._entries_N):
            for place, (layer, expert) in enumerate(entries.tolist()):
                home, row = int(layers[layer].home_E[expert]), int(layers[layer].rows_E[expert])
                receiver = node * per_node + place % per_node
                if home // per_node == node:
                    if home == here.rank:
                        for target, tensor in zip(self._rows[layer, expert], sources[layer], strict=True):
                            target.copy_(tensor[row], non_blocking=True)
                elif home == here.rank:
                    for tensor in sources[layer]:
                        operations.append(dist.P2POp(dist.isend, tensor[row], group=here.weights, group_peer=receiver))
                        sent += tensor[row].nbytes
                elif receiver == here.rank:
                    for target, source in zip(self._rows[layer, expert], sources[layer], strict=True):
                        buffer = target if source[0].device == target.device else torch.empty_like(source[0])
                        arrivals.append((target, buffer))
                        operations.append(dist.P2POp(dist.irecv, buffer, group=here.weights, group_peer=home))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for target, buffer in arrivals:
            if buffer is not target:
                target.copy_(buffer)
        if self._pinned:
            torch.cuda.synchronize()
        dist.barrier(group=here.expert_control)
        return sent

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None and self._pinned:
            # Copies from the mirror may still run.
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._rows, self._memory = {}, None
