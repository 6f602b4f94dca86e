"""`python -m benchmarks.step`: time and memory of planning a whole step, from expert ids to finished plan.

Plan whole steps of 32 micro-steps: 32 ranks, 128 experts and 48 layers; then 256 ranks and 512 experts, and 1,024 of
both, with fewer layers. It also times the header and the slices in which the runtime plans.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.harness import Figures, main, show
from benchmarks.tables import Columns, figure_table, quantity
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.cluster import ClusterSpec
from trimtab.errors import InputError
from trimtab.planner import Placement, Planner, SequenceCounts, StepPlan, Workload, plan_sequences
from trimtab.planner.plan.slices import SlicePlanner, layers_of_rank, rounds_of, to_bytes
from trimtab.report.number_text import bytes_text, seconds
from trimtab.trace import PRESETS, RoutingTrace, read_trace, synthesize_preset, write_trace

MICRO_STEPS = 32
TOKENS_PER_RANK = 1024
MEAN_LENGTH = 256
LONGEST = 512
TOP_K = 8
RANKS_PER_NODE = 8
TOKEN_BUDGET = 1152


@dataclass(frozen=True)
class StepSize:
    """Sizes of a step of 32 micro-steps with 1,024 tokens per rank on average."""

    ranks: int
    experts: int
    layers: int

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.ranks * MICRO_STEPS * TOKENS_PER_RANK


# The larger ones have fewer layers, so that their ids fit in memory. Layers are planned one by one anyway.
SIZES = (StepSize(32, 128, 48), StepSize(256, 512, 4), StepSize(1024, 1024, 1))


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--preset", choices=tuple(PRESETS), default="qwen3-30b-mixed")
    add_options(parser, "--largest", type=positive, default=1024, help="ranks of the largest size to run")
    add_options(parser, "--threads", type=positive, default=1, help="layers planned at a time")
    add_options(parser, "--seed", default=0)


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
    sizes = tuple(size for size in SIZES if size.ranks <= options.largest)
    if not sizes:
        raise InputError(f"--largest is {options.largest}; the smallest step has {SIZES[0].ranks} ranks")
    rows = run_benchmark(sizes, options.preset, threads=options.threads, seed=options.seed)
    show({"schema": "trimtab-bench-step-1", "seed": options.seed, "sizes": rows}, print_figures, options.json)


def run_benchmark(sizes: tuple[StepSize, ...], preset: str, *, threads: int, seed: int) -> list[Figures]:
    """Plan one step of each size, each in its own process, so that peak memory is measured per size."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in track(sizes, "bench step", transient=True):
            path = Path(folder) / "step.parquet"
            write_trace(_draw(size, preset, seed), path)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(_plan, (path, size, threads)) | {"preset": preset, "threads": threads})
    return rows


def _draw(size: StepSize, preset: str, seed: int, *, share: float = 1.0) -> RoutingTrace:
    return synthesize_preset(
        PRESETS[preset], num_sequences=max(size.ranks, round(size.tokens * share) // MEAN_LENGTH),
        mean_length=MEAN_LENGTH, max_length=LONGEST, num_layers=size.layers, num_experts=size.experts, top_k=TOP_K,
        seed=seed,
    )  # fmt: skip


def _plan(path: Path, size: StepSize, threads: int) -> Figures:
    small = StepSize(16, size.experts, size.layers)
    _time(_draw(small, "qwen3-30b-mixed", 0, share=0.1), small, threads)  # compiles kernels
    trace = read_trace(path)
    before = _peak_bytes()
    counting_s, planning_s, plan = _time(trace, size, threads)
    header_s, slices_s = _time_parts(trace, size, threads)
    instances = plan.num_micro_steps * plan.num_layers
    return {
        **asdict(size),
        "micro_steps": plan.num_micro_steps,
        "tokens": trace.num_tokens,
        "counting_s": counting_s,
        "planning_s": planning_s,
        "header_s": header_s,
        "slices_s_per_rank": slices_s,
        "ms_per_instance": (counting_s + planning_s) / instances * 1e3,
        "replicas_per_instance": plan.num_replicas / instances,
        "trace_bytes": trace.expert_ids.nbytes,
        "peak_bytes_before": before,
        "peak_bytes": _peak_bytes(),
        "plan_hash": plan.hash,
    }


def _time(trace: RoutingTrace, size: StepSize, threads: int) -> tuple[float, float, StepPlan]:
    """Seconds of counting and of planning, and the plan."""
    placement = Placement.contiguous(size.layers, size.experts, size.ranks)
    planner = Planner(ClusterSpec(size.ranks, RANKS_PER_NODE), placement, threads=threads)
    start = time.perf_counter()
    planner.add(trace)
    counted = time.perf_counter()
    (plan,) = planner.finish(token_budget=TOKEN_BUDGET)
    return counted - start, time.perf_counter() - counted, plan


def _time_parts(trace: RoutingTrace, size: StepSize, threads: int) -> tuple[float, float]:
    """Seconds of the header on one rank, and of all slices that a rank makes."""
    sequences = SequenceCounts.from_trace(trace)
    placement = Placement.contiguous(size.layers, size.experts, size.ranks)
    start = time.perf_counter()
    header = plan_sequences(
        sequences, placement, ClusterSpec(size.ranks, RANKS_PER_NODE), token_budget=TOKEN_BUDGET, threads=threads,
        sliced=True,
    )  # fmt: skip
    header_s = time.perf_counter() - start
    if header.slices is None:
        return header_s, 0.0
    workload = Workload.from_sequences(sequences, header.schedule)
    planner = SlicePlanner.of(header.slices, 0, workload, header.placement.home)
    layers = layers_of_rank(size.layers, size.ranks - 1, size.ranks)
    start = time.perf_counter()
    for micro_steps in rounds_of(header.schedule.num_micro_steps):
        to_bytes(planner.plan(micro_steps, layers))
    return header_s, time.perf_counter() - start


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def print_figures(figures: Figures, console: Console) -> None:
    """Print one line per size."""
    columns: Columns = {
        "ranks / experts": "{ranks} / {experts}",
        "layers x micro-steps": "{layers} x {micro_steps}",
        "tokens": "{tokens:,}",
        "counting": quantity("counting_s", seconds),
        "planning": quantity("planning_s", seconds),
        "header": quantity("header_s", seconds),
        "slices of a rank": quantity("slices_s_per_rank", seconds),
        "peak memory": quantity("peak_bytes", bytes_text),
    }
    console.print(figure_table("From expert ids to finished plan", columns, figures["sizes"]))


if __name__ == "__main__":
    main("benchmarks.step")
