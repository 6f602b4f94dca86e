"""`trimtab bench live`: balancing without recorded routing: stragglers as in FEPLB's tables, and step time."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from rich.console import Console

from trimtab.benchmarks.live_predictors import summarise_predictors
from trimtab.benchmarks.live_settings import LiveBenchmark
from trimtab.benchmarks.live_steps import step_figures
from trimtab.benchmarks.live_stragglers import summarise_cases
from trimtab.benchmarks.live_tables import print_figures
from trimtab.files import STDOUT, write_json


def run_benchmark(settings: LiveBenchmark, cases: list[dict[str, Any]], predictor_cases: list[dict[str, Any]]) -> None:
    """Time steps on the ranks of the process group; rank 0 prints and writes all figures. Collective.

    Args:
        cases: of `straggler_cases`.
        predictor_cases: of `live_predictors.predictor_cases`.
    """
    steps = step_figures(settings)
    if dist.get_rank():
        return
    figures = {
        "schema": "trimtab-bench-live-1",
        "settings": {key: value for key, value in asdict(settings).items() if key != "json"},
        "step_ranks": dist.get_world_size(),
        "gpu": "not measured",
        "cases": cases,
        "summary": summarise_cases(cases),
        "predictors": summarise_predictors(predictor_cases),
        **steps,
    }
    print_figures(figures, Console(highlight=False, quiet=settings.json == STDOUT))
    if settings.json is not None:
        write_json(settings.json, figures)
