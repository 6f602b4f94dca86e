"""`python -m benchmarks.live`: balancing without recorded routing: stragglers as in FEPLB's tables, and step time.

Stragglers on 2, 4 and 8 ranks in tokens and in CPU time of expert products, ranks one after another: before, with
FasterMoE's shadows, the runtime's live policies feplb and quota, and with foresight. Then time steps on 2 CPU ranks:
live policies and foresight against no balancing.

A step is one micro-step of a small model: forward, backward, complete gradients. Before each, outside of the clock, all
variants run a forward of another micro-step with the same skew, which is the past of `feplb`. The router's choice is
replaced by given ids in all variants. Those of `foresight` are also recorded, and planned outside of the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import live_stragglers as stragglers
from benchmarks.harness import Figures, main, settings_of, show
from benchmarks.pairs import summarise_pairs
from benchmarks.tables import Columns, figure_table, interval, named_rows, quantity
from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import alternate
from trimtab.calibration.calibration_settings import HIDDEN, LAYERS, TOP_K, WIDTH, small_config
from trimtab.cli.options import add_options, given, positive
from trimtab.cli.parser import Parser
from trimtab.errors import InputError
from trimtab.integrations.transformers import distribute_experts, moe_blocks
from trimtab.integrations.transformers.families import choose_experts
from trimtab.launch import launch
from trimtab.report.number_text import bytes_text, seconds
from trimtab.runtime import Session
from trimtab.runtime.live.balancer import LivePolicy
from trimtab.runtime.session_settings import Mode
from trimtab.runtime.step_planner import LOCAL_CPU
from trimtab.trace import synthesize

POLICIES: tuple[LivePolicy, ...] = ("quota", "feplb")
FORESIGHT = "foresight"
# With even routing, too.
ON_EVEN = ("off", "quota")
# The default policy of a session.
HEADLINE = "quota"
# Operations that launch no work.
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "detach", "alias", "slice", "select", "split", "split_with_sizes",
    "unsqueeze", "squeeze", "expand", "as_strided", "_reshape_alias", "empty", "new_empty", "empty_like",
    "empty_strided", "lift_fresh", "view_as", "chunk", "permute", "unbind", "narrow",
}  # fmt: skip
STEPS: Columns = {"variant": "{name}", "median step": quantity("median_s", seconds)}
GAINS: Columns = {
    "policy": "{name}",
    "gain captured": "{gain_captured:.2f}",
    "95% interval": interval("gain_captured_interval", "{:.2f}"),
    "overhead, even": lambda row: "" if row["overhead_when_even"] is None else f"{row['overhead_when_even']:+.1%}",
    "95% interval ": interval("overhead_when_even_interval", "{:+.1%}"),
}
COUNTED: Columns = {
    "policy": "{name}",
    "operations": "{operations:.0f}",
    "exchanges": "{exchanges:.1f}",
    "weights": quantity("weight_bytes", bytes_text),
    "gradients": quantity("gradient_bytes", bytes_text),
}
NOTES = (
    "gain_captured: the time that a policy saves on skewed routing, divided by the time that the skew costs. "
    "overhead_when_even: its step time on even routing divided by that without balancing, minus 1. Time on a GPU is "
    "not measured. On a CPU copies of weights and rows compete with the products for cores; a copy engine does not."
)


@dataclass(frozen=True)
class LiveBenchmark:
    """Sizes of the benchmark.

    Attributes:
        pairs: timed rounds of all variants.
        seeds: seeds 0 to seeds - 1, of the routing of stragglers and of steps. Rounds of steps use them in turn.
        json: file for the figures; None for none.
        ranks: numbers of ranks of stragglers, each in one node.
        presets: skew of the routing of stragglers.
        experts, straggler_layers: of the routing of stragglers.
        gemm_instances: instances of each case whose matrix products are timed.
        gemm_hidden, gemm_width: sizes of the experts that are timed.
        slots: slots of a rank, of all policies but `feplb`.
        feplb_slots: dynamic experts of a rank, as published.
        tokens, sequence_length: tokens of a rank in a micro-step of the timed steps, and of a sequence.
        layers, step_experts, top_k, hidden, width: sizes of the model of the timed steps.
        zipf: exponent of the skewed routing of the timed steps, as in `MegatronBenchmark`.
    """

    pairs: int = 40
    seeds: int = 3
    json: Path | None = None
    ranks: tuple[int, ...] = (2, 4, 8)
    presets: tuple[str, ...] = ("qwen3-30b-math", "nemotron-3-nano-text")
    experts: int = 128
    straggler_layers: int = 4
    gemm_instances: int = 2
    gemm_hidden: int = 64
    gemm_width: int = 128
    slots: int = 2
    feplb_slots: int = 4
    tokens: int = 1024
    sequence_length: int = 256
    layers: int = LAYERS
    step_experts: int = 16
    top_k: int = TOP_K
    hidden: int = HIDDEN
    width: int = WIDTH
    zipf: float = 2.0

    @property
    def straggler_routings(self) -> list[tuple[int, str, int]]:
        """Number of ranks, preset and seed of every routing of stragglers."""
        return list(product(self.ranks, self.presets, range(self.seeds)))

    @cached_property
    def num_routings(self) -> int:
        """Skewed routings of the timed steps, at most one for each pair."""
        return min(self.seeds, self.pairs)

    def routing(self, ranks: int, rank: int, seed: int | None) -> list[Array]:
        """The ids `[n, L, K]` of two micro-steps of a rank, of the same skew; exactly even if `seed` is None."""
        mine = 2 * (self.tokens // self.sequence_length)
        trace = synthesize(
            num_sequences=mine * ranks, sequence_length=self.sequence_length, num_layers=self.layers,
            num_experts=self.step_experts, top_k=self.top_k, zipf=0.0 if seed is None else self.zipf, seed=seed or 0,
        )  # fmt: skip
        sequences = [trace.sequence(number) for number in range(rank * mine, (rank + 1) * mine)]
        return [np.concatenate(half) for half in (sequences[: mine // 2], sequences[mine // 2 :])]


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--pairs", type=positive, default=40, help="timed rounds of all variants")
    add_options(parser, "--seeds", type=positive, default=3, help="routings: those of seeds 0 to N - 1")
    add_options(
        parser, "--tokens", type=positive, default=1024, help="tokens of a rank in a micro-step of the timed steps"
    )


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
    settings = LiveBenchmark(**given(options, LiveBenchmark))
    if settings.tokens % settings.sequence_length:
        raise InputError(f"--tokens is {settings.tokens}; it should be a multiple of {settings.sequence_length}")
    launch(run_benchmark, (settings, stragglers.straggler_cases(settings)), ranks=2)


def run_benchmark(settings: LiveBenchmark, cases: list[Figures]) -> None:
    """Time steps on the ranks of the process group; rank 0 prints and writes all figures. Collective.

    Args:
        cases: of `straggler_cases`.
    """
    steps = step_figures(settings)
    if dist.get_rank():
        return
    figures = {
        "schema": "trimtab-bench-live-1",
        "settings": settings_of(settings),
        "step_ranks": dist.get_world_size(),
        "gpu": "not measured",
        "cases": cases,
        "summary": stragglers.summarise_cases(cases),
        **steps,
    }
    show(figures, print_figures, settings.json)


def step_figures(settings: LiveBenchmark) -> Figures:
    """Times of all variants, the part of the gain that each policy captures, and what it counts. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    routings = {
        seed: [torch.from_numpy(ids.astype(np.int64)) for ids in settings.routing(ranks, rank, seed)]
        for seed in (None, *range(settings.num_routings))
    }
    models: dict[str, LiveModel] = {policy: LiveModel.of(settings, "live", policy) for policy in ("off", *POLICIES)}
    models[FORESIGHT] = LiveModel.of(settings, "plan", "off")
    seeds = list(range(settings.num_routings))
    # Each variant goes through the seeds; even routing has one.
    turns = {name: cycle(seeds) for name in (*POLICIES, "off", FORESIGHT)}

    def timed(name: str, model: LiveModel, *, even: bool) -> float:
        model.prepare(routings[None if even else next(turns[name])])
        dist.barrier()
        start = time.perf_counter()
        model.step()
        dist.barrier()
        return time.perf_counter() - start

    variants: dict[str, Callable[[], float]] = {}
    for name in ("off", *POLICIES, FORESIGHT):
        variants[f"{name}, skewed"] = partial(timed, name, models[name], even=False)
        if name in ON_EVEN:
            variants[f"{name}, even"] = partial(timed, name, models[name], even=True)
    progress = "" if rank else "bench live: steps"
    step_s = alternate(variants, settings.pairs, warm_up=len(seeds), progress=progress)
    counted = {name: models[name].counted(routings[0]) for name in ("off", *POLICIES, FORESIGHT)}
    for model in models.values():
        model.session.close()
    return summarise_live(step_s, settings.num_routings) | {"counted": counted}


