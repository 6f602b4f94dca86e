"""`python -m recipes.disaggregated_rollout.benchmark`: throughput with 1, 2 and 3 micro-batches, and with copies.

One attention rank and one expert rank generate for the same sequences with 1, 2 and 3 micro-batches in turns. Times of
attention, experts and messages, measured with one micro-batch of the same size, predict each. In turn with them, both
ranks generate for half of the sequences with the whole model (colocated). Then one attention rank and two expert ranks
generate under skewed routing, without and with copies of hot experts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
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
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import main, settings_of, show
from benchmarks.rollout_figures import MICRO_BATCHES, Run, draw, print_figures, summarise
from recipes.disaggregated_rollout.channels import Channel
from recipes.disaggregated_rollout.rollout import DisaggregatedRollout
from recipes.rl.responses import gather, generate
from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import alternate
from trimtab.calibration.calibration_settings import small_config
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.integrations.transformers import moe_blocks
from trimtab.integrations.transformers.families import choose_experts
from trimtab.launch import launch

EXAMPLES = ("--json out/bench-rollout.json --picture out/rollout.svg",)
# Nothing ends a response.
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=-1)
Span = tuple[int, float, float]


@dataclass(frozen=True)
class RolloutBenchmark:
    """Sizes of the benchmark.

    Attributes:
        sequences: of the attention rank.
        rounds: timed rollouts of each kind.
        width: of an expert; with the default T_e is about T_a on two equal cores.
        json, picture: files for the figures and for the picture of the pipeline; None for none.
        prompt, new_tokens: tokens of each prompt and response.
        layers, experts, top_k, hidden: of the model.
        copies: slots of an expert rank for copies, in the comparison under skew.
        zipf: exponent of the skewed routing, in which a token has one expert.
    """

    sequences: int = 512
    rounds: int = 7
    width: int = 320
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

    def batch(self, sequences: int) -> tuple[dict[str, torch.Tensor], Array]:
        """Random prompts, and draws of their responses."""
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1, 1000, (sequences, self.prompt), generator=generator)
        draws = np.random.default_rng(0).random((sequences, self.new_tokens))
        return {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}, draws

    def model(self, top_k: int) -> Any:
        """A random model in float32."""
        sizes = {"layers": self.layers, "hidden": self.hidden, "width": self.width, "experts": self.experts}
        torch.manual_seed(0)
        config = AutoConfig.for_model(**small_config(**sizes, top_k=top_k))
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--sequences", type=positive, default=512, help="sequences of the attention rank")
    add_options(parser, "--rounds", default=7, help="timed rollouts of each kind")
    add_options(parser, "--width", type=positive, default=320, help="inner width of an expert")
    add_options(parser, "--picture", type=Path, metavar="FILE", help="write a picture of the pipeline, an .svg")


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
    settings = RolloutBenchmark(options.sequences, options.rounds, options.width, options.json, options.picture)
    with tempfile.TemporaryDirectory() as folder:
        parts = {2: (time_pipeline, Path(folder) / "pipeline.json"), 3: (time_copies, Path(folder) / "copies.json")}
        for ranks, (measure, out) in parts.items():
            launch(measure, (settings, out), ranks=ranks)
        pipeline, copies = (json.loads(out.read_text()) for _, out in parts.values())
    head = {"schema": "trimtab-bench-rollout-1", "settings": settings_of(settings, "picture", "width")}
    show(head | {"width": settings.width} | pipeline | {"copies": copies}, print_figures, settings.json)


@contextmanager
def spans_of_compute(spans: list[Span]) -> Iterator[None]:
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


def time_rollout(rollout: DisaggregatedRollout, settings: RolloutBenchmark, sequences: int) -> Run:
    """Generate for some sequences. Collective."""
    prompts, draws = settings.batch(sequences)
    spans: list[Span] = []
    dist.barrier()
    start = time.perf_counter()
    with spans_of_compute(spans):
        rollout.generate(TOKENIZER, prompts if rollout.is_attention else None, settings.new_tokens, draws)
    taken, of_ranks = time.perf_counter() - start, gather(spans)
    # An expert rank starts with the first message, and ends with one that is not answered.
    return Run(taken, of_ranks[0], of_ranks[1][1:-1])


def time_colocated(model: Any, settings: RolloutBenchmark) -> Run:
    """Generate with the whole model for this rank's part of the sequences. Collective."""
    prompts, draws = settings.batch(-(-settings.sequences // dist.get_world_size()))
    dist.barrier()
    start = time.perf_counter()
    generate(model, TOKENIZER, prompts, settings.new_tokens, draws)
    dist.barrier()
    return Run(time.perf_counter() - start, [], [])


def tokens_per_s(settings: RolloutBenchmark, runs: list[Run]) -> dict[str, Any]:
    """Seconds of each rollout, and generated tokens a second in the median one."""
    taken = [run.seconds for run in runs]
    return {"seconds": taken, "tokens_per_s": settings.sequences * settings.new_tokens / statistics.median(taken)}


def time_pipeline(settings: RolloutBenchmark, out: Path) -> None:
    """Time 1, 2 and 3 micro-batches, and their parts alone; rank 0 writes the figures. Collective."""
    torch.set_num_threads(1)
    rollouts = {
        m: DisaggregatedRollout(settings.model(settings.top_k), attention_ranks=1, expert_ranks=1, micro_batches=m)
        for m in MICRO_BATCHES
    }
    runs: dict[tuple[str, int], Callable[[], Run]] = {
        ("colocated", 1): partial(time_colocated, settings.model(settings.top_k), settings)
    }
    for m, rollout in rollouts.items():
        runs["pipeline", m] = partial(time_rollout, rollout, settings, settings.sequences)
        runs["part", m] = partial(time_rollout, rollouts[1], settings, -(-settings.sequences // m))
    results = alternate(runs, settings.rounds, warm_up=1, progress="" if dist.get_rank() else "bench rollout")
    if dist.get_rank() == 0:
        figures = summarise(results, settings.sequences * settings.new_tokens)
        colocated = tokens_per_s(settings, results["colocated", 1])
        out.write_text(json.dumps({"micro_batches": figures, "colocated": colocated}))
        if settings.picture is not None:
            draw(settings.picture, {m: results["pipeline", m][-1] for m in MICRO_BATCHES}, settings.layers)


def time_copies(settings: RolloutBenchmark, out: Path) -> None:
    """Time skewed routing on two expert ranks, placed by it and with copies; rank 0 writes the figures. Collective."""
    torch.set_num_threads(1)
    weights_LE, rollouts = expert_weights(settings), {}
    # The weights of all experts are random, so they need not follow the placement.
    for name, copies in (("unplaced", 0), ("placed", 0), ("placed, copies", settings.copies)):
        model = settings.model(top_k=1)
        skew_routers(model, weights_LE)
        sizes = {"attention_ranks": 1, "expert_ranks": 2, "micro_batches": 1}
        rollouts[name] = DisaggregatedRollout(model, **sizes, copies=copies)
        if name != "unplaced":
            rollouts[name].place(np.rint(1e6 * weights_LE).astype(np.int64))
    runs = {name: partial(time_rollout, each, settings, settings.sequences) for name, each in rollouts.items()}
    results = alternate(runs, settings.rounds, warm_up=1)
    if dist.get_rank() == 0:
        ratios = {name: each.load_XL.max(axis=0) / each.load_XL.mean(axis=0) for name, each in rollouts.items()}
        figures: Mapping[str, Any] = {
            name: tokens_per_s(settings, results[name]) | {"max_over_mean": float(ratio_L.mean())}
            for name, ratio_L in ratios.items()
        }
        out.write_text(json.dumps(figures))


def expert_weights(settings: RolloutBenchmark) -> Array:
    """Relative popularity `[L, E]` of experts, Zipf in another order in each layer."""
    rng = np.random.default_rng(0)
    weights = (1 + np.arange(settings.experts)) ** -settings.zipf
    return np.stack([rng.permutation(weights) for _ in range(settings.layers)])


def skew_routers(model: Any, weights_LE: Array) -> None:
    """Make routers choose experts at random, with these weights."""
    generator = torch.Generator().manual_seed(2)
    for block, weights in zip(moe_blocks(model).values(), torch.from_numpy(weights_LE), strict=True):

        def choose(live_ids: torch.Tensor, weights: torch.Tensor = weights) -> torch.Tensor:
            return torch.multinomial(weights.expand(len(live_ids), -1), 1, generator=generator)

        choose_experts(block.gate, model.config, choose)


if __name__ == "__main__":
    main("recipes.disaggregated_rollout.benchmark")
