"""`python -m benchmarks.host`: processor time that planning costs the training thread in Megatron's MoE layers.

Steps of Megatron alone and planned ones, in turns, with one rank, one token and a hidden size of 8, so that nearly all
time is that of Python and of starting operations. The rank has 16 experts: a `TEGroupedMLP`, whose products are one
operation of torch on the CPU, or a `SequentialMLP`. Both steps replay routing. With one rank there are no replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore

from benchmarks.grouped_linear import GroupedLinear
from benchmarks.harness import Figures, main
from benchmarks.megatron_layers import LayerCase, MegatronLayers
from benchmarks.replayed_megatron import replayed, start_megatron
from benchmarks.tables import Columns, figure_table
from trimtab.calibration.alternating_rounds import alternate, median_with_interval
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.cluster import ModelSpec
from trimtab.integrations.megatron import balance

MODEL = ModelSpec("tiny", 16, 4, hidden_size=8, expert_width=8)
SLOTS = 2


def add_to(parser: Parser) -> None:
    """Add the options."""
    option = partial(add_options, parser, of=run_benchmark)
    option("--layers", type=positive, nargs="+", help="MoE layers, one or several numbers of them")
    option("--micro-batches", type=positive, help="micro-batches of a step")
    option("--rounds")


def run_benchmark(layers: Sequence[int] = (2, 8, 48), micro_batches: int = 4, rounds: int = 20) -> Figures:
    """Time steps: forward and backward of all micro-batches; planned ones with their planning, which is also timed.

    Args:
        layers: MoE layers, one or several numbers of them; they have no attention between them.
        micro_batches: of a step.
        rounds: timed steps of each kind.
    """
    with _one_rank():
        cases = [
            _run_case(LayerCase(MODEL, 1, 1.0, layers=number, micro_batches=micro_batches), linear, rounds)
            for linear in (GroupedLinear, None)
            for number in layers
        ]
    return {"schema": "trimtab-bench-host-2", "micro_batches": micro_batches, "rounds": rounds, "cases": cases}


def _run_case(case: LayerCase, linear: type[GroupedLinear] | None, rounds: int) -> Figures:
    """Seconds of processor time of each step; `planning` is a part of `planned`."""
    plain, planned = MegatronLayers(case, linear), MegatronLayers(case, linear)
    session = balance(planned.ddp, slots_per_rank=SLOTS)
    (routing,) = case.routing(1, 0)
    steps = {
        "plain": partial(_timed, plain, partial(plain.step_with_replay, replayed(routing))),
        "planned": partial(_timed, planned, partial(planned.step, routing, session)),
    }
    planning_s: list[float] = []
    with mock.patch.object(session, "plan", partial(_timed_plan, session.plan, planning_s)):
        seconds = alternate(steps, rounds, progress=f"bench host, {plain.engine}, {case.layers} layers")
    session.remove()
    ratio, interval = median_with_interval(np.divide(seconds["planned"], seconds["plain"]).tolist())
    # Without those of untimed steps, which come first.
    seconds["planning"] = planning_s[-rounds:]
    micro_batch_ms = {name: float(np.median(of_step)) / case.micro_batches * 1e3 for name, of_step in seconds.items()}
    return {
        "experts": plain.engine,
        "layers": case.layers,
        "micro_batch_ms": micro_batch_ms,
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


def _timed_plan(plan: Callable[..., Any], seconds: list[float], *arguments: Any, **options: Any) -> Any:
    start = time.thread_time()
    report = plan(*arguments, **options)
    seconds.append(time.thread_time() - start)
    return report


@contextmanager
def _one_rank() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    start_megatron()
    try:
        yield
    finally:
        dist.destroy_process_group()


def print_figures(figures: Figures, console: Console) -> None:
    """Print the figures as a table."""
    rows = [
        {**case, **case["micro_batch_ms"], "low": case["ratio_interval"][0], "high": case["ratio_interval"][1]}
        for case in figures["cases"]
    ]
    columns: Columns = {
        "experts": "{experts}", "layers": "{layers}", "plain": "{plain:.2f} ms", "planned": "{planned:.2f} ms",
        "of it planning": "{planning:.2f} ms", "planned / plain": "{ratio:.2f}",
        "95% interval": "{low:.2f} to {high:.2f}",
    }  # fmt: skip
    console.print(figure_table("Processor time of a micro-batch, forward and backward", columns, rows))


if __name__ == "__main__":
    main("benchmarks.host")
