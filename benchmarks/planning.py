"""`python -m benchmarks.planning`: what planning in the background adds to the time of a step.

Time steps of a small model on CPU ranks of one thread: replicas are planned beforehand, by a thread while the step
runs, or as a whole before its first micro-step.

A step applies a plan, runs forward and backward of all micro-steps, and completes the gradients; all of it is timed.
The variants alternate and run the same replicas. In the first two, homes and strategy were chosen before the clock, as
they are while a rollout generates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import Figures, main, settings_of, show
from benchmarks.tables import Columns, figure_table, interval, named_rows
from trimtab.calibration.alternating_rounds import alternate, median_with_interval
from trimtab.calibration.calibration_settings import EXPERTS, SEQUENCE_LENGTH, small_config
from trimtab.cli.options import add_options, given, positive
from trimtab.cli.parser import Parser
from trimtab.errors import InputError
from trimtab.integrations.transformers import distribute_experts
from trimtab.launch import launch
from trimtab.planner import Placement, pack_by_length
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


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--pairs", type=positive, default=40, help="timed rounds of all variants")
    add_options(parser, "--ranks", type=positive, default=2)
    add_options(parser, "--tokens", type=positive, default=512, help="tokens of a rank in a micro-step")


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
    settings = PlanningBenchmark(**given(options, PlanningBenchmark))
    if settings.tokens % SEQUENCE_LENGTH:
        raise InputError(f"--tokens is {settings.tokens}; it should be a multiple of {SEQUENCE_LENGTH}")
    Placement.contiguous(1, EXPERTS, settings.ranks)
    launch(run_benchmark, (settings,), ranks=settings.ranks)


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
    if rank == 0:
        show(figures, print_figures, settings.json)


def _summarise(
    settings: PlanningBenchmark, header: PlannedStep, session: Session, results: dict[str, list[tuple[float, float]]]
) -> Figures:
    step_s = {name: [seconds for seconds, _ in rounds] for name, rounds in results.items()}
    variants = {}
    for name, seconds in step_s.items():
        ratios = [one / other for one, other in zip(seconds, step_s["beforehand"], strict=True)]
        ratio, ratio_interval = median_with_interval(ratios)
        variants[name] = {
            "step_s": seconds,
            "median_s": statistics.median(seconds),
            "cpu_s_of_rank_0": statistics.median(cpu_s for _, cpu_s in results[name]),
            "ratio_to_beforehand": ratio,
            "ratio_interval": ratio_interval,
        }
    return {
        "schema": "trimtab-bench-planning-1",
        "settings": settings_of(settings),
        "replicas": session.step_plan.num_replicas,
        "strategy": header.strategy,
        "variants": variants,
    }


def print_figures(figures: Figures, console: Console) -> None:
    """Print one line per variant."""
    columns: Columns = {
        "planned": "{name}",
        "step": "{median_s:.3f} s",
        "of beforehand": "{ratio_to_beforehand:.4f}",
        "95% interval": interval("ratio_interval", "{:.4f}"),
        "CPU of rank 0": "{cpu_s_of_rank_0:.3f} s",
    }
    title = f"Time of a step with {figures['replicas']} replicas, by when they are planned"
    console.print(figure_table(title, columns, named_rows(figures["variants"])))


if __name__ == "__main__":
    main("benchmarks.planning")
