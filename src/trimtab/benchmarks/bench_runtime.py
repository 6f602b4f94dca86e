"""`trimtab bench runtime`: step time of the runtime with and without balancing, and the cost of the runtime itself.

A step is one micro-step of the update: forward, backward, complete gradients on every rank. Planning is not timed: in
training it happens before the step. The variants alternate within one run. After that, `trimtab` runs with each path
of replica weights, to measure how much of the transfers is exposed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from trimtab.benchmarks.moe_timer import time_blocks
from trimtab.benchmarks.runtime_settings import RuntimeBenchmark
from trimtab.benchmarks.runtime_summary import summarise_steps
from trimtab.benchmarks.runtime_tables import print_figures
from trimtab.benchmarks.runtime_variants import Variant, build_variants
from trimtab.calibration.alternating_rounds import alternate, median_with_interval
from trimtab.files import STDOUT, write_json
from trimtab.runtime import Session

__all__ = ["RuntimeBenchmark", "run_benchmark"]

# Runs of a variant over all seeds: before the timed ones, for its time in MoE blocks, and with each path.
WARM_UP_RUNS = 3
MOE_RUNS = 5
PATH_RUNS = 10
Result = TypeVar("Result")
PATH_FIGURES = ("exposed_s", "refresh_s", "cpu_s", "peer_bytes", "host_bytes", "gradient_bytes")


def run_benchmark(settings: RuntimeBenchmark) -> None:
    """Time all variants on this rank's share of the work; rank 0 prints and writes the figures. Collective."""
    rank, rounds = dist.get_rank(), settings.rounds
    variants = build_variants(settings)
    session, compared = variants.session, variants.compared
    title = "" if rank else "bench runtime"
    times = {key: partial(_step_times, variant) for key, variant in compared.items()}
    steps = alternate(times, rounds, warm_up=_rounds_of(WARM_UP_RUNS, settings), progress=title)
    in_moe = {key: partial(_moe_seconds, variant) for key, variant in compared.items()}
    moe_s = _by_name(alternate(in_moe, min(_rounds_of(MOE_RUNS, settings), rounds), warm_up=0))
    transfers = {key: partial(_transfer_figures, variant, session) for key, variant in variants.by_paths.items()}
    taken = _by_name(alternate(transfers, min(_rounds_of(PATH_RUNS, settings), rounds), warm_up=1))
    step_s = {key: [seconds for seconds, _ in results] for key, results in steps.items()}
    all_step_s, cpu_results = _by_name(step_s), _by_name(steps).values()
    cpu_s = _mean_over_ranks([statistics.mean(cpu_s for _, cpu_s in results) for results in cpu_results])
    if settings.plans is not None:
        for (seed, name), variant in compared.items():
            variant.prepare()
            if (rank, seed) == (0, 0) and name != "native":
                session.step_plan.save(settings.plans / f"{name}.npz")
    if rank:
        return
    figures = {
        "schema": "trimtab-bench-runtime-2",
        "settings": {key: value for key, value in asdict(settings).items() if key not in ("json", "plans")},
        "ranks": dist.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "policies": {
            name: {
                "step_s": seconds,
                "median_s": statistics.median(seconds),
                "moe_s": statistics.median(moe_s[name]),
                "cpu_s_per_rank": cpu,
            }
            for (name, seconds), cpu in zip(all_step_s.items(), cpu_s, strict=True)
        },
        "transfer": {name: _summarise_transfers(results) for name, results in taken.items()},
        **summarise_steps(step_s, variants.static_max_over_mean),
    }
    quiet = settings.json == STDOUT or settings.plans is not None
    print_figures(figures, Console(highlight=False, quiet=quiet))
    if settings.json is not None:
        write_json(settings.json, figures)


def _rounds_of(runs: int, settings: RuntimeBenchmark) -> int:
    """Rounds in which a variant runs about so often."""
    return max(1, runs // settings.seeds)


def _by_name(results: Mapping[tuple[int, str], list[Result]]) -> dict[str, list[Result]]:
    """Results of every variant on all seeds, one seed after another."""
    joined: dict[str, list[Result]] = {}
    for (_, name), values in results.items():
        joined.setdefault(name, []).extend(values)
    return joined


def _step_times(variant: Variant) -> tuple[float, float]:
    """Seconds of a step until all ranks are done, and this rank's CPU seconds."""
    variant.prepare()
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    variant.step()
    dist.barrier()
    return time.perf_counter() - start, time.process_time() - cpu_start


def _moe_seconds(variant: Variant) -> float:
    """Seconds of a step in MoE blocks."""
    variant.prepare()
    with time_blocks(variant.blocks) as timer:
        variant.step()
    return timer.seconds


def _transfer_figures(variant: Variant, session: Session) -> list[float]:
    """Seconds of a step in MoE blocks, and its `PATH_FIGURES`; means over ranks."""
    variant.prepare()
    session.take_metrics()
    with time_blocks(variant.blocks) as timer:
        variant.step()
    taken = session.take_metrics()
    return _mean_over_ranks([timer.seconds, *(taken[f"transfer/{name}"] for name in PATH_FIGURES)])


def _mean_over_ranks(values: list[float]) -> list[float]:
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums / dist.get_world_size()).tolist()


def _summarise_transfers(rounds: Sequence[list[float]]) -> dict[str, Any]:
    """Medians over rounds, and the part of MoE time in which compute waits for transfers."""
    names = ("moe_s", *PATH_FIGURES)
    figures: dict[str, Any] = dict(zip(names, map(statistics.median, zip(*rounds, strict=True)), strict=True))
    fraction, interval = median_with_interval([exposed / moe for moe, exposed, *_ in rounds])
    return figures | {"exposed_fraction": fraction, "exposed_fraction_interval": interval}
