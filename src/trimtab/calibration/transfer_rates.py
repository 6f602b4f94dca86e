"""Rates at which bytes move: within memory, weights of experts to a rank, and rows between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from trimtab.calibration.fits import Fit, fit_rates
from trimtab.calibration.measurement import MeasurementContext, add_random_layer
from trimtab.cluster.operations import OPTIMIZER_BYTES
from trimtab.runtime import Session
from trimtab.runtime.program.exchange import exchange_rows
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts, Rows
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.runtime.transfer.streams import BackgroundCopies

# More than caches hold.
CPU_BYTES = 64 << 20
CUDA_BYTES = 1 << 30
# Experts that are transferred in one measurement, as many as a layer has replicas on a rank.
EXPERTS = 2
# One transfer is short, so a measurement repeats it.
REPETITIONS = 4
# Rows sent by a rank, as fractions of the rows that a layer dispatches.
ROW_LOADS = (1.0, 0.5, 0.125, 1 / 64)


def measure_memory(context: MeasurementContext) -> tuple[float, float]:
    """Bytes per second of a large copy (read and written), and of an AdamW step (by `OPTIMIZER_BYTES`). Collective."""
    nbytes = CUDA_BYTES if context.device.type == "cuda" else CPU_BYTES
    source = torch.zeros(nbytes, dtype=torch.uint8, device=context.device)
    weights = torch.nn.Parameter(torch.zeros(nbytes // 16, device=context.device))
    weights.grad = torch.ones_like(weights)
    copy = partial(torch.zeros_like(source).copy_, source)
    taken_s = context.seconds({"copy": copy, "step": torch.optim.AdamW([weights]).step})
    return 2 * nbytes / taken_s["copy"], OPTIMIZER_BYTES * weights.numel() / taken_s["step"]


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second at which weights reach a rank.

    Attributes:
        host: from the node's mirror.
        near: from a rank of the same node; None if a node has one rank.
        far: from a rank of another node; None if there is one node.
        messages: from a rank of the same node, if they are sent although they could be read; else None.
        tax: see `ClusterSpec.transfer_tax`; of the longest way that weights come.
    """

    host: float
    near: float | None
    far: float | None
    messages: float | None = None
    tax: float = 0.0


def measure_links(context: MeasurementContext) -> LinkRates:
    """Time transfers of experts on all ranks at once, by the paths that replicas use. Collective."""
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
        peers = PeerMemory.across(topology, session.homes) if on_cuda else None
        sent = partial(_messages, topology, slots, homes.sources, neighbour, previous)
        works["near" if peers is None else "messages"] = sent
        if peers is not None:
            peers.fill(session.homes)
            works["near"] = _copies(copies, slots, [peers.row(0, neighbour, expert) for expert in range(EXPERTS)])
    if per_node < ranks:
        to, source = (rank + per_node) % ranks, (rank - per_node) % ranks
        works["far"] = partial(_messages, topology, slots, homes.sources, to, source)
    taken_s = context.seconds(works)
    far = next(name for name in ("far", "messages", "near", "host") if name in works)
    tax = _tax(context, works[far], taken_s[far])
    copies.close()
    mirror.close()
    nbytes = EXPERTS * context.model.expert_bytes * REPETITIONS
    rates = {name: nbytes / seconds for name, seconds in taken_s.items()}
    return LinkRates(rates["host"], rates.get("near"), rates.get("far"), rates.get("messages"), tax)


def _tax(context: MeasurementContext, transfer: Callable[[], object], transfer_s: float) -> float:
    """The part of a transfer's seconds that a matrix product takes longer beside it. Collective."""
    matrix = context.random(context.tokens, context.model.hidden_size)
    once_s = context.seconds({"product": partial(torch.matmul, matrix, matrix.T)})["product"]
    # Long enough that the transfer ends before.
    times = max(1, math.ceil(2 * transfer_s / once_s))

    def products() -> None:
        for _ in range(times):
            torch.matmul(matrix, matrix.T)

    def beside() -> None:
        if context.device.type == "cuda":
            stream, side = torch.cuda.current_stream(context.device), torch.cuda.Stream(context.device)
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                transfer()
            products()
            stream.wait_stream(side)
            return
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(transfer)
            products()
            done.result()

    taken_s = context.seconds({"products": products, "beside": beside})
    return min(1.0, max(0.0, (taken_s["beside"] - taken_s["products"]) / transfer_s))


def mirror_of(topology: Topology, homes: HomeExperts) -> NodeMirror:
    """A mirror on every node that holds all experts of one layer. Collective."""
    mirror = NodeMirror(topology, homes.expert_like, homes.device)
    mirror.hold([np.arange(homes.num_experts)[:, None] * [0, 1]] * (topology.num_ranks // topology.ranks_per_node))
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


@dataclass(frozen=True)
class ExchangeFits:
    """Fits of all-to-all times: `rates[0]` bytes per second to and from other ranks, `fixed_s[0]` per all-to-all.

    Attributes:
        near: between ranks of a node; None if a node has one rank.
        far: between nodes; None if there is one node.
    """

    near: Fit | None
    far: Fit | None


def measure_exchange(context: MeasurementContext) -> ExchangeFits:
    """Time all-to-alls with even splits over the ranks of the node, and over those of other nodes. Collective."""
    ranks, per_node, rank = context.topology.num_ranks, context.topology.ranks_per_node, context.topology.rank
    on_node = np.arange(ranks) // per_node == rank // per_node
    return ExchangeFits(
        near=_measure_exchange(context, on_node.tolist()) if per_node > 1 else None,
        far=_measure_exchange(context, (~on_node).tolist()) if per_node < ranks else None,
    )


def _measure_exchange(context: MeasurementContext, is_destination: list[bool]) -> Fit:
    """Fit all-to-alls in which this rank sends rows to some ranks only."""
    most = context.tokens * context.model.top_k
    each = [max(1, round(fraction * most / sum(is_destination))) for fraction in ROW_LOADS]
    taken_s = context.seconds({f"{rows} rows": _exchange(context, rows, is_destination) for rows in each})
    others = sum(is_destination) - is_destination[context.topology.rank]
    nbytes = np.array(each)[:, None] * others * context.model.hidden_size * context.dtype.itemsize
    return fit_rates(nbytes, np.ones((len(each), 1)), np.zeros(len(each)), np.array(list(taken_s.values())))


def _exchange(context: MeasurementContext, rows_each: int, is_destination: list[bool]) -> Callable[[], object]:
    splits = [rows_each * sends for sends in is_destination]
    rows = context.random(sum(splits), context.model.hidden_size)
    return partial(exchange_rows, rows, splits, splits, context.topology.experts)
