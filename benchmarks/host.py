"""`python -m benchmarks.host`: host time that planning costs in Megatron's MoE layers.

Steps of Megatron alone and planned ones, in turns, with so few tokens and a hidden size of 8 that nearly all time is
that of Python and of starting operations. A rank has 16 experts on one rank, 8 on two: a `TEGroupedMLP`, whose products
are one operation of torch on the CPU, or a `SequentialMLP`. Both steps replay routing. One rank has no replicas; two
have none with even routing, else one or two in each instance, whatever they cost.

Processor time is that of all threads of all ranks. Calls of Python and C are those of rank 0, of its training thread
and of all its threads: the same in every run, but for what threads wait for each other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.grouped_linear import GroupedLinear
from benchmarks.harness import Figures, main
from benchmarks.megatron_layers import LayerCase, MegatronLayers
from benchmarks.replayed_megatron import Routing, replayed, start_megatron
from benchmarks.tables import Columns, figure_table
from trimtab.calibration.alternating_rounds import alternate, median_with_interval
from trimtab.calibration.calibrate import measure_on_ranks
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.cluster import ModelSpec
from trimtab.integrations.megatron import balance
from trimtab.runtime.step_planner import LOCAL_CPU

MODEL = ModelSpec("tiny", 16, 4, hidden_size=8, expert_width=8)
# Compute takes so long that every replica pays.
SLOW = replace(LOCAL_CPU, expert_flops=1e6)
# Layers of the two models from whose calls those of a layer and of a micro-batch follow, and steps before the count.
COUNTED_LAYERS, WARM_UP = (2, 10), 3


@dataclass(frozen=True)
class HostCase:
    """What is timed.

    Attributes:
        ranks: of the expert-parallel group.
        replicas: of an instance.
        tokens, max_over_mean: of a rank in a micro-batch, and rows of the busiest rank over the mean.
        experts: what computes them.
    """

    ranks: int
    replicas: int = 0
    tokens: int = 1
    max_over_mean: float = 1.0
    experts: str = "TEGroupedMLP"

    def layers(self, number: int, micro_batches: int) -> LayerCase:
        """The case with a number of layers."""
        return LayerCase(MODEL, self.tokens, self.max_over_mean, layers=number, micro_batches=micro_batches)


CASES = (
    HostCase(1), HostCase(1, experts="SequentialMLP"), HostCase(2, tokens=64),
    HostCase(2, 1, tokens=256, max_over_mean=1.6), HostCase(2, 2, tokens=256, max_over_mean=1.6),
)  # fmt: skip


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
    cases: list[Figures] = []
    for case in CASES:
        figures = measure_on_ranks(_measure, (case, layers, micro_batches, rounds), ranks=case.ranks)
        cases += figures["cases"]
    return {"schema": "trimtab-bench-host-3", "micro_batches": micro_batches, "rounds": rounds, "cases": cases}


def _measure(case: HostCase, layers: Sequence[int], micro_batches: int, rounds: int) -> Figures:
    """Figures of one case. Collective."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    start_megatron()
    calls = _count(case, micro_batches)
    return {"cases": [_time(case, number, micro_batches, rounds) | {"calls": calls} for number in layers]}


class _Models:
    """Two models with equal weights: one plain, one balanced; and their steps."""

    def __init__(self, case: HostCase, layers: LayerCase) -> None:
        linear = GroupedLinear if case.experts == "TEGroupedMLP" else None
        self.plain, self.planned = MegatronLayers(layers, linear), MegatronLayers(layers, linear)
        # Also without replicas a user has slots.
        options: dict[str, Any] = {"rates": SLOW} if case.replicas else {}
        self.session = balance(self.planned.ddp, slots_per_rank=case.replicas or 2, **options)
        routing: Routing = layers.routing(case.ranks, 0)[dist.get_rank()]
        self.plain_step = partial(self.plain.step_with_replay, replayed(routing))
        self.planned_step = partial(self.planned.step, routing, self.session)

    def check(self, case: HostCase, instances: int) -> None:
        """Raise RuntimeError if the last step had another number of replicas."""
        planned = self.session.session
        assert planned is not None
        found = planned.step_plan.num_replicas
        if found != case.replicas * instances:
            raise RuntimeError(f"{instances} instances have {found} replicas, not {case.replicas} each")


def _time(case: HostCase, layers: int, micro_batches: int, rounds: int) -> Figures:
    """Seconds of processor time of each step; `planning` is a part of `planned`. Collective."""
    models = _Models(case, case.layers(layers, micro_batches))
    planning_s: list[float] = []
    with mock.patch.object(models.session, "plan", partial(_timed_plan, models.session.plan, planning_s)):
        steps = {
            "plain": partial(_timed, models.plain, models.plain_step),
            "planned": partial(_timed, models.planned, models.planned_step),
        }
        quiet = "" if dist.get_rank() else f"bench host, {case.experts}, {case.ranks} ranks, {layers} layers"
        seconds = alternate(steps, rounds, progress=quiet)
    models.check(case, layers * micro_batches)
    models.session.remove()
    # Without those of untimed steps, which come first.
    seconds["planning"] = [_of_all_ranks(each) for each in planning_s[-rounds:]]
    ratio, interval = median_with_interval(np.divide(seconds["planned"], seconds["plain"]).tolist())
    micro_batch_ms = {name: float(np.median(of_step)) / micro_batches * 1e3 for name, of_step in seconds.items()}
    return {
        "experts": case.experts,
        "ranks": case.ranks,
        "replicas": case.replicas,
        "layers": layers,
        "micro_batch_ms": micro_batch_ms,
        "ratio": ratio,
        "ratio_interval": interval,
        "step_s": seconds,
    }


