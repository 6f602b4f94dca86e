"""`python -m benchmarks.transfer`: cost of weight transfers, and expert compute saved by a plan, on one device.

On one GPU (on the CPU with smaller sizes): experts' compute against tokens an expert, host-path copies beside it, peer
pulls between processes, a planned layer that must not wait for the GPU, and the slowest rank's compute with and without
a plan.

Tests run it on the CPU, where waiting for the device can't be detected: there the planned layer is only compared with
the unplanned one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from benchmarks.harness import Figures, main
from benchmarks.tables import Cell, Columns, Row, figure_table, quantity
from benchmarks.transfer_clock import TransferClock
from benchmarks.transfer_plans import measure_critical_path, measure_planned_layer
from trimtab.calibration.alternating_rounds import medians
from trimtab.calibration.calibrate import measure_on_ranks
from trimtab.calibration.measurement import add_random_layer, random_experts, run_experts, this_device
from trimtab.calibration.transfer_rates import mirror_of
from trimtab.cli.options import add_options
from trimtab.cli.parser import Parser
from trimtab.cluster import QWEN3_30B, ModelSpec
from trimtab.errors import RankFailedError
from trimtab.report.number_text import flops, rate, seconds
from trimtab.runtime import RowGroups, Session
from trimtab.runtime.transfer.peer_memory import OVERLAPPING, PeerMemory
from trimtab.runtime.transfer.streams import BackgroundCopies

SEED = 0
PEER_EXPERTS = 2


@dataclass(frozen=True)
class TransferSizes:
    """Models and sizes for one kind of device.

    Attributes:
        models: models whose experts are measured.
        dtype: of weights and activations.
        tokens_per_expert: measured in `grouped`.
        ranks: of the expert-parallel group; a rank has `num_experts / ranks` experts.
        tokens_per_rank: of an instance, in `critical_path` and `planned_layer`.
        peers: processes that copy from each other in `peer_path`.
        overlap_s: approximate seconds for which copies and compute overlap in `host_path`.
        tolerance: relative difference between results that should be equal.
    """

    models: tuple[ModelSpec, ...]
    dtype: torch.dtype
    tokens_per_expert: tuple[int, ...]
    tokens_per_rank: int
    peers: int
    tolerance: float
    ranks: int = 8
    overlap_s: float = 0.05


GPU = TransferSizes(
    models=(QWEN3_30B, ModelSpec.named("qwen3-235b-a22b")),
    dtype=torch.bfloat16,
    tokens_per_expert=(16, 64, 256, 1024, 4096),
    tokens_per_rank=4096,
    peers=4,
    tolerance=2e-2,
)
CPU = TransferSizes(
    models=(
        ModelSpec("qwen3-30b-a3b/64", 32, 4, hidden_size=256, expert_width=96, weight_bytes=4),
        ModelSpec("qwen3-235b-a22b/64", 32, 4, hidden_size=512, expert_width=192, weight_bytes=4),
    ),
    dtype=torch.float32,
    tokens_per_expert=(4, 16, 64),
    tokens_per_rank=128,
    peers=2,
    tolerance=1e-5,
)


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--rounds", default=20)


def run_benchmark(rounds: int) -> Figures:
    """All figures, as `--json` writes them."""
    sizes = GPU if torch.cuda.is_available() else CPU
    figures = measure_on_ranks(_measure_alone, (sizes, rounds), ranks=1)
    try:
        peer_path = measure_on_ranks(measure_peers, (sizes, rounds), ranks=sizes.peers)
    except RankFailedError as error:
        peer_path = {"ranks": sizes.peers, "problem": str(error)}
    return figures | {"peer_path": peer_path}


def _measure_alone(sizes: TransferSizes, rounds: int) -> dict[str, Any]:
    """All figures of one process."""
    torch.manual_seed(SEED)
    device = this_device()
    clock = TransferClock(device)
    measures: dict[str, Callable[..., Any]] = {
        "grouped": measure_grouped,
        "host_path": measure_host_path,
        "planned_layer": measure_planned_layer,
        "critical_path": measure_critical_path,
    }
    figures: Figures = {
        "schema": "trimtab-bench-transfer-1",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "rounds": rounds,
        **{name: [] for name in measures},
    }
    work = list(itertools.product(measures.items(), sizes.models))
    for (name, measure), model in track(work, "bench transfer", transient=True):
        figures[name].append({"model": model.name} | measure(sizes, model, clock, device, rounds))
    return figures


@torch.no_grad()
def measure_grouped(
    sizes: TransferSizes, model: ModelSpec, clock: TransferClock, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Forward of a layer's experts, with the same number of tokens each."""
    stacks = random_experts(model, model.num_experts, sizes.dtype, device)
    works = {}
    for tokens in sizes.tokens_per_expert:
        rows = torch.randn(model.num_experts * tokens, model.hidden_size, dtype=sizes.dtype, device=device)
        works[str(tokens)] = partial(run_experts, stacks, rows, RowGroups.of([tokens] * model.num_experts, device))
    operations = 2 * model.expert_parameters * model.num_experts
    points = [
        {"tokens": int(tokens), "ms": taken_s * 1e3, "tflops": int(tokens) * operations / taken_s / 1e12}
        for tokens, taken_s in clock.medians(works, rounds).items()
    ]
    return {"experts": model.num_experts, "tokens_per_expert": points}


