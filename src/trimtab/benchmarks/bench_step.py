"""`trimtab bench step`: a whole step from expert ids to finished plan, its time and memory, and how both grow."""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, Planner
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
    """One step: 32 micro-steps of 1,024 tokens a rank on average."""

    ranks: int
    experts: int
    layers: int

    @property
    def tokens(self) -> int:
        return self.ranks * MICRO_STEPS * TOKENS_PER_RANK


# The larger ones have fewer layers, so that their ids fit in memory; layers are planned one by one in any case.
SIZES = (StepSize(32, 128, 48), StepSize(256, 512, 4), StepSize(1024, 1024, 1))


def run_benchmark(sizes: tuple[StepSize, ...], preset: str, *, threads: int, seed: int) -> list[dict[str, Any]]:
    """Plan one step of each size in a process of its own, so that its peak memory is its own too."""
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
        PRESETS[preset],
        num_sequences=max(size.ranks, round(size.tokens * share) // MEAN_LENGTH),
        mean_length=MEAN_LENGTH,
        max_length=LONGEST,
        num_layers=size.layers,
        num_experts=size.experts,
        top_k=TOP_K,
        seed=seed,
    )


def _plan(path: Path, size: StepSize, threads: int) -> dict[str, Any]:
    cluster = ClusterSpec(size.ranks, RANKS_PER_NODE)
    placement = Placement.contiguous(size.layers, size.experts, size.ranks)
    small = StepSize(16, size.experts, size.layers)
    _time(_draw(small, "rl-mixed", 0, share=0.1), ClusterSpec(16, RANKS_PER_NODE), threads)
    trace = read_trace(path)
    before = _peak_bytes()
    counting_s, planning_s, plan = _time(trace, cluster, threads, placement)
    instances = plan.num_micro_steps * plan.num_layers
    return {
        "ranks": size.ranks,
        "experts": size.experts,
        "layers": size.layers,
        "micro_steps": plan.num_micro_steps,
        "tokens": trace.num_tokens,
        "counting_s": counting_s,
        "planning_s": planning_s,
        "ms_per_instance": (counting_s + planning_s) / instances * 1e3,
        "replicas_per_instance": plan.num_replicas / instances,
        "trace_bytes": trace.expert_ids.nbytes,
        "peak_bytes_before": before,
        "peak_bytes": _peak_bytes(),
        "plan_hash": plan.hash,
    }


def _time(trace: RoutingTrace, cluster: ClusterSpec, threads: int, placement: Placement | None = None) -> Any:
    planner = Planner(
        cluster,
        placement or Placement.contiguous(trace.num_layers, trace.num_experts, cluster.ranks),
        threads=threads,
    )
    start = time.perf_counter()
    planner.add(trace)
    counted = time.perf_counter()
    (plan,) = planner.finish(token_budget=TOKEN_BUDGET)
    return counted - start, time.perf_counter() - counted, plan


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def print_figures(rows: list[dict[str, Any]], console: Console) -> None:
    """The table for people."""
    table = Table(title="From expert ids to finished plan", title_justify="left", title_style="bold")
    for column in ("ranks / experts", "layers x micro-steps", "tokens", "counting", "planning", "peak memory"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['ranks']} / {row['experts']}",
            f"{row['layers']} x {row['micro_steps']}",
            f"{row['tokens'] / 1e6:.1f} M",
            f"{row['counting_s']:.2f} s",
            f"{row['planning_s']:.2f} s",
            f"{row['peak_bytes'] / 1e9:.2f} GB",
        )
    console.print(table)
