"""Rates at which expert weights reach a rank: from host memory, from ranks of its node, from ranks of other nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from trimtab.calibration.measurement_context import MeasurementContext
from trimtab.calibration.random_experts import add_random_layer
from trimtab.runtime import Session
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts, Rows
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.runtime.transfer.streams import BackgroundCopies

# Experts that are transferred in one measurement, as many as a layer has replicas on a rank.
EXPERTS = 2
# One transfer is short, so a measurement repeats it.
REPETITIONS = 4


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second at which weights reach a rank.

    Attributes:
        host: from the node's mirror.
        near: from a rank of the same node; None if a node has one rank.
        far: from a rank of another node; None if there is one node.
        messages: from a rank of the same node, if they are sent although they could be read; else None.
    """

    host: float
    near: float | None
    far: float | None
    messages: float | None = None


def measure_links(context: MeasurementContext, *, host_peers: bool = False) -> LinkRates:
    """Time transfers of experts on all ranks at once, by the paths that replicas use. Collective.

    Args:
        host_peers: on a CPU, ranks of a node read each other's shared memory, which stands for that of GPUs.
    """
    topology, on_cuda = context.topology, context.device.type == "cuda"
    rank, ranks, per_node = topology.rank, topology.num_ranks, topology.ranks_per_node
    session = Session(num_experts=EXPERTS * ranks, ranks_per_node=per_node)
    homes = add_random_layer(session, context.model, context.dtype, context.device).homes
    slots = [torch.zeros_like(parameter) for parameter in homes.parameters]
    mirror = mirror_of(topology, homes)
    copies = BackgroundCopies(context.device)
    node = rank // per_node * per_node
    neighbour, previous = (node + (rank + shift - node) % per_node for shift in (1, -1))
    held = [mirror.row(0, EXPERTS * neighbour + expert) for expert in range(EXPERTS)]
    works = {"host": _copies(copies, slots, held)}
    if per_node > 1:
        peers = None
        if on_cuda:
            peers = PeerMemory.across(topology, session.homes)
        elif host_peers:
            peers = PeerMemory.in_host_memory(topology, session.homes)
        sent = partial(_messages, topology, slots, homes.sources, neighbour, previous)
        works["near" if peers is None else "messages"] = sent
        if peers is not None:
            peers.fill(session.homes)
            works["near"] = _copies(copies, slots, [peers.row(0, neighbour, expert) for expert in range(EXPERTS)])
    if per_node < ranks:
        to, source = (rank + per_node) % ranks, (rank - per_node) % ranks
        works["far"] = partial(_messages, topology, slots, homes.sources, to, source)
    taken_s = context.seconds(works)
    copies.close()
    mirror.close()
    nbytes = EXPERTS * context.model.expert_bytes * REPETITIONS
    rates = {name: nbytes / seconds for name, seconds in taken_s.items()}
    return LinkRates(rates["host"], rates.get("near"), rates.get("far"), rates.get("messages"))


def mirror_of(topology: Topology, homes: HomeExperts) -> NodeMirror:
    """A mirror on every node that holds all experts of one layer. Collective."""
    mirror = NodeMirror(topology, homes.expert_like, homes.device)
    mirror.hold([np.arange(len(homes.home_E))[:, None] * [0, 1]] * (topology.num_ranks // topology.ranks_per_node))
    mirror.refresh([homes])
    return mirror


def _copies(
    copies: BackgroundCopies, slots: list[torch.Tensor], experts: list[list[torch.Tensor]]
) -> Callable[[], object]:
    """A function that copies each expert's tensors into a slot, and waits for them."""
    pairs = [
        (stack[slot], tensor)
        for slot, tensors in enumerate(experts)
        for stack, tensor in zip(slots, tensors, strict=True)
    ]
    return lambda: copies.start(pairs * REPETITIONS)()


def _messages(topology: Topology, slots: list[torch.Tensor], sources: list[Rows], to: int, source: int) -> None:
    """Send this rank's experts to one rank and receive those of another, as in a ring."""
    group = topology.weights
    for _ in range(REPETITIONS):
        operations = []
        for row in range(EXPERTS):
            operations += [dist.P2POp(dist.isend, stack[row], group=group, group_peer=to) for stack in sources]
            operations += [dist.P2POp(dist.irecv, stack[row], group=group, group_peer=source) for stack in slots]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