def summarise_live(step_s: Mapping[str, list[float]], seeds: int) -> Figures:
    """Figures of every policy; those of the default policy are also `gain_captured` and `overhead_when_even`.

    Args:
        step_s: seconds by `policy, skewed` and `policy, even`, one per round, of rounds with the seeds 0, 1, ... in
            turn. Without the second, the overhead is None.
    """
    policies = {}
    names = [name.removesuffix(", skewed") for name in step_s if name.endswith(", skewed") and name != "off, skewed"]
    for name in names:
        even = step_s.get(f"{name}, even")
        pairs = {
            "plain_balanced": step_s["off, even"],
            "planned_balanced": step_s["off, even"] if even is None else even,
            "plain_skewed": step_s["off, skewed"],
            "planned_skewed": step_s[f"{name}, skewed"],
        }
        found = summarise_pairs(pairs, [{}] * seeds)
        policies[name] = {
            "gain_captured": found["gain_captured"],
            "gain_captured_interval": found["gain_captured_interval"],
            "overhead_when_even": None if even is None else found["overhead_when_balanced"],
            "overhead_when_even_interval": None if even is None else found["overhead_when_balanced_interval"],
            "gain_captured_by_seed": [seed["gain_captured"] for seed in found["seeds"]],
        }
    return {
        "gain_captured": policies[HEADLINE]["gain_captured"],
        "overhead_when_even": policies[HEADLINE]["overhead_when_even"],
        "policies": policies,
        "variants": {
            name: {"median_s": float(np.median(seconds)), "step_s": seconds} for name, seconds in step_s.items()
        },
    }


