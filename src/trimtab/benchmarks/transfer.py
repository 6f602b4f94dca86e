"""`trimtab bench transfer`: what an expert's weights cost on their way, and what a plan saves of the matrix products.

All on one device, a GPU or, with smaller sizes, the CPU; the same code runs on both.

* `grouped`: the experts of a layer against tokens an expert, to see how large a share has to be;
* `host_path`: experts from the node's mirror into slots, and the experts' compute, each alone and both at once;
* `peer_path`: several processes pull experts out of each other's memory, on one GPU through symmetric memory;
* `planned_layer`: a layer with replicas on its planned path at world size 1, where nothing may wait for the GPU;
* `critical_path`: the work of every rank of a planned and of an unplanned instance, one rank after the other.

Tests run it on the CPU. That nothing waits for the device is a fact of CUDA alone; on a CPU the planned layer is only
compared with the unplanned one.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

from trimtab.benchmarks.timing import Clock, medians
from trimtab.cli.options import write_json
from trimtab.cluster import QWEN3_30B, ClusterSpec, ModelSpec
from trimtab.errors import RankFailedError
from trimtab.planner import Placement, StepPlan, Workload, pack_by_length, plan_step
from trimtab.planner.paths import HOST
from trimtab.planner.workload import max_over_mean
from trimtab.runtime import ExpertLayer, ExpertWeight, RowGroups, Session, gated_experts
from trimtab.runtime.binding import RunningStep
from trimtab.runtime.copies import BackgroundCopies
from trimtab.runtime.launch import launch
from trimtab.runtime.layout import InstanceReplicas
from trimtab.runtime.mirror import NodeMirror
from trimtab.runtime.returns import GradientReturns
from trimtab.runtime.symmetric import OVERLAPPING, PeerMemory
from trimtab.runtime.topology import Topology
from trimtab.trace import PRESETS, synthesize, synthesize_preset

QWEN3_235B = ModelSpec("qwen3-235b-a22b", num_experts=128, top_k=8, hidden_size=4096, expert_width=1536)
PRESET = "rl-math"
LAYERS = 4
SLOTS = 2
SEED = 0


@dataclass(frozen=True)
class Sizes:
    """What is measured on a kind of device.

    Attributes:
        models: whose experts.
        dtype: what is computed in.
        tokens_per_expert: in `grouped`.
        ranks: of the expert-parallel group that is stood for; a rank has its share of a layer's experts.
        tokens_per_rank: of an instance, in `critical_path` and `planned_layer`.
        peers: processes that pull from each other.
        overlap_s: how long copies and compute run at once, about.
        tolerance: relative difference between results that should be equal.
    """

    models: tuple[ModelSpec, ...]
    dtype: torch.dtype
    tokens_per_expert: tuple[int, ...]
    ranks: int
    tokens_per_rank: int
    peers: int
    overlap_s: float
    tolerance: float


GPU = Sizes((QWEN3_30B, QWEN3_235B), torch.bfloat16, (16, 64, 256, 1024, 4096), 8, 4096, 4, 0.05, 2e-2)
CPU = Sizes(
    (
        ModelSpec("qwen3-30b-a3b/64", 32, 4, hidden_size=256, expert_width=96, weight_bytes=4),
        ModelSpec("qwen3-235b-a22b/64", 32, 4, hidden_size=512, expert_width=192, weight_bytes=4),
    ),
    torch.float32, (4, 16, 64), 8, 128, 2, 0.05, 1e-5,
)  # fmt: skip


def run_benchmark(rounds: int) -> dict[str, Any]:
    """Measure everything; the figures as `trimtab bench transfer --json` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        alone, peers = Path(folder) / "alone.json", Path(folder) / "peers.json"
        sizes = GPU if torch.cuda.is_available() else CPU
        launch(_measure_alone, (sizes, rounds, alone), ranks=1)
        try:
            launch(_measure_peers, (sizes, rounds, peers), ranks=sizes.peers)
            peer_path = json.loads(peers.read_text())
        except RankFailedError as error:
            peer_path = {"ranks": sizes.peers, "problem": str(error)}
        return json.loads(alone.read_text()) | {"peer_path": peer_path}


