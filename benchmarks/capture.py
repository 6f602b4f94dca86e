"""`python -m benchmarks.capture`: cost of recording the routing of a forward and of a generation.

Time forward and generation of a 16-layer MoE, plain and recorded in turns.

The recorded run includes making the `RoutingTrace`. The difference is smaller than the noise of most machines, so
further runs time the recording work separately. The model is random, with the depth and number of experts of a small
real model, and narrow, so that a CPU can run it. Recording takes a larger part of the time in a narrow model than in a
wide one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import Figures, main, show
from benchmarks.tables import Columns, figure_table, named_rows, with_interval
from trimtab.calibration.alternating_rounds import alternate, median_with_interval
from trimtab.calibration.calibration_settings import small_config
from trimtab.calibration.measurement import Clock, this_device
from trimtab.cli.options import add_options, given
from trimtab.cli.parser import Parser
from trimtab.integrations.transformers import RoutingRecord, record_routing
from trimtab.report.number_text import seconds

# Runs the model, and returns its sequences `[B, n]` and the mask of their prompts.
Work = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class CaptureBenchmark:
    """Sizes of the benchmark.

    Attributes:
        rounds: timed pairs of a plain and a recorded run.
        sequences: sequences in a batch, B.
        length: tokens of a sequence in the forward. In the generation a quarter of it is prompt, a quarter generated.
        layers, experts, top_k, hidden, width: sizes of the model; `width` is that of an expert.
        seed: of weights and tokens.
    """

    rounds: int = 60
    sequences: int = 4
    length: int = 128
    layers: int = 16
    experts: int = 64
    top_k: int = 8
    hidden: int = 256
    width: int = 128
    seed: int = 0

    @property
    def model_config(self) -> dict[str, Any]:
        """The model's config, as in a `config.json`."""
        return small_config(
            layers=self.layers, hidden=self.hidden, width=self.width, experts=self.experts, top_k=self.top_k
        )


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--rounds", of=CaptureBenchmark)


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
    show(run_benchmark(CaptureBenchmark(**given(options, CaptureBenchmark))), print_figures, options.json)


def run_benchmark(settings: CaptureBenchmark) -> Figures:
    """All figures, as `--json` writes them."""
    device = this_device()
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # least disturbed by other processes on the machine
    config = AutoConfig.for_model(**settings.model_config)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).eval()
    tokens = torch.randint(1, config.vocab_size, (settings.sequences, settings.length), device=device)
    quarter = settings.length // 4
    prompts = tokens[:, :quarter]

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        model(input_ids=tokens, use_cache=False)
        return tokens, torch.ones_like(tokens)

    def generate() -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones_like(prompts)
        how = {"max_new_tokens": quarter, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(prompts, attention_mask=mask, **how), mask

    clock = Clock(device)
    figures: Figures = {"schema": "trimtab-bench-capture-1", "settings": asdict(settings), "device": device.type}
    with torch.no_grad():
        for name, work in (("forward", forward), ("generate", generate)):
            figures[name] = _compare(name, model, work, clock, settings.rounds)
    return figures


def print_figures(figures: Figures, console: Console) -> None:
    """Print one line for the forward and one for the generation."""
    columns: Columns = {
        "work": "{name}",
        "plain": lambda row: seconds(row["plain"]["median_s"]),
        "recorded": lambda row: seconds(row["recorded"]["median_s"]),
        "cost": with_interval("overhead", "{:+.2%}"),
        "recording work": "{work_fraction:.2%}",
    }
    rows = named_rows({name: figures[name] for name in ("forward", "generate")})
    pairs = len(figures["forward"]["plain"]["s"])
    console.print(figure_table(f"Recording of routing, {pairs} alternating pairs", columns, rows))


def _compare(name: str, model: Any, work: Work, clock: Clock, rounds: int) -> Figures:
    """Times of plain and recorded runs, and the part of a recorded run that is recording work."""

    def recorded() -> None:
        with record_routing(model) as record:
            tokens, mask = work()
        record.trace(tokens, mask)

    variants = {"plain": partial(clock.time, work), "recorded": partial(clock.time, recorded)}
    taken = alternate(variants, rounds, progress=f"bench capture: {name}")
    ratios = [recorded / plain - 1 for plain, recorded in zip(taken["plain"], taken["recorded"], strict=True)]
    overhead, interval = median_with_interval(ratios)
    fractions = []
    for _ in range(max(1, rounds // 6)):
        with _RecordingTimer() as timer:
            taken_s = clock.time(recorded)
        fractions.append(timer.seconds / (taken_s - timer.seconds))
    fraction, fraction_interval = median_with_interval(fractions)
    return {
        **{variant: {"s": times, "median_s": statistics.median(times)} for variant, times in taken.items()},
        "overhead": overhead,
        "overhead_interval": interval,
        "work_fraction": fraction,
        "work_fraction_interval": fraction_interval,
    }


class _RecordingTimer:
    """Host seconds spent in the methods of `RoutingRecord`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._untimed = {name: getattr(RoutingRecord, name) for name in ("begin", "add_ids", "end", "trace")}

    def __enter__(self) -> _RecordingTimer:
        for name, method in self._untimed.items():
            setattr(RoutingRecord, name, self._timed(method))
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._untimed.items():
            setattr(RoutingRecord, name, method)

    def _timed(self, method: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: Any, **options: Any) -> object:
            start = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


if __name__ == "__main__":
    main("benchmarks.capture")
