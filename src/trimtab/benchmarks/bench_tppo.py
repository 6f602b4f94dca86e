"""`trimtab bench t-ppo`: PPO, GRPO and T-PPO with equal numbers of trained tokens on long, uneven responses."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trimtab.benchmarks.tppo_runs import runs_of_seed
from trimtab.benchmarks.tppo_settings import ALGORITHMS, TppoBenchmark
from trimtab.benchmarks.tppo_summary import summarise_runs
from trimtab.benchmarks.tppo_tables import print_figures
from trimtab.files import STDOUT, write_json


def run_benchmark(settings: TppoBenchmark) -> None:
    """Train all algorithms with all seeds on the ranks of the process group; rank 0 prints and writes. Collective."""
    is_first = dist.get_rank() == 0
    runs: list[dict[str, Any]] = []
    columns = (TextColumn("bench t-ppo"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as out,
        Progress(*columns, TextColumn("{task.fields[note]}"), disable=not is_first, transient=True) as progress,
    ):
        total = settings.seeds * len(ALGORITHMS) * (settings.evaluations + 1)
        task = progress.add_task("", total=total, note="warm start")
        for seed in range(settings.seeds):
            runs += runs_of_seed(settings, seed, Path(out), lambda note: progress.update(task, advance=1, note=note))
    if not is_first:
        return
    figures: dict[str, Any] = {
        "schema": "trimtab-bench-t-ppo-1",
        "settings": {key: value for key, value in asdict(settings).items() if key not in ("json", "picture")},
        "ranks": dist.get_world_size(),
        "device": f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "runs": runs,
        "summary": summarise_runs(runs, settings.places),
    }
    print_figures(figures, Console(highlight=False, quiet=settings.json == STDOUT))
    if settings.json is not None:
        write_json(settings.json, figures)
    if settings.picture is not None:
        from trimtab.benchmarks.tppo_picture import draw_curves

        draw_curves(runs, settings.picture)
