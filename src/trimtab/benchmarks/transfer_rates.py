"""Time of expert compute, and rates of expert copies from host memory and from other processes."""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trimtab.benchmarks.transfer_sizes import TransferSizes
from trimtab.calibration.alternating_rounds import medians
from trimtab.calibration.link_rates import mirror_of
from trimtab.calibration.random_experts import add_random_layer, random_experts, run_experts, this_device
from trimtab.calibration.timing import Clock
from trimtab.cluster import ModelSpec
from trimtab.runtime import RowGroups, Session
from trimtab.runtime.transfer.peer_memory import OVERLAPPING, PeerMemory
from trimtab.runtime.transfer.streams import BackgroundCopies

PEER_EXPERTS = 2


@torch.no_grad()
def measure_grouped(
    sizes: TransferSizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Forward of a layer's experts, with the same number of tokens each."""
    stacks = random_experts(model, model.num_experts, sizes.dtype, device)
    works = {}
    for tokens in sizes.tokens_per_expert:
        rows = torch.randn(model.num_experts * tokens, model.hidden_size, dtype=sizes.dtype, device=device)
        works[str(tokens)] = partial(run_experts, stacks, rows, RowGroups.of([tokens] * model.num_experts, device))
    flops = 2 * model.expert_parameters * model.num_experts
    points = [
        {"tokens": int(tokens), "ms": seconds * 1e3, "tflops": int(tokens) * flops / seconds / 1e12}
        for tokens, seconds in clock.medians(works, rounds).items()
    ]
    return {"experts": model.num_experts, "tokens_per_expert": points}


@torch.no_grad()
def measure_host_path(
    sizes: TransferSizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Copies of a rank's experts from the mirror into slots, during the rank's compute and without it."""
    experts = model.num_experts // sizes.ranks
    session = Session(num_experts=experts)
    homes = add_random_layer(session, model, sizes.dtype, device).homes
    sources = [parameter.detach() for parameter in homes.parameters]
    slots = [torch.empty_like(source) for source in sources]
    mirror = mirror_of(session.topology, homes)
    pairs = [(slot[e], row) for e in range(experts) for slot, row in zip(slots, mirror.row(0, e), strict=True)]
    copies = BackgroundCopies(device)
    tokens = sizes.tokens_per_rank * model.top_k // experts
    rows = torch.randn(experts * tokens, model.hidden_size, dtype=sizes.dtype, device=device)
    groups = RowGroups.of([tokens] * experts, device)

    def compute(times: int) -> None:
        for _ in range(times):
            run_experts(sources, rows, groups)

    def run(copy_times: int, compute_times: int) -> dict[str, float]:
        start = clock.now()
        copied = clock.after(copies.start(pairs * copy_times))
        # The host needs some time to start many copies.
        begun = clock.now()
        compute(compute_times)
        computed = clock.now()
        copied_s, computed_s = clock.seconds(start, copied), clock.seconds(begun, computed)
        return {"copy_s": copied_s / max(1, copy_times), "compute_s": computed_s / max(1, compute_times)}

    # As many copies and computations as take about the same time.
    once = medians({"copy": partial(run, 1, 0), "compute": partial(run, 0, 1)}, 1)
    copy_times = max(1, round(sizes.overlap_s / once["copy"]["copy_s"]))
    compute_times = max(1, round(sizes.overlap_s / once["compute"]["compute_s"]))
    variants = {
        "copy": partial(run, copy_times, 0),
        "compute": partial(run, 0, compute_times),
        "both": partial(run, copy_times, compute_times),
    }
    taken = medians(variants, rounds)
    right = all(torch.equal(slot, source) for slot, source in zip(slots, sources, strict=True))
    copies.close()
    mirror.close()
    session.close()
    nbytes = sum(source.nbytes for source in sources)
    alone_s, beside_s = taken["compute"]["compute_s"], taken["both"]["compute_s"]
    return {
        "right": right,
        "copied_bytes": nbytes,
        "gb_per_s": nbytes / taken["copy"]["copy_s"] / 1e9,
        "gb_per_s_beside_compute": nbytes / taken["both"]["copy_s"] / 1e9,
        "expert_ms": taken["copy"]["copy_s"] / experts * 1e3,
        "compute_ms": alone_s * 1e3,
        "compute_ms_beside_copies": beside_s * 1e3,
        "slowdown": beside_s / alone_s - 1,
    }


def measure_peers(sizes: TransferSizes, rounds: int) -> dict[str, Any]:
    """Copies between processes: checked from every process to every other, with two sets of weights; timed on rank 0.

    Returns:
        On rank 0 the figures, or a `problem`; on other ranks an empty dictionary.
    """
    device, ranks, rank = this_device(), dist.get_world_size(), dist.get_rank()
    on_device = device.type == "cuda"
    if on_device and torch.cuda.device_count() < ranks:
        os.environ[OVERLAPPING] = "1"
    session = Session(num_experts=ranks * PEER_EXPERTS)
    homes = add_random_layer(session, sizes.models[0], sizes.dtype, device).homes
    peers = (PeerMemory.across if on_device else PeerMemory.in_host_memory)(session.topology, session.homes)
    if peers is None:
        return {"ranks": ranks, "problem": "the processes can't reach each other's memory"}
    slots = [torch.empty_like(parameter[0]) for parameter in homes.parameters]
    copies = BackgroundCopies(device)
    right = True
    for number in range(2):
        dist.barrier(group=session.topology.node_control)
        for stack in homes.sources:
            for row in range(PEER_EXPERTS):
                stack[row].fill_(_weight(number, rank, row))
        peers.fill(session.homes)
        for home, row in itertools.product(range(ranks), range(PEER_EXPERTS)):
            copies.start(list(zip(slots, peers.row(0, home, row), strict=True)))()
            right = right and all(bool((slot == _weight(number, home, row)).all()) for slot in slots)
        if on_device:
            torch.cuda.synchronize()
    all_right = torch.tensor(int(right))
    dist.all_reduce(all_right, dist.ReduceOp.MIN, group=session.topology.node_control)
    figures: dict[str, Any] = {}
    if rank == 0:
        pairs = [(s, p) for row in range(PEER_EXPERTS) for s, p in zip(slots, peers.row(0, 1, row), strict=True)]
        seconds = Clock(device).medians({"copy": lambda: copies.start(pairs)()}, rounds)["copy"]
        figures = {
            "ranks": ranks,
            "memory": "symmetric memory" if on_device else "shared host memory",
            "right": bool(all_right),
            "gb_per_s": sum(source.nbytes for _, source in pairs) / seconds / 1e9,
        }
    dist.barrier(group=session.topology.node_control)
    copies.close()
    return figures


def _weight(number: int, rank: int, row: int) -> int:
    """The value of all weights of an expert, exact in bfloat16."""
    return 100 * number + 10 * rank + row
