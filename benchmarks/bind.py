"""`python -m benchmarks.bind`: what binding a micro-step to its plan costs the training thread, and its upload.

Run steps whose layers take their estimated time on an H100, and time how long the training thread waits for the tables
of rows, which another thread makes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch._C._distributed_c10d import HashStore

from benchmarks.harness import Figures, main
from benchmarks.routing import EXPERTS, TOP_K, long_responses
from benchmarks.tables import Columns, figure_table
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.cluster import QWEN3_30B, ClusterSpec, StepCosts
from trimtab.runtime import Session, gated_experts

MICRO_STEPS = 4


EXAMPLES = ("--json out/bench-bind.json", "--tokens 31744")


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--tokens", type=positive, default=8192, help="tokens of a rank in a micro-step")
    add_options(parser, "--layers", type=positive, default=48)
    add_options(parser, "--rounds", default=5)


def run_benchmark(tokens: int, layers: int, rounds: int, seed: int = 0) -> Figures:
    """Run steps of a session whose layers take their estimated time on an H100: attention and experts of Qwen3-30B-A3B.

    It is a rank by itself, so that as many rows arrive as it has. The layers compute nothing: while a GPU would
    compute, the training thread sleeps.

    Args:
        tokens: tokens of a micro-step.
        layers: MoE layers.
        rounds: counted steps, each of two passes over all micro-steps, as recompute and update.
        seed: of the routing.
    """
    operations = StepCosts.of(ClusterSpec(8, 8), QWEN3_30B).operations
    row_s = operations.tile_s / operations.tile_rows + operations.row_s
    layer_s = operations.layer_s + tokens * (operations.token_s + TOP_K * row_s)
    trace = long_responses(tokens, layers=layers, seed=seed)
    rows = np.resize(trace.expert_ids, (tokens, layers, TOP_K))
    passes: list[list[float]] = []
    whole: list[float] = []
    with _session(layers) as session:
        for _ in track(range(rounds + 1), "bench bind", transient=True):
            session.plan_micro_steps([rows] * MICRO_STEPS)
            passes += [_blocked_s(session, layer_s), _blocked_s(session, layer_s)]
            seconds, nbytes = _make_all(session)
            whole.append(seconds)
    # The first step compiles kernels.
    first, second = np.array(passes[2::2]) * 1e3, np.array(passes[3::2]) * 1e3
    return {
        "schema": "trimtab-bench-bind-1",
        "tokens_per_rank": tokens,
        "layers": layers,
        "critical_path_ms": float(np.median(np.concatenate([first, second], axis=1).mean(axis=1))),
        "upload_mb": nbytes / 1e6,
        "first_micro_step_ms": float(np.median(first[:, 0])),
        "later_micro_steps_ms": float(np.median(first[:, 1:])),
        "second_pass_ms": float(np.median(second)),
        "without_thread_ms": statistics.median(whole[1:]) * 1e3,
        "layer_ms": layer_s * 1e3,
        "rounds": rounds,
        "seed": seed,
    }


@contextmanager
def _session(layers: int) -> Iterator[Session]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    session = Session(num_experts=EXPERTS, mode="static")
    for _ in range(layers):
        session.add_layer([torch.nn.Parameter(torch.ones(EXPERTS, 1, 1))], gated_experts())
    try:
        yield session
    finally:
        session.close()
        dist.destroy_process_group()


def _blocked_s(session: Session, layer_s: float) -> list[float]:
    """Seconds for which the training thread is busy binding, or waits for it, in each micro-step of a pass."""
    blocked = []
    with torch.no_grad():
        for index in range(MICRO_STEPS):
            start = time.perf_counter()
            with session.micro_step(index):
                seconds = time.perf_counter() - start
                routes = session._calls.routes()
                assert routes is not None
                for layer in range(len(session.homes)):
                    start = time.perf_counter()
                    routes.program(layer)
                    seconds += time.perf_counter() - start
                    time.sleep(layer_s)
                start = time.perf_counter()
            blocked.append(seconds + time.perf_counter() - start)
    return blocked


def _make_all(session: Session) -> tuple[float, int]:
    """Seconds of making all programs of a micro-step at once, and their bytes."""
    step = session._need_step("a program")
    step.drop_programs()
    programs = step.programs_of(0, has_slices=True)
    start = time.perf_counter()
    programs.make_all()
    return time.perf_counter() - start, programs.nbytes


def print_figures(figures: Figures, console: Console) -> None:
    """Print the figures as a table."""
    title = (
        f"binding a micro-step of {figures['tokens_per_rank']} tokens to {figures['layers']} layers, which take "
        f"{figures['layer_ms']:.1f} ms each (estimated for an H100)"
    )
    columns: Columns = {"training thread": "{name}", "milliseconds": "{ms:.2f}"}
    names = {
        "mean over two passes": "critical_path_ms",
        "first micro-step of a step": "first_micro_step_ms",
        "others of the first pass": "later_micro_steps_ms",
        "second pass": "second_pass_ms",
        "all tables at once, without a thread": "without_thread_ms",
    }
    console.print(figure_table(title, columns, [{"name": name, "ms": figures[key]} for name, key in names.items()]))
    console.print(f"upload: {figures['upload_mb']:.1f} MB a micro-step")


if __name__ == "__main__":
    main("benchmarks.bind")
