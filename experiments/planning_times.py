"""Measure the planning times that balancers are charged: `python -m experiments.planning_times`."""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.progress import track

from trimtab.cli.main import run
from trimtab.cli.options import add_options, given
from trimtab.cli.output import write_figures
from trimtab.cli.parser import Parser
from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, SequenceCounts, pack_by_length
from trimtab.policies import POLICIES, Policy, View, make_view
from trimtab.simulator.comparison import budget_for
from trimtab.trace import PRESETS, synthesize_preset

NAME = "python -m experiments.planning_times"
SCHEMA = "trimtab-planning-times-1"
PRESET, LAYERS, TOKENS_PER_RANK, MEAN_LENGTH, SLOTS, RANKS_PER_NODE = "qwen3-30b-math", 4, 4096, 1024, 2, 8
# Ranks and experts; micro-steps of the short and of the long step.
SIZES = ((8, 128), (16, 128), (32, 128), (64, 256), (128, 256))
SHORT, LONG = 8, 32
# Their search over schedules is one task; the others plan layer by layer.
SERIAL = ("routepack", "openinstruct")
# The function of Trimtab's planner that runs a task for every layer. What else it does is serial.
PARALLEL = "map_layers"


@dataclass(frozen=True, eq=False)
class Step:
    """A step to plan, after an earlier one."""

    cluster: ClusterSpec
    sequences: SequenceCounts
    earlier: SequenceCounts
    token_budget: int

    @classmethod
    def draw(cls, ranks: int, experts: int, micro_steps: int) -> Step:
        """A step of the preset, with about 4,096 tokens per rank and micro-step."""
        trace = synthesize_preset(
            PRESETS[PRESET],
            num_sequences=ranks * micro_steps * TOKENS_PER_RANK // MEAN_LENGTH,
            mean_length=MEAN_LENGTH,
            max_length=4 * MEAN_LENGTH,
            num_layers=LAYERS,
            num_experts=experts,
            num_steps=2,
        )
        counted = SequenceCounts.from_trace(trace)
        earlier, sequences = (counted.select(np.flatnonzero(trace.steps == step)) for step in (0, 1))
        cluster = ClusterSpec(ranks, min(ranks, RANKS_PER_NODE), SLOTS)
        return cls(cluster, sequences, earlier, budget_for((sequences, earlier), ranks, micro_steps))

    def view(self, policy: Policy) -> View:
        """The input of a policy. Trimtab and others that move homes start from contiguous ones."""
        schedule = pack_by_length(self.sequences.lengths, num_ranks=self.cluster.ranks, token_budget=self.token_budget)
        homes = Placement.contiguous(self.sequences.num_layers, self.sequences.num_experts, self.cluster.ranks)
        past_PLE = self.earlier.counts_SLE.sum(axis=0, dtype=np.int64)[None]
        return make_view(
            policy,
            self.sequences,
            schedule,
            homes,
            self.cluster,
            token_budget=self.token_budget,
            past_counts_PLE=past_PLE,
        )


def measure_times(rounds: int = 3, max_ranks: int = 128) -> dict[str, Any]:
    """Planning times of all balancers whose time is measured, as `--json` writes them.

    A step of L layers and M micro-steps is taken to need L * (per layer + M * per instance); two steps that differ in M
    give both. Times are the least of the rounds, in which balancers alternate, on one core.

    Args:
        rounds: timed plans of every step, after one that is not timed.
        max_ranks: largest size.
    """
    names = [name for name, policy in POLICIES.items() if policy.traits.planning.source.startswith("measured")]
    sizes: dict[str, list[tuple[int, float, float]]] = {name: [] for name in names}
    serial: dict[str, list[float]] = {name: [] for name in names}
    chosen = [size for size in SIZES if size[0] <= max_ranks]
    for ranks, experts in track(chosen, "planning times", transient=True):
        us: dict[tuple[str, int], float] = {}
        for micro_steps in (SHORT, LONG):
            step = Step.draw(ranks, experts, micro_steps)
            for number in range(rounds + 1):
                for name in names:
                    seconds, instances = _plan(POLICIES[name], step)
                    if number:
                        one = seconds / instances * 1e6
                        us[name, micro_steps] = min(us.get((name, micro_steps), one), one)
        for name in names:
            serial[name].append(_serial_fraction(name, step))
            sizes[name].append((ranks, *_split(us[name, SHORT], us[name, LONG], POLICIES[name])))
    settings = {
        "preset": PRESET, "layers": LAYERS, "micro_steps": [SHORT, LONG], "tokens_per_rank": TOKENS_PER_RANK,
        "slots": SLOTS, "experts": dict(chosen), "rounds": rounds,
    }  # fmt: skip
    times = {name: {"serial": statistics.median(serial[name]), "sizes": sizes[name]} for name in names}
    return {"schema": SCHEMA, "machine": _machine(), "settings": settings, "policies": times}


def _plan(policy: Policy, step: Step) -> tuple[float, int]:
    """Seconds of planning, and the instances of the plan."""
    view = step.view(policy)
    start = time.perf_counter()
    plan = policy.plan(view)
    return time.perf_counter() - start, plan.num_micro_steps * plan.num_layers


def _split(short_us: float, long_us: float, policy: Policy) -> tuple[float, float]:
    """Microseconds per layer and per instance, from those per instance of the short and of the long step."""
    if policy.traits.known_at == "layer":
        return 0.0, round(long_us, 2)
    layer_us = max(0.0, (short_us - long_us) / (1 / SHORT - 1 / LONG))
    return round(layer_us, 1), round(max(0.0, long_us - layer_us / LONG), 2)


def _serial_fraction(name: str, step: Step) -> float:
    """Part of the planning time that is not spent layer by layer."""
    if name in SERIAL:
        return 1.0
    if name != "trimtab":
        return 0.0
    view, profile = step.view(POLICIES[name]), cProfile.Profile()
    start = time.perf_counter()
    profile.runcall(POLICIES[name].plan, view)
    total = time.perf_counter() - start
    stats: Any = pstats.Stats(profile)
    parallel = sum(entry[3] for (_, _, function), entry in stats.stats.items() if function == PARALLEL)
    return round(1 - parallel / total, 3)


def _machine() -> str:
    return f"one core of {platform.machine()}, Python {platform.python_version()}"


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        prog=NAME,
        description="Measure planning times of Trimtab and of our implementations of other balancers, all in the same "
        "way. The simulator charges them.",
        examples=[f"{NAME} --json src/trimtab/policies/planning_times.json"],
    )
    option = partial(add_options, parser, of=measure_times)
    option("--rounds")
    option("--max-ranks", type=int, help="largest number of ranks")
    add_options(parser, "--json")
    parser.set_defaults(run=_run)
    return parser


def _run(options: argparse.Namespace) -> None:
    figures = measure_times(**given(options, measure_times))
    console = write_figures(options, figures)
    for name, times in figures["policies"].items():
        text = "; ".join(f"{ranks}: {layer:,.0f} + {one:,.1f}" for ranks, layer, one in times["sizes"])
        console.print(f"{name} (serial {times['serial']:.0%}), ranks: us per layer + us per instance: {text}")


if __name__ == "__main__":
    sys.exit(run(NAME, lambda: make_parser().parse_args()))
