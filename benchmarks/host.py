"""`python -m benchmarks.host`: processor time that planning costs the training thread in Megatron's MoE layers.

Steps of Megatron alone and planned ones, in turns, with one rank, one token and a hidden size of 8, so that nearly all
time is that of Python and of starting operations. Experts are Megatron's `SequentialMLP`, 16 on the rank, on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore

from benchmarks.harness import Figures, main
from benchmarks.tables import Columns, figure_table
from trimtab.calibration.alternating_rounds import alternate, median_with_interval
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.cluster import ModelSpec
from trimtab.doctor.gpu.megatron_layers import LayerCase, MegatronLayers, start_megatron

MODEL = ModelSpec("tiny", 16, 4, hidden_size=8, expert_width=8)
SLOTS = 2


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--layers", type=positive, default=48)
    add_options(parser, "--micro-batches", type=positive, default=4, help="micro-batches of a step")
    add_options(parser, "--rounds", default=20)


def run_benchmark(layers: int, micro_batches: int, rounds: int) -> Figures:
    """Time steps: forward and backward of all micro-batches; planned ones with their planning.

    Args:
        layers: MoE layers; they have no attention between them.
        micro_batches: of a step.
        rounds: timed steps of each kind.
    """
    with _one_rank():
        case = LayerCase(MODEL, 1, 1.0, layers=layers, micro_batches=micro_batches)
        plain, planned = MegatronLayers(case), MegatronLayers(case)
        session = planned.balance(SLOTS)
        (routing,) = case.routing(1, 0)
        ids = [torch.from_numpy(ids.transpose(1, 0, 2).astype("int64")) for ids in routing]
        steps = {
            "plain": partial(_timed, plain, partial(plain.step_with_replay, ids)),
            "planned": partial(_timed, planned, partial(planned.planned_step, session, routing)),
        }
        seconds = alternate(steps, rounds, progress="bench host")
        session.remove()
    passes = layers * micro_batches
    ratio, interval = median_with_interval(np.divide(seconds["planned"], seconds["plain"]).tolist())
    return {
        "schema": "trimtab-bench-host-1",
        "layers": layers,
        "micro_batches": micro_batches,
        "rounds": rounds,
        "layer_ms": {name: float(np.median(of_step)) / passes * 1e3 for name, of_step in seconds.items()},
        "ratio": ratio,
        "ratio_interval": interval,
        "step_s": seconds,
    }


def _timed(layers: MegatronLayers, step: Callable[[], None]) -> float:
    """Processor time of this thread, on which autograd runs backward, too."""
    layers.zero()
    start = time.thread_time()
    step()
    return time.thread_time() - start


@contextmanager
def _one_rank() -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    start_megatron()
    try:
        yield
    finally:
        dist.destroy_process_group()


def print_figures(figures: Figures, console: Console) -> None:
    """Print the figures as a table."""
    sizes = f"{figures['layers']} MoE layers, {figures['micro_batches']} micro-batches"
    title = f"processor time of forward and backward, {sizes}"
    columns: Columns = {"step": "{name}", "ms a layer and micro-batch": "{ms:.2f}"}
    console.print(figure_table(title, columns, [{"name": name, "ms": ms} for name, ms in figures["layer_ms"].items()]))
    low, high = figures["ratio_interval"]
    console.print(f"planned over plain: {figures['ratio']:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main("benchmarks.host")