def _measure_alone(sizes: Sizes, rounds: int, path: Path) -> None:
    """Everything that one process measures."""
    torch.manual_seed(SEED)
    device = _device()
    clock = Clock(device)
    measures: dict[str, Callable[..., Any]] = {
        "grouped": _grouped,
        "host_path": _host_path,
        "planned_layer": _planned_layer,
        "critical_path": _critical_path,
    }
    figures: dict[str, Any] = {
        "schema": "trimtab-bench-transfer-1",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "rounds": rounds,
        **{name: [] for name in measures},
    }
    work = list(itertools.product(measures.items(), sizes.models))
    for (name, measure), model in track(work, "bench transfer", transient=True):
        figures[name].append({"model": model.name} | measure(sizes, model, clock, device, rounds))
    write_json(path, figures)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _stacks(model: ModelSpec, experts: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random weights of some experts: gate and up, down."""
    width, hidden = model.expert_width, model.hidden_size
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
    return [torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5 for shape in shapes]


def _compute(stacks: list[torch.Tensor], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    return gated_experts()([ExpertWeight(stack) for stack in stacks], rows, groups)


def _grouped(sizes: Sizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int) -> dict[str, Any]:
    """A layer's experts, forward, with the same number of tokens each."""
    stacks = _stacks(model, model.num_experts, sizes.dtype, device)

    def variant(tokens: int) -> Callable[[], dict[str, float]]:
        rows = torch.randn(model.num_experts * tokens, model.hidden_size, dtype=sizes.dtype, device=device)
        groups = RowGroups.of([tokens] * model.num_experts, device)
        return lambda: {"ms": clock.time(partial(_compute, stacks, rows, groups)) * 1e3}

    with torch.no_grad():
        taken = medians({str(tokens): variant(tokens) for tokens in sizes.tokens_per_expert}, rounds)
    flops = 2 * model.expert_parameters * model.num_experts
    points = []
    for tokens in sizes.tokens_per_expert:
        ms = taken[str(tokens)]["ms"]
        points.append({"tokens": tokens, "ms": ms, "tflops": tokens * flops / ms / 1e9})
    return {"experts": model.num_experts, "tokens_per_expert": points}


def _host_path(sizes: Sizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int) -> dict[str, Any]:
    """A rank's experts out of the mirror into slots, while the rank's own compute."""
    experts = model.num_experts // sizes.ranks
    sources, slots = (_stacks(model, experts, sizes.dtype, device) for _ in range(2))
    mirror = NodeMirror(Topology.build(None, 1, None), [source[0] for source in sources], pinned=device.type == "cuda")
    mirror.hold([np.array([[0, expert] for expert in range(experts)])])
    mirror.refresh(np.zeros((1, experts), np.int64), [sources], np.arange(experts)[None])
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
            _compute(sources, rows, groups)

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


def _measure_peers(sizes: Sizes, rounds: int, path: Path) -> None:
    """Every process pulls all experts of all, twice with changed weights; then the first one alone, timed."""
    device, ranks, rank = _device(), dist.get_world_size(), dist.get_rank()
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        os.environ[OVERLAPPING] = "1"
    model, per_rank = sizes.models[0], 2
    session = Session(num_experts=ranks * per_rank)
    stacks = _stacks(model, per_rank, sizes.dtype, device)
    session.add_layer([torch.nn.Parameter(stack) for stack in stacks], gated_experts())
    on_device = device.type == "cuda"
    peers = (PeerMemory.across if on_device else PeerMemory.in_host_memory)(session.topology, session.layers)
    if peers is None:
        if rank == 0:
            write_json(path, {"ranks": ranks, "problem": "the processes can't reach each other's memory"})
        return
    slots = [torch.empty_like(stack[0]) for stack in stacks]
    copies = BackgroundCopies(device)
    right = True
    for number in range(2):
        dist.barrier(group=session.topology.node_control)
        for stack in session.layers[0].sources:
            for row in range(per_rank):
                stack[row] = _mark(number, rank, row)
        peers.fill(session.layers)
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


class _OwnReturns(GradientReturns):
    """For replicas on the home rank itself, which no plan has: their gradients have no way to go."""

    def start(self, layer: ExpertLayer, gradients: Any, replicas: InstanceReplicas) -> None:
        for parameter, gradient in zip(layer.parameters, gradients, strict=True):
            assert parameter.grad is not None
            for p in range(replicas.count):
                parameter.grad[int(layer.rows_E[replicas.experts[p]])] += gradient[int(replicas.slots[p])]


def _planned_layer(sizes: Sizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int) -> dict[str, Any]:
    """Forward and backward of a planned micro-step at world size 1, where the GPU must not be waited for.

    A plan has no replicas on an expert's own home, and there is no other rank. So this one is made by hand: the two
    experts with most tokens have a replica on their own rank, by the host path, that computes half of their tokens.
    """
    experts = model.num_experts // sizes.ranks
    trace = synthesize(
        num_sequences=4, sequence_length=sizes.tokens_per_rank // 4, num_layers=1, num_experts=experts,
        top_k=min(model.top_k, experts // 2), zipf=1.0, seed=SEED,
    )  # fmt: skip
    schedule = pack_by_length(trace.sequence_lengths, num_ranks=1, token_budget=trace.num_tokens)
    workload = Workload.from_trace(trace, schedule)
    counts_E = workload.token_counts_MLRE[0, 0, 0].astype(np.int64)
    hot = np.argsort(-counts_E, kind="stable")[:SLOTS]
    plan = StepPlan.from_instances(
        schedule, Placement.contiguous(1, experts, 1),
        [np.stack([hot, np.zeros_like(hot)], axis=1)], [counts_E[hot, None] // 2],
        plannable=workload.plannable, cluster=ClusterSpec(1, 1, SLOTS),
    )  # fmt: skip
    plan = replace(plan, replica_paths=np.full(SLOTS, HOST, np.uint8))

    session = Session(num_experts=experts, slots_per_rank=SLOTS)
    parameters = [torch.nn.Parameter(stack) for stack in _stacks(model, experts, sizes.dtype, device)]
    layer = session.add_layer(parameters, gated_experts())
    returns = _OwnReturns(session.topology, layers=session.ring_layers, counters=session.counters)
    session._transfers = replace(session.transfers, returns=returns)
    hidden = torch.randn(trace.num_tokens, model.hidden_size, dtype=sizes.dtype, device=device, requires_grad=True)
    live_ids = torch.zeros(trace.num_tokens, trace.top_k, dtype=torch.int64, device=device)
    weights = torch.rand(live_ids.shape, dtype=sizes.dtype, device=device).softmax(dim=-1)
    gradient = torch.randn_like(hidden)

    def adopt(chosen: StepPlan) -> None:
        session._prepare(chosen, moved=0)
        session._step = RunningStep(chosen, workload, trace, runs=True)

    def run() -> list[torch.Tensor]:
        for leaf in (hidden, *parameters):
            leaf.grad = torch.zeros_like(leaf)
        with session.micro_step(0):
            output = layer(hidden, layer.route(live_ids), weights)
            output.backward(gradient)
        return [output.detach(), *(leaf.grad for leaf in (hidden, *parameters) if leaf.grad is not None)]

    adopt(plan.without_replicas())
    expected = run()
    adopt(plan)
    run()
    waits = "not a GPU"
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
            waits = "none"
        except RuntimeError as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            waits = f"{Path(place.filename).name}:{place.lineno}: {str(error).splitlines()[0]}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    errors = [
        float((one - other).float().norm() / other.float().norm()) for one, other in zip(run(), expected, strict=True)
    ]
    planned_s = medians({"planned": lambda: {"s": clock.time(run)}}, rounds)["planned"]["s"]
    session.close()
    return {
        "ran": "forward and backward at world size 1; the hottest experts have replicas on their own rank",
        "replicas": plan.num_replicas,
        "waits_for_device": waits,
        "relative_error": max(errors),
        "right": all(error < sizes.tolerance for error in errors),
        "ms": planned_s * 1e3,
    }


def _critical_path(sizes: Sizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int) -> dict[str, Any]:
    """Expert compute, forward and backward, of every rank of one instance: at home, planned, and perfectly even.

    Of a synthetic step's instances it is the one whose imbalance is the median.
    """
    ranks, experts = sizes.ranks, model.num_experts
    per_rank = experts // ranks
    trace = synthesize_preset(
        PRESETS[PRESET], num_sequences=16 * ranks, mean_length=sizes.tokens_per_rank // 16,
        max_length=sizes.tokens_per_rank // 4, num_layers=LAYERS, num_experts=experts, top_k=model.top_k, seed=SEED,
    )  # fmt: skip
    budget = -(-trace.num_tokens // ranks) + sizes.tokens_per_rank // 4
    schedule = pack_by_length(trace.sequence_lengths, num_ranks=ranks, token_budget=budget)
    workload = Workload.from_trace(trace, schedule)
    placement = Placement.contiguous(LAYERS, experts, ranks)
    plan = plan_step(workload, schedule, placement, ClusterSpec(ranks, ranks, SLOTS))
    before_ML, after_ML = (max_over_mean(x) for x in (workload.home_loads(placement.home), plan.rank_loads(workload)))
    middle = np.argsort(before_ML.reshape(-1), kind="stable")[before_ML.size // 2]
    micro_step, at = divmod(int(middle), LAYERS)
    replicas = InstanceReplicas.of(plan, micro_step, at)
    counts_E = workload.token_counts_MLRE[micro_step, at].sum(axis=0, dtype=np.int64)
    quotas_P = replicas.quotas_PR.sum(axis=1)
    at_home_E = counts_E.copy()
    np.subtract.at(at_home_E, replicas.experts, quotas_P)

    def split(rank: int, home_E: np.ndarray[Any, Any], copies: bool) -> list[list[int]]:
        """Rows of the rank's home experts, and of its replicas if it has any."""
        halves = [home_E[placement.home[at] == rank].tolist()]
        here = quotas_P[replicas.ranks == rank].tolist() if copies else []
        return [*halves, here] if here else halves

    mean = int(counts_E.sum()) // (ranks * per_rank)
    work = {f"static {rank}": split(rank, counts_E, False) for rank in range(ranks)}
    work |= {f"planned {rank}": split(rank, at_home_E, True) for rank in range(ranks)}
    work["even 0"] = [[mean] * per_rank]
    homes = _stacks(model, per_rank, sizes.dtype, device)
    slots = _stacks(model, SLOTS, sizes.dtype, device)
    most = max(sum(half) for halves in work.values() for half in halves)
    rows = torch.randn(most, model.hidden_size, dtype=sizes.dtype, device=device)

    def variant(halves: list[list[int]]) -> Callable[[], dict[str, float]]:
        grouped = [RowGroups.of(half, device) for half in halves]

        def run() -> None:
            for stacks, groups in zip((homes, slots), grouped, strict=False):
                chosen = [stack[: len(groups.counts)].detach().requires_grad_() for stack in stacks]
                given = rows[: sum(groups.counts)].detach().requires_grad_()
                output = _compute(chosen, given, groups)
                output.backward(torch.ones_like(output))

        return lambda: {"ms": clock.time(run) * 1e3}

    taken = medians({name: variant(halves) for name, halves in work.items()}, rounds)
    slowest = {
        kind: max(figures["ms"] for name, figures in taken.items() if name.startswith(kind))
        for kind in ("static", "planned", "even")
    }
    return {
        "preset": PRESET,
        "ranks": ranks,
        "rows_per_rank": int(counts_E.sum()) // ranks,
        "replicas": replicas.count,
        "max_over_mean_static": float(before_ML[micro_step, at]),
        "max_over_mean_planned": float(after_ML[micro_step, at]),
        **{f"{kind}_ms": ms for kind, ms in slowest.items()},
        "speedup": slowest["static"] / slowest["planned"],
        "fraction_of_even": slowest["even"] / slowest["planned"],
    }


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """The tables for people."""
    on = f"{figures['device']}, {figures['dtype']}"
    if figures["device"] == "cpu":
        console.print("No GPU here: smaller sizes on the CPU, which say nothing about one.")
    grouped = _table(f"A layer's experts, forward ({on})", "model", "experts", "tokens an expert", "time", "TFLOP/s")
    for row in figures["grouped"]:
        for point in row["tokens_per_expert"]:
            figures_of = (str(row["experts"]), str(point["tokens"]), f"{point['ms']:.3f} ms", f"{point['tflops']:.3g}")
            grouped.add_row(row["model"], *figures_of)
    host = _table(
        f"Host path ({on})",
        "model", "copies", "beside compute", "an expert", "compute", "beside copies", "slower",
    )  # fmt: skip
    for row in figures["host_path"]:
        host.add_row(
            row["model"],
            f"{row['gb_per_s']:.1f} GB/s",
            f"{row['gb_per_s_beside_compute']:.1f} GB/s",
            f"{row['expert_ms']:.3f} ms",
            f"{row['compute_ms']:.3f} ms",
            f"{row['compute_ms_beside_copies']:.3f} ms",
            f"{row['slowdown']:.1%}",
        )
    layer = _table(f"Planned layer ({on})", "model", "replicas", "waits for the GPU", "right", "time")
    for row in figures["planned_layer"]:
        layer.add_row(
            row["model"], str(row["replicas"]), row["waits_for_device"], _yes(row["right"]), f"{row['ms']:.3f} ms"
        )
    path = _table(
        f"Slowest rank's experts, forward and backward ({on})",
        "model", "ranks", "max/mean", "planned", "static", "planned", "even", "speed-up",
    )  # fmt: skip
    for row in figures["critical_path"]:
        path.add_row(
            row["model"],
            str(row["ranks"]),
            f"{row['max_over_mean_static']:.3f}",
            f"{row['max_over_mean_planned']:.3f}",
            *(f"{row[f'{kind}_ms']:.3f} ms" for kind in ("static", "planned", "even")),
            f"{row['speedup']:.2f}x",
        )
    for table in (grouped, host, layer, path):
        console.print(table)
    peers = figures["peer_path"]
    console.print(
        f"Peer path between {peers['ranks']} processes: "
        + (
            peers["problem"]
            if "problem" in peers
            else f"{peers['memory']}, right: {_yes(peers['right'])}, {peers['gb_per_s']:.1f} GB/s"
        )
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _yes(right: bool) -> str:
    return "yes" if right else "NO"
