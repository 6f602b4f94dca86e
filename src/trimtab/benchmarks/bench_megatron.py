"""`trimtab bench megatron`: step time of a Megatron model with and without Trimtab, in its own training step.

A step is one call of Megatron's forward-backward function: all micro-batches, complete gradients in `main_grad`.
Everything that Trimtab does in a step is timed: planning, refreshing of weights, transfers. The optimizer is not. The
four variants alternate: plain Megatron and planned Megatron, each on even and on skewed routing. Plain Megatron replays
the same routing by its own `RouterReplay`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import cycle
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from rich.console import Console

from trimtab.array_type import Array
from trimtab.benchmarks.megatron_model import MegatronModel, start_megatron
from trimtab.benchmarks.megatron_settings import MegatronBenchmark
from trimtab.benchmarks.megatron_summary import summarise_pairs
from trimtab.benchmarks.megatron_tables import print_figures
from trimtab.calibration.alternating_rounds import alternate
from trimtab.files import STDOUT, write_json
from trimtab.integrations.megatron import balance
from trimtab.runtime.step_planner import LOCAL_CPU

__all__ = ["MegatronBenchmark", "run_benchmark"]

Routing = list[Array]


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
        "settings": {key: value for key, value in asdict(settings).items() if key != "json"},
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
        "worst_relative_error": max(plan.pop("worst_relative_error") for plan in (even_plan, *plans)),
        "cpu_s_by_rank": cpu_s,
        **summarise_pairs(step_s, plans),
    }
    print_figures(figures, Console(highlight=False, quiet=settings.json == STDOUT))
    if settings.json is not None:
        write_json(settings.json, figures)


class _Models:
    """Two models with equal weights: one plain, one balanced."""

    def __init__(self, settings: MegatronBenchmark) -> None:
        self.plain, self.planned = MegatronModel(settings), MegatronModel(settings)
        # With rates every step is planned alike; without, some do nothing to measure that.
        self.session = balance(
            self.planned.ddp, slots_per_rank=settings.slots, dispatcher=settings.dispatcher, rates=LOCAL_CPU
        )
        self._forward_backward = get_forward_backward_func()

    def plain_step(self, routing: Routing) -> Callable[[], None]:
        """A step of Megatron alone."""
        replayed = [torch.from_numpy(ids.transpose(1, 0, 2).astype("int64")) for ids in routing]
        return lambda: self.plain.step_with_replay(self._forward_backward, replayed)

    def planned_step(self, routing: Routing) -> Callable[[], None]:
        """A planned step."""
        return lambda: self.planned.step(self.session.planned(self._forward_backward, routing))

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
        errors = [
            (actual - expected).norm() / expected.norm().clamp_min(1e-6)
            for expected, actual in zip(self.plain.gradients(), self.planned.gradients(), strict=True)
        ]
        worst = torch.stack(errors).max()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return {
            "worst_relative_error": float(worst),
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
