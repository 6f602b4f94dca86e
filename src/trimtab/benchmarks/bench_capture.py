"""`trimtab bench capture`: what recording the routing costs a forward and a generation.

Both run plain and recorded in turns, in an order that alternates; what is recorded includes making the `RoutingTrace`.
Since machines are less steady than the difference, runs after that time what is done for the record by itself.
The model is random, with the depth and number of experts of a small real one, and narrow so that a CPU will do: the
narrower the model, the larger the part that recording takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.benchmarks.bench_runtime import ratio_with_interval
from trimtab.calibration.small_model import small_config
from trimtab.calibration.timing import WARM_UP_ROUNDS, Clock
from trimtab.integrations.transformers import RoutingRecord, record_routing

# What it ran on: sequences `[B, n]` and the mask of their prompts.
Work = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class CaptureBenchmark:
    """Sizes of the benchmark.

    Attributes:
        rounds: timed pairs.
        sequences: in a batch, B.
        length: tokens of a sequence in the forward; in the generation a quarter is prompt, a quarter generated.
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
        """Of the model, as a `config.json` would have it."""
        return small_config(
            layers=self.layers, hidden=self.hidden, width=self.width, experts=self.experts, top_k=self.top_k
        )


def run_benchmark(settings: CaptureBenchmark) -> dict[str, Any]:
    """The figures, as they are written to a file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # which others on the machine disturb least
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
    figures: dict[str, Any] = {
        "schema": "trimtab-bench-capture-1",
        "settings": asdict(settings),
        "device": device.type,
    }
    with torch.no_grad():
        for name, work in (("forward", forward), ("generate", generate)):
            figures[name] = _compare(name, model, work, clock, settings.rounds)
    return figures


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """One row for the forward, one for the generation."""
    columns = (Column(name, justify="right") for name in ("plain", "recorded", "cost", "work for it"))
    table = Table("work", *columns)
    for name in ("forward", "generate"):
        taken = figures[name]
        low, high = taken["overhead_interval"]
        plain, recorded = (f"{taken[way]['median_s'] * 1e3:.1f} ms" for way in ("plain", "recorded"))
        cost = f"{taken['overhead']:+.2%} [{low:+.2%}, {high:+.2%}]"
        table.add_row(name, plain, recorded, cost, f"{taken['work_fraction']:.2%}")
    console.print(f"Recording of routing, {len(figures['forward']['plain']['s'])} alternating pairs", table, sep="\n")


def _compare(name: str, model: Any, work: Work, clock: Clock, rounds: int) -> dict[str, Any]:
    def recorded() -> None:
        with record_routing(model) as record:
            tokens, mask = work()
        record.trace(tokens, mask)

    ways: dict[str, Callable[[], object]] = {"plain": work, "recorded": recorded}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in track(range(WARM_UP_ROUNDS + rounds), f"bench capture: {name}"):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            seconds = clock.time(ways[way])
            if number >= WARM_UP_ROUNDS:
                taken[way].append(seconds)
    overhead, interval = ratio_with_interval(
        [recorded / plain - 1 for plain, recorded in zip(taken["plain"], taken["recorded"], strict=True)]
    )
    fractions = []
    for _ in range(max(1, rounds // 6)):
        with _WorkTimer() as timer:
            seconds = clock.time(recorded)
        fractions.append(timer.seconds / (seconds - timer.seconds))
    fraction, fraction_interval = ratio_with_interval(fractions)
    return {
        **{way: {"s": seconds, "median_s": statistics.median(seconds)} for way, seconds in taken.items()},
        "overhead": overhead,
        "overhead_interval": interval,
        "work_fraction": fraction,
        "work_fraction_interval": fraction_interval,
    }


class _WorkTimer:
    """Seconds of the host spent in what a record does."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._untimed = {name: getattr(RoutingRecord, name) for name in ("begin", "note", "end", "trace")}

    def __enter__(self) -> _WorkTimer:
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
