"""`python -m benchmarks.rollout`: throughput of a disaggregated rollout with 1, 2 and 3 micro-batches, and with copies.

One attention rank and one expert rank generate for the same sequences with 1, 2 and 3 micro-batches in turns. Times of
attention, experts and messages, measured with one micro-batch of the same size, predict each. In turn with them, both
ranks generate for half of the sequences with the whole model (colocated). Then one attention rank and two expert ranks
generate under skewed routing, without and with copies of hot experts.

The prediction for m micro-batches is the sum over all calls of layers of max(m * max(T_a, T_e), T_a + T_e + 2 * T_c),
with the call's own T_a and T_e, since calls of prefill and those after the output head take longer, and the mean T_c of
a message in one direction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import Figures, main, settings_of, show
from benchmarks.tables import Columns, figure_table, named_rows, picture, quantity
from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import alternate
from trimtab.calibration.calibration_settings import small_config
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.integrations.transformers import moe_blocks
from trimtab.integrations.transformers.families import reroute
from trimtab.launch import launch
from trimtab.report.number_text import seconds
from trimtab.rl.rollout import SampledLogProbs, generate
from trimtab.rollout import DisaggregatedRollout, disaggregate
from trimtab.rollout.channels import Channel

MICRO_BATCHES = (1, 2, 3)
# Calls of the picture, in the middle of decoding.
SHOWN_CALLS = 4
NOTES = (
    "On equal CPU ranks, colocated data parallel ranks take (T_a + T_e) / 2 for what a disaggregated pair takes "
    "max(T_a, T_e) for, so they can't be beaten. A gain exists where larger expert batches are cheaper per token, as "
    "with weights that are read once for all attention ranks, or where ranks of another kind suit one side."
)
PIPELINE: Columns = {
    "micro-batches": "{name}",
    "tokens/s": "{tokens_per_s:.0f}",
    "of one": "{speedup:.2f}",
    "predicted": "{predicted_tokens_per_s:.0f}",
    "error": "{error:+.0%}",
    "T_a": quantity("attention_s", seconds),
    "T_e": quantity("expert_s", seconds),
    "T_c": quantity("message_s", seconds),
}
COPIES: Columns = {
    "experts": "{name}",
    "tokens/s": "{tokens_per_s:.0f}",
    "busiest / mean": "{max_over_mean:.2f}",
}


@dataclass(frozen=True)
class RolloutBenchmark:
    """Sizes of the benchmark.

    Attributes:
        sequences: of the attention rank.
        rounds: timed rollouts of each kind.
        width: of an expert; None to choose it so that T_e is about T_a.
        json, picture: files for the figures and for the picture of the pipeline; None for none.
        prompt, new_tokens: tokens of each prompt and response.
        layers, experts, top_k, hidden: of the model.
        copies: slots of an expert rank for copies, in the comparison under skew.
        zipf: exponent of the skewed routing, in which a token has one expert.
    """

    sequences: int = 512
    rounds: int = 7
    width: int | None = None
    json: Path | None = None
    picture: Path | None = None
    prompt: int = 16
    new_tokens: int = 24
    layers: int = 4
    experts: int = 8
    top_k: int = 2
    hidden: int = 256
    copies: int = 2
    zipf: float = 2.0

    @property
    def tokens(self) -> int:
        """Tokens that a rollout generates."""
        return self.sequences * self.new_tokens

    def batch(self, sequences: int) -> tuple[dict[str, torch.Tensor], Array]:
        """Random prompts, and draws of their responses."""
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1, 1000, (sequences, self.prompt), generator=generator)
        draws = np.random.default_rng(0).random((sequences, self.new_tokens))
        return {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}, draws

    def model(self, width: int, top_k: int | None = None) -> Any:
        """A random model in float32."""
        config = small_config(
            layers=self.layers, hidden=self.hidden, width=width, experts=self.experts, top_k=top_k or self.top_k
        )
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
        return model.eval()


@dataclass(frozen=True)
class Run:
    """One rollout. Spans of compute are `(micro-batch, start, end)`, on the ranks 0 and 1."""

    seconds: float
    attention: list[tuple[int, float, float]]
    experts: list[tuple[int, float, float]]

    @property
    def times_2C(self) -> Array:
        """T_a and T_e of each call of a layer, if nothing overlaps."""
        calls = len(self.experts)
        return np.array([[end - start for _, start, end in spans[:calls]] for spans in (self.attention, self.experts)])

    @property
    def message_s(self) -> float:
        """T_c, mean of the calls, if nothing overlaps."""
        return (self.seconds - float(self.times_2C.sum())) / (2 * len(self.experts))


@contextmanager
def spans_of_compute(spans: list[tuple[int, float, float]]) -> Iterator[None]:
    """Add this rank's times of compute, each from the arrival of a message until the next one is handed to gloo."""
    send, receive, micro_batch = Channel.send, Channel.receive, 0
    start = end = time.perf_counter()

    def timed_send(channel: Channel, *columns: torch.Tensor) -> None:
        nonlocal end
        send(channel, *columns)
        end = time.perf_counter()

    def timed_receive(channel: Channel) -> Any:
        nonlocal micro_batch, start
        spans.append((micro_batch, start, max(start, end)))
        columns = receive(channel)
        micro_batch, start = channel.micro_batch, time.perf_counter()
        return columns

    with mock.patch.multiple(Channel, send=timed_send, receive=timed_receive):
        yield
    spans.append((micro_batch, start, max(start, end)))


