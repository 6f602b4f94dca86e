"""How fast do bytes move? In a rank's memory, from host memory, and as an expert's weights from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from trimtab.calibration.random_experts import random_experts
from trimtab.calibration.site import Site
from trimtab.cluster.operations import OPTIMIZER_BYTES
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.state.home_experts import Rows
from trimtab.runtime.transfer.copy_engine import BackgroundCopies
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory

# More than caches hold.
CPU_BYTES = 64 << 20
CUDA_BYTES = 1 << 30
# Experts that move in one measurement, as replicas of a layer do.
EXPERTS = 2
# Repetitions of one measurement, which is short.
TIMES = 4


@dataclass(frozen=True)
class LinkFigures:
    """Bytes a second of each way of weights to a rank; None where there is nobody to get them from.

    Attributes:
        host: from the node's mirror.
        near, far: from a rank of the node and of another.
    """

    host: float
    near: float | None
    far: float | None


def measure_memory(site: Site) -> tuple[float, float]:
    """Bytes a second that large copies read and write, and that an optimizer step does by its count. Collective."""
    nbytes = CUDA_BYTES if site.device.type == "cuda" else CPU_BYTES
    source = torch.zeros(nbytes, dtype=torch.uint8, device=site.device)
    target = torch.zeros_like(source)
    weights = torch.nn.Parameter(torch.zeros(nbytes // 16, device=site.device))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights])

    def copy() -> dict[str, float]:
        start = site.begin()
        target.copy_(source)
        return {"s": site.clock.seconds(start, site.clock.now())}

    def step() -> dict[str, float]:
        start = site.begin()
        optimizer.step()
        return {"s": site.clock.seconds(start, site.clock.now())}

    taken = site.medians({"copy": copy, "step": step})
    return 2 * nbytes / taken["copy"]["s"], OPTIMIZER_BYTES * weights.numel() / taken["step"]["s"]


def measure_links(site: Site) -> LinkFigures:
    """Time experts on each way that replicas' weights take, on all ranks at once. Collective."""
    topology = site.topology
    rank, ranks, per_node = topology.rank, topology.num_ranks, topology.ranks_per_node
    session = Session(num_experts=EXPERTS * ranks, ranks_per_node=per_node)
    stacks = random_experts(site.model, EXPERTS, site.dtype, site.device)
    slots = [torch.zeros_like(stack) for stack in stacks]
    homes = session.add_layer([torch.nn.Parameter(stack) for stack in stacks], gated_experts()).homes
    mirror = NodeMirror(topology, homes.expert_like, pinned=site.device.type == "cuda")
    mirror.hold([np.arange(EXPERTS * ranks)[:, None] * [0, 1]] * (ranks // per_node))
    mirror.refresh([homes])
    host_copies, peer_copies = BackgroundCopies(site.device), BackgroundCopies(site.device)
    node = rank // per_node * per_node
    neighbour = node + (rank + 1 - node) % per_node
    held = [mirror.row(0, EXPERTS * neighbour + expert) for expert in range(EXPERTS)]
    ways = {"host": _copying(site, host_copies, slots, held)}
    if per_node > 1:
        peers = PeerMemory.across(topology, session.homes) if site.device.type == "cuda" else None
        if peers is None:
            ways["near"] = _messages(site, slots, homes.sources, neighbour, node + (rank - 1 - node) % per_node)
        else:
            peers.fill(session.homes)
            held = [peers.row(0, neighbour, expert) for expert in range(EXPERTS)]
            ways["near"] = _copying(site, peer_copies, slots, held)
    if per_node < ranks:
        ways["far"] = _messages(site, slots, homes.sources, (rank + per_node) % ranks, (rank - per_node) % ranks)
    taken = site.medians(ways)
    for copies in (host_copies, peer_copies):
        copies.close()
    mirror.close()
    nbytes = EXPERTS * site.model.expert_bytes
    rates = {name: nbytes / figures["s"] for name, figures in taken.items()}
    return LinkFigures(rates["host"], rates.get("near"), rates.get("far"))


def _copying(
    site: Site, copies: BackgroundCopies, slots: list[torch.Tensor], sources: list[list[torch.Tensor]]
) -> Callable[[], dict[str, float]]:
    """Experts by copies beside the compute."""
    pairs = [
        (stack[slot], tensor) for slot, held in enumerate(sources) for stack, tensor in zip(slots, held, strict=True)
    ]

    def run() -> dict[str, float]:
        start = site.begin()
        return {"s": site.clock.seconds(start, site.clock.after(copies.start(pairs * TIMES))) / TIMES}

    return run


def _messages(
    site: Site, slots: list[torch.Tensor], sources: list[Rows], to: int, come_from: int
) -> Callable[[], dict[str, float]]:
    """Experts by messages, as a ring: everybody sends and receives as many."""
    group = site.topology.weights

    def run() -> dict[str, float]:
        start = site.begin()
        for _ in range(TIMES):
            operations = []
            for row in range(EXPERTS):
                operations += [dist.P2POp(dist.isend, stack[row], group=group, group_peer=to) for stack in sources]
                operations += [dist.P2POp(dist.irecv, stack[row], group=group, group_peer=come_from) for stack in slots]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return {"s": site.clock.seconds(start, site.clock.now()) / TIMES}

    return run
