"""`trimtab bench planning`: what planning in the background adds to the time of a step.

A step applies a plan, runs forward and backward of all micro-steps, and completes the gradients; all of it is timed.
The variants alternate and run the same replicas: planned beforehand, outside of the clock; planned by the planner's
threads while the step runs; and planned as a whole before the first micro-step. In the first two, homes and strategy
were chosen before the clock, as they are while a rollout generates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.calibration.alternating_rounds import alternate, median_with_interval
from trimtab.calibration.small_model import SEQUENCE_LENGTH, small_config
from trimtab.files import STDOUT, write_json
from trimtab.integrations.transformers import distribute_experts
from trimtab.planner import pack_by_length
from trimtab.runtime import PlannedStep, Session
from trimtab.runtime.step_planner import LOCAL_CPU
from trimtab.trace import synthesize

# More rows than any rank has: with a limit, plans are made as a whole.
NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class PlanningBenchmark:
    """Sizes of the benchmark.

    Attributes:
        pairs: timed rounds of all variants.
        tokens: tokens of a rank in a micro-step.
        micro_steps: of a step.
        json: file for the figures; None for none; `STDOUT` prints no table.
        zipf: exponent of the skewed routing.
        ranks: of the expert-parallel group.
    """

    pairs: int = 40
    tokens: int = 512
    micro_steps: int = 8
    json: Path | None = None
    zipf: float = 1.2
    ranks: int = 2


def run_benchmark(settings: PlanningBenchmark) -> None:
    """Time all variants on this rank's share of the work; rank 0 prints and writes the figures. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    config = AutoConfig.for_model(**small_config())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    session = Session(num_experts=config.num_experts, rates=LOCAL_CPU)
    distribute_experts(model, session)
    replicated = session.replicated_parameters(model)
    whole_trace = synthesize(
        num_sequences=settings.tokens // SEQUENCE_LENGTH * ranks * settings.micro_steps,
        sequence_length=SEQUENCE_LENGTH, num_layers=config.num_hidden_layers, num_experts=config.num_experts,
        top_k=config.num_experts_per_tok, zipf=settings.zipf, seed=0,
    )  # fmt: skip
    schedule = pack_by_length(whole_trace.sequence_lengths, num_ranks=ranks, token_budget=settings.tokens)
    # As after a rollout: plans number the sequences of rank 0 first.
    parts_R = [np.arange(source, whole_trace.num_sequences, ranks) for source in range(ranks)]
    trace = whole_trace.select(parts_R[rank])
    generator = torch.Generator().manual_seed(rank)
    shape = settings.tokens // SEQUENCE_LENGTH, SEQUENCE_LENGTH
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)

    def micro_steps() -> None:
        for index in range(schedule.num_micro_steps):
            with session.micro_step(index):
                logits = model(input_ids=tokens, use_cache=False).logits
                nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        session.finish_gradients(replicated)

    plan = partial(session.plan_sequences, token_budget=settings.tokens)
    header = plan(trace)
    mine = whole_trace.select(np.concatenate(parts_R)[header.schedule.sequences_of(rank)])
    session.apply_plan(header, mine)
    beforehand = replace(header, plans=(session.step_plan,), slices=None)

    def timed(apply: Callable[[], Any]) -> tuple[float, float]:
        model.zero_grad()
        session.take_metrics()
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        apply()
        micro_steps()
        dist.barrier()
        return time.perf_counter() - start, time.process_time() - cpu_start

    def at_once() -> None:
        session.settings = replace(session.settings, max_rows_per_rank=NO_LIMIT)
        made = plan(trace)
        session.settings = replace(session.settings, max_rows_per_rank=None)
        session.apply_plan(made, mine)

    variants = {
        "beforehand": lambda: timed(partial(session.apply_plan, beforehand, mine)),
        "background": lambda: timed(partial(session.apply_plan, header, mine)),
        "at once": lambda: timed(at_once),
    }
    results = alternate(variants, settings.pairs, progress="" if rank else "bench planning")
    figures = _summarise(settings, header, session, results)
    if rank:
        return
    _print(figures, Console(highlight=False, quiet=settings.json == STDOUT))
    if settings.json is not None:
        write_json(settings.json, figures)


def _summarise(
    settings: PlanningBenchmark, header: PlannedStep, session: Session, results: dict[str, list[tuple[float, float]]]
) -> dict[str, Any]:
    step_s = {name: [seconds for seconds, _ in rounds] for name, rounds in results.items()}
    variants = {}
    for name, seconds in step_s.items():
        ratio, interval = median_with_interval(
            [one / other for one, other in zip(seconds, step_s["beforehand"], strict=True)]
        )
        variants[name] = {
            "step_s": seconds,
            "median_s": statistics.median(seconds),
            "cpu_s_of_rank_0": statistics.median(cpu_s for _, cpu_s in results[name]),
            "ratio_to_beforehand": ratio,
            "ratio_interval": interval,
        }
    return {
        "schema": "trimtab-bench-planning-1",
        "settings": {key: value for key, value in asdict(settings).items() if key != "json"},
        "replicas": session.step_plan.num_replicas,
        "strategy": header.strategy,
        "variants": variants,
    }


def _print(figures: dict[str, Any], console: Console) -> None:
    table = Table(title=f"Time of a step with {figures['replicas']} replicas, by when they are planned")
    for column in ("planned", "step", "of beforehand", "95% interval", "CPU of rank 0"):
        table.add_column(column, justify="left" if column == "planned" else "right")
    for name, figure in figures["variants"].items():
        low, high = figure["ratio_interval"]
        table.add_row(
            name,
            f"{figure['median_s']:.3f} s",
            f"{figure['ratio_to_beforehand']:.4f}",
            f"{low:.4f} to {high:.4f}",
            f"{figure['cpu_s_of_rank_0']:.3f} s",
        )
    console.print(table)
