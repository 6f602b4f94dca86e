"""`python -m benchmarks.megatron`: step time of a Megatron model with and without Trimtab, in its own training step.

Time Megatron's forward-backward function (all micro-batches, complete gradients in `main_grad`) of a small GPTModel on
2 CPU ranks: plain and planned in turns, each on even and on skewed routing. Planning, refreshing of weights and
transfers are part of the step; the optimizer is not. Plain Megatron replays the same routing by its RouterReplay.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.harness import Figures, main, settings_of, show
from benchmarks.megatron_model import MegatronBenchmark, MegatronModel
from benchmarks.pairs import summarise_pairs
from benchmarks.replayed_megatron import Routing, replayed, start_megatron
from benchmarks.tables import Columns, figure_table, interval, named_rows, quantity
from trimtab.calibration.alternating_rounds import alternate
from trimtab.cli.options import add_options, given, positive
from trimtab.cli.parser import Parser
from trimtab.integrations.megatron import balance
from trimtab.launch import launch
from trimtab.report.number_text import seconds
from trimtab.runtime.step_planner import LOCAL_CPU

RATIOS = ("overhead_when_balanced", "gain_captured")
STEPS: Columns = {"variant": "{name}", "median step": quantity("median_s", seconds), "CPU by rank": "{cpu}"}
SEEDS: Columns = {
    "seed": "{seed}",
    "max_vio": "{max_vio_before:.2f}",
    "planned": "{max_vio_after:.2f}",
    "replicas": "{replicas}",
    "plain": lambda row: seconds(row["median_s"]["plain_skewed"]),
    "planned step": lambda row: seconds(row["median_s"]["planned_skewed"]),
    "gain captured": "{gain_captured:.2f}",
}
FIGURES: Columns = {
    "figure": "{name}",
    "value": "{value:.3f}",
    "95% interval": interval("interval", "{:.3f}"),
}
NOTES = (
    "overhead_when_balanced: planned Megatron's step time divided by plain Megatron's, minus 1, on even routing. "
    "gain_captured: the time that planning saves on skewed routing, divided by the time that the skew costs plain "
    "Megatron. It can exceed 1, since replicas also reduce the rows that ranks exchange. Planning, refreshing of "
    "weights and transfers are in the step time; recording of the routing is not.",
)


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--pairs", type=positive, default=40, help="timed rounds of all four variants")
    add_options(parser, "--seeds", type=positive, default=8, help="skewed routings: those of seeds 0 to N - 1")


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
    settings = MegatronBenchmark(**given(options, MegatronBenchmark))
    launch(run_benchmark, (settings,), ranks=2)


def run_benchmark(settings: MegatronBenchmark) -> None:
    """Time all variants on this rank's share of the work; rank 0 prints and writes the figures. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start_megatron()
    models = _Models(settings)
    even, *skewed = settings.routings(ranks, rank)
    # These steps also warm up.
    even_plan, *plans = [models.compare(routing) for routing in (even, *skewed)]
    steps = {
        "plain_balanced": cycle([models.plain_step(even)]),
        "planned_balanced": cycle([models.planned_step(even)]),
        "plain_skewed": cycle([models.plain_step(routing) for routing in skewed]),
        "planned_skewed": cycle([models.planned_step(routing) for routing in skewed]),
    }
    variants = {name: partial(_step_times, models, functions) for name, functions in steps.items()}
    results = alternate(variants, settings.pairs, warm_up=0, progress="" if rank else "bench megatron")
    step_s = {name: [seconds for seconds, _ in times] for name, times in results.items()}
    cpu_s = _median_cpu_s(results)
    if rank:
        return
    figures = {
        "schema": "trimtab-bench-megatron-1",
        "megatron_version": megatron.core.__version__,
        "settings": settings_of(settings),
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
        "worst_relative_error": max(plan.pop("worst_relative_error") for plan in (even_plan, *plans)),
        "cpu_s_by_rank": cpu_s,
        **summarise_pairs(step_s, plans),
    }
    show(figures, print_figures, settings.json)


class _Models:
    """Two models with equal weights: one plain, one balanced."""

    def __init__(self, settings: MegatronBenchmark) -> None:
        self.plain, self.planned = MegatronModel(settings), MegatronModel(settings)
        # With rates every step is planned alike; without, some do nothing to measure that.
        self.session = balance(self.planned.ddp, slots_per_rank=settings.slots, rates=LOCAL_CPU)

    def plain_step(self, routing: Routing) -> Callable[[], None]:
        """A step of Megatron alone."""
        return partial(self.plain.step_with_replay, replayed(routing))

    def planned_step(self, routing: Routing) -> Callable[[], None]:
        """A planned step."""
        return partial(self.planned.step, routing, self.session)

    def zero(self) -> None:
        """Zero all gradients."""
        self.plain.zero()
        self.planned.zero()

    def compare(self, routing: Routing) -> dict[str, Any]:
        """Figures of the plan, and the worst relative difference of a `main_grad` on any rank. Collective."""
        self.zero()
        self.plain_step(routing)()
        self.planned_step(routing)()
        report = self.session.report
        assert report is not None
        return {
            "worst_relative_error": self.planned.difference(self.plain),
            "strategy": report.strategy,
            "replicas": report.replicas,
            "max_vio_before": report.max_vio_before,
            "max_vio_after": report.max_vio_after,
        }


def _step_times(models: _Models, steps: Any) -> tuple[float, float]:
    """Seconds of the next step until all ranks are done, and this rank's CPU seconds."""
    models.zero()
    step = next(steps)
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    step()
    cpu_s = time.process_time() - cpu_start
    dist.barrier()
    return time.perf_counter() - start, cpu_s


def _median_cpu_s(results: Mapping[str, list[tuple[float, float]]]) -> dict[str, list[float]]:
    """For every variant the median CPU seconds of each rank. Collective."""
    mine = torch.tensor([statistics.median(cpu_s for _, cpu_s in times) for times in results.values()])
    ranks_RV = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks_RV, mine)
    return dict(zip(results, torch.stack(ranks_RV, dim=1).tolist(), strict=True))


def print_figures(figures: Figures, console: Console) -> None:
    """Print step times, those of each seed, the ratios and what they mean."""
    pairs = figures["settings"]["pairs"]
    version, ranks = figures["megatron_version"], figures["ranks"]
    console.print(f"Megatron-core {version} on {ranks} CPU ranks, {pairs} rounds of all variants")
    rows = [
        {**row, "cpu": ", ".join(map(seconds, figures["cpu_s_by_rank"][row["name"]]))}
        for row in named_rows(figures["variants"])
    ]
    console.print(figure_table("Step time", STEPS, rows))
    console.print(figure_table("Skewed routing, by seed", SEEDS, figures["seeds"]))
    rows = [{"name": name, "value": figures[name], "interval": figures[f"{name}_interval"]} for name in RATIOS]
    console.print(figure_table("Ratios", FIGURES, rows))
    console.print(f"worst relative error of a main_grad: {figures['worst_relative_error']:.1e}")
    console.print(*NOTES, sep="\n")


if __name__ == "__main__":
    main("benchmarks.megatron")
