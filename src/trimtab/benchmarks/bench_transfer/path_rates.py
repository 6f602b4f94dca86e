"""What an expert's weights cost on their way, and the experts' compute beside them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trimtab.calibration.random_experts import Sizes, random_experts, run_experts, this_device
from trimtab.calibration.timing import Clock, medians
from trimtab.cluster import ModelSpec
from trimtab.files import write_json
from trimtab.runtime import RowGroups, Session, gated_experts
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer.copy_engine import BackgroundCopies
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import OVERLAPPING, PeerMemory


def measure_grouped(sizes: Sizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int) -> dict[str, Any]:
    """A layer's experts, forward, with the same number of tokens each."""
    stacks = random_experts(model, model.num_experts, sizes.dtype, device)

    def variant(tokens: int) -> Callable[[], dict[str, float]]:
        rows = torch.randn(model.num_experts * tokens, model.hidden_size, dtype=sizes.dtype, device=device)
        groups = RowGroups.of([tokens] * model.num_experts, device)
        return lambda: {"ms": clock.time(partial(run_experts, stacks, rows, groups)) * 1e3}

    with torch.no_grad():
        taken = medians({str(tokens): variant(tokens) for tokens in sizes.tokens_per_expert}, rounds)
    flops = 2 * model.expert_parameters * model.num_experts
    points = []
    for tokens in sizes.tokens_per_expert:
        ms = taken[str(tokens)]["ms"]
        points.append({"tokens": tokens, "ms": ms, "tflops": tokens * flops / ms / 1e9})
    return {"experts": model.num_experts, "tokens_per_expert": points}


def measure_host_path(
    sizes: Sizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int
) -> dict[str, Any]:
    """A rank's experts out of the mirror into slots, while the rank's own compute."""
    experts = model.num_experts // sizes.ranks
    sources, slots = (random_experts(model, experts, sizes.dtype, device) for _ in range(2))
    like = [(source.shape[1:], source.dtype) for source in sources]
    mirror = NodeMirror(Topology.build(None, 1, None), like, pinned=device.type == "cuda")
    mirror.hold([np.array([[0, expert] for expert in range(experts)])])
    parameters = [torch.nn.Parameter(source, requires_grad=False) for source in sources]
    mirror.refresh([HomeExperts(0, lambda: parameters, rank=0, home_E=np.zeros(experts, np.int64))])
    pairs = [(slot[e], row) for e in range(experts) for slot, row in zip(slots, mirror.row(0, e), strict=True)]
    copies = BackgroundCopies(device)
    tokens = sizes.tokens_per_rank * model.top_k // experts
    rows = torch.randn(experts * tokens, model.hidden_size, dtype=sizes.dtype, device=device)
    groups = RowGroups.of([tokens] * experts, device)

    def copy(times: int) -> dict[str, float]:
        start = clock.now()
        return {"copy_s": clock.seconds(start, clock.after(copies.start(pairs * times))) / times}

    def work(times: int) -> None:
        for _ in range(times):
            run_experts(sources, rows, groups)

    def compute(times: int) -> dict[str, float]:
        return {"compute_s": clock.time(partial(work, times)) / times}

    def both(copy_times: int, compute_times: int) -> dict[str, float]:
        start = clock.now()
        copied = clock.after(copies.start(pairs * copy_times))
        # Starting many copies takes the host a while.
        begun = clock.now()
        work(compute_times)
        computed = clock.now()
        return {
            "copy_s": clock.seconds(start, copied) / copy_times,
            "compute_s": clock.seconds(begun, computed) / compute_times,
        }

    with torch.no_grad():
        # As many of each as last about as long as the other.
        once = medians({"copy": partial(copy, 1), "compute": partial(compute, 1)}, 1)
        copy_times = max(1, round(sizes.overlap_s / once["copy"]["copy_s"]))
        compute_times = max(1, round(sizes.overlap_s / once["compute"]["compute_s"]))
        taken = medians(
            {
                "copy": partial(copy, copy_times),
                "compute": partial(compute, compute_times),
                "both": partial(both, copy_times, compute_times),
            },
            rounds,
        )
    right = all(torch.equal(slot, source) for slot, source in zip(slots, sources, strict=True))
    copies.close()
    mirror.close()
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


def measure_peers(sizes: Sizes, rounds: int, path: Path) -> None:
    """Every process pulls all experts of all, twice with changed weights; then the first one alone, timed."""
    device, ranks, rank = this_device(), dist.get_world_size(), dist.get_rank()
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        os.environ[OVERLAPPING] = "1"
    model, per_rank = sizes.models[0], 2
    session = Session(num_experts=ranks * per_rank)
    stacks = random_experts(model, per_rank, sizes.dtype, device)
    session.add_layer([torch.nn.Parameter(stack) for stack in stacks], gated_experts())
    on_device = device.type == "cuda"
    peers = (PeerMemory.across if on_device else PeerMemory.in_host_memory)(session.topology, session.homes)
    if peers is None:
        if rank == 0:
            write_json(path, {"ranks": ranks, "problem": "the processes can't reach each other's memory"})
        return
    slots = [torch.empty_like(stack[0]) for stack in stacks]
    copies = BackgroundCopies(device)
    right = True
    for number in range(2):
        dist.barrier(group=session.topology.node_control)
        for stack in session.homes[0].sources:
            for row in range(per_rank):
                stack[row].fill_(_mark(number, rank, row))
        peers.fill(session.homes)
        for home, row in itertools.product(range(ranks), range(per_rank)):
            copies.start(list(zip(slots, peers.row(0, home, row), strict=True)))()
            right = right and all(bool((slot == _mark(number, home, row)).all()) for slot in slots)
        if on_device:
            torch.cuda.synchronize()
    verdict = torch.tensor(int(right))
    dist.all_reduce(verdict, dist.ReduceOp.MIN, group=session.topology.node_control)
    if rank == 0:
        clock = Clock(device)
        pairs = [(s, p) for row in range(per_rank) for s, p in zip(slots, peers.row(0, 1, row), strict=True)]

        def pull() -> dict[str, float]:
            start = clock.now()
            return {"s": clock.seconds(start, clock.after(copies.start(pairs)))}

        seconds = medians({"pull": pull}, rounds)["pull"]["s"]
        nbytes = sum(source.nbytes for _, source in pairs)
        where = "symmetric memory" if on_device else "shared host memory"
        write_json(path, {"ranks": ranks, "memory": where, "right": bool(verdict), "gb_per_s": nbytes / seconds / 1e9})
    dist.barrier(group=session.topology.node_control)
    copies.close()


def _mark(number: int, rank: int, row: int) -> int:
    """What weights are set to: small enough to be exact in bfloat16."""
    return 100 * number + 10 * rank + row