def _timed(layers: MegatronLayers, step: Callable[[], None]) -> float:
    """Processor time of all threads of all ranks, until all of them are done."""
    layers.zero()
    dist.barrier()
    start = time.process_time()
    step()
    dist.barrier()
    return _of_all_ranks(time.process_time() - start)


def _of_all_ranks(seconds: float) -> float:
    total = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _timed_plan(plan: Callable[..., Any], seconds: list[float], *arguments: Any, **options: Any) -> Any:
    start = time.process_time()
    report = plan(*arguments, **options)
    seconds.append(time.process_time() - start)
    return report


def _count(case: HostCase, micro_batches: int) -> Figures:
    """Calls of a layer in a micro-batch, forward and backward, and of a micro-batch without its layers: Megatron's,
    and planned ones of the training thread and of all threads; and those of planning a micro-batch. Collective."""
    counts_L: list[dict[str, float]] = []
    for layers in COUNTED_LAYERS:
        with _counting() as count:
            models = _Models(case, case.layers(layers, micro_batches))
            for _ in range(WARM_UP):
                models.plain_step()
                models.planned_step()
            plan = models.session.plan
            planning = [0, 0]

            def counted_plan(*given: Any, plan: Any = plan, planning: list[int] = planning, **options: Any) -> Any:
                before = count()
                report = plan(*given, **options)
                planning[:] = (after - now for after, now in zip(count(), before, strict=True))
                return report

            start = count()
            models.plain_step()
            middle = count()
            with mock.patch.object(models.session, "plan", counted_plan):
                models.planned_step()
            dist.barrier()
            end = count()
            models.check(case, layers * micro_batches)
            models.session.remove()
        counts = {
            "plain": middle[0] - start[0], "planning": planning[0],
            "planned": end[0] - middle[0] - planning[0], "planned_all": end[1] - middle[1] - planning[1],
        }  # fmt: skip
        counts_L.append({name: calls / micro_batches for name, calls in counts.items()})
    few, many = counts_L
    between = COUNTED_LAYERS[1] - COUNTED_LAYERS[0]
    layer = {name: (many[name] - few[name]) / between for name in few}
    return {"layer": layer, "micro_batch": {name: few[name] - COUNTED_LAYERS[0] * layer[name] for name in few}}


@contextmanager
def _counting() -> Iterator[Callable[[], tuple[int, int]]]:
    """A context in which calls of this thread and of new threads are counted. Yields a function that returns those of
    this thread, and of all."""
    mine, others = [0], [0]

    def hook(of: list[int], _frame: Any, event: str, _argument: Any) -> None:
        of[0] += event in ("call", "c_call")

    threading.setprofile(partial(hook, others))
    sys.setprofile(partial(hook, mine))
    try:
        yield lambda: (mine[0], mine[0] + others[0])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def print_figures(figures: Figures, console: Console) -> None:
    """Print the figures as tables."""
    rows = [
        {**case, **case["micro_batch_ms"], "low": case["ratio_interval"][0], "high": case["ratio_interval"][1]}
        for case in figures["cases"]
    ]
    columns: Columns = {
        "experts": "{experts}", "ranks": "{ranks}", "replicas": "{replicas}", "layers": "{layers}",
        "plain": "{plain:.2f} ms", "planned": "{planned:.2f} ms", "of it planning": "{planning:.2f} ms",
        "planned / plain": "{ratio:.2f}", "95% interval": "{low:.2f} to {high:.2f}",
    }  # fmt: skip
    console.print(figure_table("Processor time of a micro-batch, forward and backward, of all ranks", columns, rows))
    calls = {(case["experts"], case["ranks"], case["replicas"]): case["calls"] for case in figures["cases"]}
    rows = [
        {"experts": experts, "ranks": ranks, "replicas": replicas, "of": of.replace("_", "-"), **counts[of]}
        for (experts, ranks, replicas), counts in calls.items()
        for of in ("layer", "micro_batch")
    ]
    columns = {
        "experts": "{experts}", "ranks": "{ranks}", "replicas": "{replicas}", "of a": "{of}", "plain": "{plain:.0f}",
        "planned": "{planned:.0f}", "of all threads": "{planned_all:.0f}", "planning it": "{planning:.0f}",
    }  # fmt: skip
    console.print(
        figure_table("Calls of Python and C, of a layer in a micro-batch and of the rest of it", columns, rows)
    )


if __name__ == "__main__":
    main("benchmarks.host")