@dataclass(eq=False)
class LiveModel:
    """A model whose experts are in a session.

    Attributes:
        session: of this model alone, so that policies keep what they have learned.
        model: the model.
        replicated: its parameters that every rank has.
        tokens: `[sequences, length]` of both micro-steps.
        chosen: the ids `[n, L, K]` in place of the routers' choice, of the running micro-step.
    """

    session: Session
    model: Any
    replicated: list[nn.Parameter]
    tokens: torch.Tensor
    chosen: list[torch.Tensor]

    @classmethod
    def of(cls, settings: LiveBenchmark, mode: Mode, policy: LivePolicy) -> LiveModel:
        """A model with the same weights for all variants. Collective."""
        torch.manual_seed(0)
        sizes = small_config(
            layers=settings.layers, hidden=settings.hidden, width=settings.width, experts=settings.step_experts,
            top_k=settings.top_k,
        )  # fmt: skip
        config = AutoConfig.for_model(**sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        session = Session(
            num_experts=settings.step_experts, mode=mode, policy=policy, slots_per_rank=settings.slots, rates=LOCAL_CPU
        )
        chosen: list[torch.Tensor] = []
        for layer, block in enumerate(moe_blocks(model).values()):
            # Before the session's own, which then gets these ids as the router's choice.
            choose_experts(block.gate, config, partial(_choose, chosen, layer))
        distribute_experts(model, session)
        shape = settings.tokens // settings.sequence_length, settings.sequence_length
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
        return cls(session, model, session.replicated_parameters(model), tokens, chosen)

    def prepare(self, routing: list[torch.Tensor]) -> None:
        """Plan, if the mode does, clear gradients, and run a forward of the first micro-step. Collective."""
        self.model.zero_grad()
        if self.session.mode == "plan":
            self.session.plan_micro_steps([ids.numpy() for ids in routing])
            _ = self.session.step_plan
        self.chosen[:] = [routing[0]]
        with torch.no_grad(), self._micro_step(0):
            self.model(input_ids=self.tokens, use_cache=False)
        self.chosen[:] = [routing[1]]

    def step(self) -> None:
        """Forward, backward and complete gradients of the second micro-step. Collective."""
        with self._micro_step(1):
            logits = self.model(input_ids=self.tokens, use_cache=False).logits
            nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()
        self.session.finish_gradients(self.replicated)

    def counted(self, routing: list[torch.Tensor]) -> dict[str, float]:
        """Of a step: `operations` of PyTorch on this rank and `exchanges` of the session, each for a layer; replicas.

        Exchanges are collectives of rows and counts, and returns of replica gradients; transfers of weights are not in
        them. Collective.
        """
        self.prepare(routing)
        self.session.take_metrics()
        layers, logged = len(self.session.layers), self.session._lockstep.count
        with CountedOperations() as operations:
            self.step()
        metrics = self.session.take_metrics()
        return {
            "operations": operations.count / layers,
            "exchanges": (self.session._lockstep.count - logged) / layers,
            "weight_bytes": (metrics["transfer/peer_bytes"] + metrics["transfer/host_bytes"]) / layers,
            "gradient_bytes": metrics["transfer/gradient_bytes"] / layers,
        }

    def _micro_step(self, index: int) -> Any:
        return self.session.micro_step(index) if self.session.mode == "plan" else self.session.live_micro_step()


class CountedOperations(TorchDispatchMode):
    """Counts operations of this thread that launch work.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.split("::")[1] not in VIEWS
        return func(*args, **(kwargs or {}))


def _choose(chosen: list[torch.Tensor], layer: int, _live_ids: torch.Tensor) -> torch.Tensor:
    return chosen[0][:, layer].clone()


def print_figures(figures: Figures, console: Console) -> None:
    """Print stragglers with what they cost, where they differ from FEPLB's, step times, and what they mean."""
    stragglers.print_stragglers(figures, console)
    title = f"Step time on {figures['step_ranks']} CPU ranks, {figures['settings']['pairs']} rounds"
    console.print(figure_table(title, STEPS, named_rows(figures["variants"])))
    console.print(figure_table("Live policies compared with live routing", GAINS, named_rows(figures["policies"])))
    title = "Of a layer, forward and backward, on rank 0 and the routing of seed 0"
    console.print(figure_table(title, COUNTED, named_rows(figures["counted"])))
    console.print(NOTES)


if __name__ == "__main__":
    main("benchmarks.live")