@torch.no_grad()
def measure_host_path(
    sizes: TransferSizes, model: ModelSpec, clock: TransferClock, device: torch.device, rounds: int
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
        copied_s, computed_s = clock.seconds(start, copied()), clock.seconds(begun, computed)
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
    figures: Figures = {}
    if rank == 0:
        pairs = [(s, p) for row in range(PEER_EXPERTS) for s, p in zip(slots, peers.row(0, 1, row), strict=True)]
        copy_s = TransferClock(device).medians({"copy": lambda: copies.start(pairs)()}, rounds)["copy"]
        figures = {
            "ranks": ranks,
            "memory": "symmetric memory" if on_device else "shared host memory",
            "right": bool(all_right),
            "gb_per_s": sum(source.nbytes for _, source in pairs) / copy_s / 1e9,
        }
    dist.barrier(group=session.topology.node_control)
    copies.close()
    return figures


def _weight(number: int, rank: int, row: int) -> int:
    """The value of all weights of an expert, exact in bfloat16."""
    return 100 * number + 10 * rank + row


def print_figures(figures: Figures, console: Console) -> None:
    """Print one table per part of the benchmark."""
    on = f"{figures['device']}, {figures['dtype']}"
    if figures["device"] == "cpu":
        console.print("No GPU here: smaller sizes on the CPU, which say nothing about a GPU.")
    grouped: Columns = {
        "model": "{model}",
        "experts": "{experts}",
        "tokens per expert": "{tokens}",
        "time": _ms("ms"),
        "rate": quantity("tflops", flops, 1e12),
    }
    points = [row | point for row in figures["grouped"] for point in row["tokens_per_expert"]]
    console.print(figure_table(f"A layer's experts, forward ({on})", grouped, points))
    host_path: Columns = {
        "model": "{model}",
        "copies": quantity("gb_per_s", rate, 1e9),
        "beside compute": quantity("gb_per_s_beside_compute", rate, 1e9),
        "per expert": _ms("expert_ms"),
        "compute": _ms("compute_ms"),
        "beside copies": _ms("compute_ms_beside_copies"),
        "slower": "{slowdown:.1%}",
    }
    console.print(figure_table(f"Host path ({on})", host_path, figures["host_path"]))
    planned_layer: Columns = {
        "model": "{model}",
        "replicas": "{replicas}",
        "waits for the GPU": "{waits_for_device}",
        "right": _is_right,
        "time": _ms("ms"),
    }
    console.print(figure_table(f"Planned layer ({on})", planned_layer, figures["planned_layer"]))
    critical_path: Columns = {
        "model": "{model}",
        "ranks": "{ranks}",
        "max/mean": "{max_over_mean_static:.3f}",
        "max/mean planned": "{max_over_mean_planned:.3f}",
        "static": _ms("static_ms"),
        "planned": _ms("planned_ms"),
        "even": _ms("even_ms"),
        "speed-up": "{speedup:.2f}x",
    }
    title = f"Slowest rank's experts, forward and backward ({on})"
    console.print(figure_table(title, critical_path, figures["critical_path"]))
    peers = figures["peer_path"]
    result = peers.get("problem") or f"{peers['memory']}, right: {_is_right(peers)}, {rate(peers['gb_per_s'] * 1e9)}"
    console.print(f"Peer path between {peers['ranks']} processes: {result}")


def _ms(key: str) -> Cell:
    return quantity(key, seconds, 1e-3)


def _is_right(row: Row) -> str:
    return "yes" if row["right"] else "NO"


if __name__ == "__main__":
    main("benchmarks.transfer")