EXAMPLES = ("--json out/bench-rollout.json --picture out/rollout.svg",)


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--sequences", type=positive, default=512, help="sequences of the attention rank")
    add_options(parser, "--rounds", default=7, help="timed rollouts of each kind")
    add_options(parser, "--width", type=positive, unset="T_e about T_a", help="inner width of an expert")
    add_options(parser, "--picture", type=Path, metavar="FILE", help="write a picture of the pipeline, an .svg")


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
    settings = RolloutBenchmark(options.sequences, options.rounds, options.width, options.json, options.picture)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        launch(time_pipeline, (settings, out / "pipeline.json"), ranks=2)
        pipeline = json.loads((out / "pipeline.json").read_text())
        launch(time_copies, (settings, pipeline["width"], out / "copies.json"), ranks=3)
        figures = {
            "schema": "trimtab-bench-rollout-1",
            "settings": settings_of(settings, "picture", "width"),
            **pipeline,
            "copies": json.loads((out / "copies.json").read_text()),
        }
    show(figures, print_figures, settings.json)


def time_pipeline(settings: RolloutBenchmark, out: Path) -> None:
    """Time 1, 2 and 3 micro-batches, and their parts alone; rank 0 writes the figures. Collective."""
    torch.set_num_threads(1)
    width = settings.width or choose_width(settings)
    rollouts = {
        micro_batches: disaggregate(
            settings.model(width), attention_ranks=1, expert_ranks=1, micro_batches=micro_batches
        )
        for micro_batches in MICRO_BATCHES
    }
    whole = settings.model(width)
    runs = {
        ("colocated", 1): partial(time_colocated, whole, settings),
        **{("pipeline", m): partial(time_rollout, rollouts[m], settings) for m in MICRO_BATCHES},
        **{
            ("part", m): partial(time_rollout, rollouts[1], settings, -(-settings.sequences // m))
            for m in MICRO_BATCHES
        },
    }
    title = "" if dist.get_rank() else "bench rollout"
    results = alternate(runs, settings.rounds, warm_up=1, progress=title)
    if dist.get_rank():
        return
    colocated = [run.seconds for run in results["colocated", 1]]
    figures = {
        "width": width,
        "micro_batches": summarise(results, settings),
        "colocated": {"seconds": colocated, "tokens_per_s": settings.tokens / statistics.median(colocated)},
    }
    out.write_text(json.dumps(figures))
    if settings.picture is not None:
        draw(settings.picture, {m: results["pipeline", m][-1] for m in MICRO_BATCHES}, settings.layers)


def choose_width(settings: RolloutBenchmark) -> int:
    """An expert width, a multiple of 64, with which experts take about as long as attention. Collective."""
    width = 512
    for _ in range(2):
        rollout = disaggregate(settings.model(width), attention_ranks=1, expert_ranks=1, micro_batches=1)
        time_rollout(rollout, settings)
        attention_s, expert_s = time_rollout(rollout, settings).times_2C.sum(axis=1)
        chosen = torch.tensor(max(64, 64 * round(width * attention_s / expert_s / 64)))
        dist.broadcast(chosen, 0)
        width = int(chosen)
    return width


def time_rollout(rollout: DisaggregatedRollout, settings: RolloutBenchmark, sequences: int | None = None) -> Run:
    """Generate for these sequences, by default all. Collective."""
    prompts, draws = settings.batch(settings.sequences if sequences is None else sequences)
    mine: list[tuple[int, float, float]] = []
    dist.barrier()
    start = time.perf_counter()
    with spans_of_compute(mine):
        rollout.generate(
            prompts if rollout.weights_L is None else None, max_new_tokens=settings.new_tokens, uniforms=draws
        )
    taken = time.perf_counter() - start
    spans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(spans, mine)
    # An expert rank starts with the first message, and ends with one that is not answered.
    return Run(taken, spans[0], spans[1][1:-1])


def time_colocated(model: Any, settings: RolloutBenchmark) -> Run:
    """Generate with the whole model for this rank's part of the sequences. Collective."""
    ranks = dist.get_world_size()
    prompts, draws = settings.batch(-(-settings.sequences // ranks))
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    dist.barrier()
    start = time.perf_counter()
    generate(model, tokenizer, prompts, settings.new_tokens, SampledLogProbs(draws))
    dist.barrier()
    return Run(time.perf_counter() - start, [], [])


def summarise(results: Mapping[tuple[str, int], list[Run]], settings: RolloutBenchmark) -> Figures:
    """Figures of each number of micro-batches: medians over the rounds."""
    figures = {}
    first = statistics.median(run.seconds for run in results["pipeline", 1])
    for m in MICRO_BATCHES:
        taken = statistics.median(run.seconds for run in results["pipeline", m])
        parts = results["part", m]
        attention_C, expert_C = np.median([run.times_2C for run in parts], axis=0)
        message_s = statistics.median(run.message_s for run in parts)
        alone_C = attention_C + expert_C + 2 * message_s
        predicted_s = float(np.maximum(m * np.maximum(attention_C, expert_C), alone_C).sum())
        figures[str(m)] = {
            "seconds": [run.seconds for run in results["pipeline", m]],
            "tokens_per_s": settings.tokens / taken,
            "speedup": first / taken,
            "attention_s": float(attention_C.mean()),
            "expert_s": float(expert_C.mean()),
            "message_s": message_s,
            "predicted_tokens_per_s": settings.tokens / predicted_s,
            "error": taken / predicted_s - 1,
        }
    return figures


def draw(path: Path, runs: Mapping[int, Run], layers: int) -> None:
    """Draw a few calls of the pipeline with each number of micro-batches."""
    with picture(path, len(runs), 1, (9, 1.6), sharex=True) as axes:
        for axis, (m, run) in zip(axes[:, 0], runs.items(), strict=True):
            middle = len(run.experts) // 2 // (m * layers) * m * layers
            begin = run.experts[middle][1]
            end = run.experts[min(middle + m * SHOWN_CALLS, len(run.experts) - 1)][1]
            for row, spans in enumerate((run.experts, run.attention)):
                for micro_batch, start, stop in spans:
                    if start < end and stop > begin:
                        bar = 1e3 * (start - begin), 1e3 * (stop - start)
                        axis.broken_barh([bar], (row - 0.4, 0.8), color=f"C{micro_batch}")
            axis.set_yticks([0, 1], ["experts", "attention"])
            axis.set_title(f"{m} micro-batch{'es' * (m > 1)}", loc="left", fontsize=10)
            axis.set_xlim(left=0)
        axes[-1, 0].set_xlabel("milliseconds; one colour per micro-batch")


def time_copies(settings: RolloutBenchmark, width: int, out: Path) -> None:
    """Time skewed routing on two expert ranks, placed by it and with copies; rank 0 writes the figures. Collective."""
    torch.set_num_threads(1)
    rollouts = {}
    # The weights of all experts are random, so they need not follow the placement.
    for name, copies in (("unplaced", 0), ("placed", 0), ("placed, copies", settings.copies)):
        model = settings.model(width, top_k=1)
        skew_routers(model, settings)
        rollouts[name] = disaggregate(model, attention_ranks=1, expert_ranks=2, micro_batches=1, copies=copies)
        if name != "unplaced":
            rollouts[name].place(np.rint(1e6 * expert_weights(settings)).astype(np.int64))
    runs = {name: partial(time_rollout, rollout, settings) for name, rollout in rollouts.items()}
    results = alternate(runs, settings.rounds, warm_up=1)
    if dist.get_rank() == 0:
        figures = {}
        for name, rollout in rollouts.items():
            load_XL = rollout.load_XL
            figures[name] = {
                "seconds": [run.seconds for run in results[name]],
                "tokens_per_s": settings.tokens / statistics.median(run.seconds for run in results[name]),
                "max_over_mean": float((load_XL.max(axis=0) / load_XL.mean(axis=0)).mean()),
            }
        out.write_text(json.dumps(figures))


def expert_weights(settings: RolloutBenchmark) -> Array:
    """Relative popularity `[L, E]` of experts, Zipf in another order in each layer."""
    rng = np.random.default_rng(0)
    weights = (1 + np.arange(settings.experts)) ** -settings.zipf
    return np.stack([rng.permutation(weights) for _ in range(settings.layers)])


def skew_routers(model: Any, settings: RolloutBenchmark) -> None:
    """Make routers choose experts at random, with these weights."""
    generator = torch.Generator().manual_seed(2)
    blocks = moe_blocks(model).values()
    for block, weights in zip(blocks, torch.from_numpy(expert_weights(settings)), strict=True):

        def choose(_router: Any, _args: Any, output: Any, weights: torch.Tensor = weights) -> Any:
            ids = torch.multinomial(weights.expand(len(output[0]), -1), 1, generator=generator)
            return reroute(model.config, output, ids)

        block.gate.register_forward_hook(choose)


def print_figures(figures: Figures, console: Console) -> None:
    """Print both tables."""
    sizes = figures["settings"]
    title = f"1 + 1 ranks, {sizes['sequences']} sequences, experts of width {figures['width']}"
    console.print(figure_table(title, PIPELINE, named_rows(figures["micro_batches"])))
    console.print(figure_table("1 + 2 ranks, skewed routing", COPIES, named_rows(figures["copies"])))
    console.print(
        f"Colocated, 2 ranks with half of the sequences each: {figures['colocated']['tokens_per_s']:.0f} tokens/s."
    )
    console.print(NOTES)


if __name__ == "__main__":
    main("benchmarks.rollout")
