"""Measure the planning times that balancers are charged: `python -m experiments.planning_times`."""

from __future__ import annotations

import argparse
import cProfile
import itertools
import math
import platform
import pstats
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

from trimtab.array_type import Array
from trimtab.cli.main import run
from trimtab.cli.options import add_options, given
from trimtab.cli.output import write_figures
from trimtab.cli.parser import Parser
from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, SequenceCounts, pack_by_length
from trimtab.policies import POLICIES, Policy, View, make_view
from trimtab.policies.planning_time import MEASURED, TimeAtSize
from trimtab.simulator.comparison import budget_for
from trimtab.trace import PRESETS, synthesize_preset

NAME = "python -m experiments.planning_times"
SCHEMA = "trimtab-planning-times-1"
PRESET, TOKENS_PER_RANK, MEAN_LENGTH, SLOTS, RANKS_PER_NODE = "qwen3-30b-math", 4096, 1024, 2, 8
SIZES = ((8, 128), (16, 128), (32, 128), (64, 256), (128, 256))
"""Ranks and experts."""
MICRO_STEPS, LAYERS = (8, 32), (8, 16)
"""Each of a small and of a large step; Trimtab's sample is as large in both."""
SERIAL = ("routepack", "openinstruct")
"""Balancers whose search over schedules is one task. The others plan layer by layer."""
BY_LAYER = {"trimtab": ("map_layers",), "eplb_oracle": ("rebalance", "_choose_homes")}
"""Functions that plan layer by layer. What else Trimtab's planner does is serial. What else `eplb_oracle` does is the
split of tokens over copies, which follows the live routing and is not planned."""


@dataclass(frozen=True, eq=False)
class Step:
    """A step to plan, after an earlier one."""

    cluster: ClusterSpec
    sequences: SequenceCounts
    earlier: SequenceCounts
    token_budget: int

    @classmethod
    def draw(cls, ranks: int, experts: int, micro_steps: int, layers: int) -> Step:
        """A step of the preset, with about 4,096 tokens per rank and micro-step."""
        trace = synthesize_preset(
            PRESETS[PRESET],
            num_sequences=ranks * micro_steps * TOKENS_PER_RANK // MEAN_LENGTH,
            mean_length=MEAN_LENGTH,
            max_length=4 * MEAN_LENGTH,
            num_layers=layers,
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

    The times of `TimeAtSize` follow from four steps, with few and many micro-steps and layers. Times of a step are the
    least of the rounds, in which balancers alternate, on one core.

    Args:
        rounds: timed plans of every step, after one that is not timed.
        max_ranks: largest size.
    """
    names = [name for name, policy in POLICIES.items() if policy.traits.planning.source == MEASURED]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    chosen = [size for size in SIZES if size[0] <= max_ranks]
    for ranks, experts in track(chosen, "planning times", transient=True):
        # Serial and parallel microseconds, by micro-steps and layers.
        us: dict[str, dict[tuple[int, int], tuple[float, float]]] = {name: {} for name in names}
        for asked, layers in itertools.product(MICRO_STEPS, LAYERS):
            step = Step.draw(ranks, experts, asked, layers)
            for number, name in itertools.product(range(rounds + 1), names):
                serial, parallel, micro_steps = _plan(name, step)
                key = (micro_steps, layers)
                if number:
                    us[name][key] = min(us[name].get(key, (math.inf, math.inf)), (serial, parallel), key=sum)
        for name in names:
            found[name].append({"ranks": ranks} | _fit(us[name]))
    settings = {
        "preset": PRESET, "layers": LAYERS, "micro_steps": MICRO_STEPS, "tokens_per_rank": TOKENS_PER_RANK,
        "slots": SLOTS, "experts": dict(chosen), "rounds": rounds,
    }  # fmt: skip
    return {"schema": SCHEMA, "machine": _machine(), "settings": settings, "policies": found}


def _plan(name: str, step: Step) -> tuple[float, float, int]:
    """Serial and parallel microseconds of planning, and the plan's micro-steps.

    Counting the load of the given schedule is not included. The overhead of the profiler, under which balancers of
    `BY_LAYER` run, is included.
    """
    policy = POLICIES[name]
    view, profile = step.view(policy), cProfile.Profile()
    start = time.perf_counter()
    plan = profile.runcall(policy.plan, view) if name in BY_LAYER else policy.plan(view)
    total = (time.perf_counter() - start) * 1e6
    if name not in BY_LAYER:
        return (total, 0.0, plan.num_micro_steps) if name in SERIAL else (0.0, total, plan.num_micro_steps)
    stats: Any = pstats.Stats(profile)
    parallel = sum(entry[3] for (*_, function), entry in stats.stats.items() if function in BY_LAYER[name]) * 1e6
    return total - parallel if name == "trimtab" else 0.0, parallel, plan.num_micro_steps


def _fit(us: dict[tuple[int, int], tuple[float, float]]) -> dict[str, float]:
    """The times of `TimeAtSize` that are nearest to the measured ones; none is negative."""
    steps = np.array(list(us), float)
    micro_steps, layers = steps.T
    serial, parallel = np.array(list(us.values())).T
    once, instances = np.ones(len(steps)), micro_steps * layers
    # Only Trimtab does both.
    fixed = bool(serial.any() and parallel.any())
    times = _fit_amounts({"micro_step": micro_steps, "serial": instances} | ({"step": once} if fixed else {}), serial)
    times |= _fit_amounts({"layer": layers, "instance": instances} | ({"sample": once} if fixed else {}), parallel)
    return {name: round(value, 2) for name, value in times.items()}


def _fit_amounts(amounts: dict[str, Array], measured: Array) -> dict[str, float]:
    """Factors of amounts whose sum is nearest to the measured times, by relative error; none is negative."""
    found = dict.fromkeys(amounts, 0.0)
    if not measured.any():
        return found
    least = math.inf
    for number in range(1, len(amounts) + 1):
        for names in itertools.combinations(amounts, number):
            parts = np.stack([amounts[name] for name in names], axis=1) / measured[:, None]
            factors, *_ = np.linalg.lstsq(parts, np.ones(len(measured)), rcond=None)
            error = float(np.square(parts @ factors - 1).sum())
            if (factors >= 0).all() and error < least - 1e-12:
                least = error
                found = dict.fromkeys(amounts, 0.0) | dict(zip(names, factors.tolist(), strict=True))
    return found


def _machine() -> str:
    return f"one core of {platform.machine()}, Python {platform.python_version()}"


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        prog=NAME,
        description="Measure planning times of Trimtab and of our implementations of other balancers, all in one "
        "run. The simulator charges them.",
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
    columns = TimeAtSize._fields
    table = Table("balancer", *columns, title="Planning times, microseconds")
    for name, sizes in figures["policies"].items():
        for size in sizes:
            table.add_row(name, *(f"{size.get(column, 0.0):,.4g}" for column in columns))
    console.print(table)


if __name__ == "__main__":
    sys.exit(run(NAME, lambda: make_parser().parse_args()))
