"""`python -m benchmarks.megatron --rehome`: what moving experts to other homes is worth in a Megatron training run.

Routing is skewed, and which experts are popular drifts from step to step. Variants train side by side, each with a
model and Adam of its own, and alternate within a step:

* `plain`: Megatron alone, homes as at the start.
* `eplb`: homes by the loads of the step before, packed as EPLB does, moved before every step.
* `rehome`: mode `rehome`, homes by the known loads of the step, moved if that is predicted to pay.
* `plan`: mode `plan`: homes, replicas and split.

A step is one call of Megatron's forward-backward function. Planning and moves are timed, the optimizer is not.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import pairwise, starmap
from typing import Any

import megatron.core
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from rich.console import Console

from benchmarks.harness import Figures, settings_of, show
from benchmarks.megatron_model import MegatronBenchmark, MegatronModel
from benchmarks.replayed_megatron import Routing, replayed, start_megatron
from benchmarks.tables import Columns, figure_table, named_rows, quantity
from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import alternate
from trimtab.integrations.megatron import balance
from trimtab.planner import Placement
from trimtab.planner.placement.packing import rebalance
from trimtab.planner.plan.workload import max_over_mean
from trimtab.report.number_text import bytes_text, seconds

WARM_UP = 2
# Experts that every rank sends in every layer, and how often each number is timed.
MOVED = (1, 2, 4, 8)
MOVES = 9
VARIANTS: Columns = {
    "variant": "{name}",
    "median step": quantity("median_s", seconds),
    "of plain": "{ratio:.3f}",
    "experts moved a step": "{moved:.1f}",
    "replicas a step": "{replicas:.1f}",
    "planning": quantity("planning_s", seconds),
    "moves": quantity("moving_s", seconds),
}
PRICES: Columns = {
    "experts a rank and layer": "{experts}",
    "a rank sends": quantity("bytes", bytes_text),
    "median move": quantity("median_s", seconds),
}


def run_rehome_benchmark(settings: MegatronBenchmark) -> None:
    """Time all variants on this rank's share of the work; rank 0 prints and writes the figures. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start_megatron()
    routings = [settings.drifting(ranks, step) for step in range(WARM_UP + 1 + settings.pairs)]
    loads = [_loads(step, settings.experts) for step in routings]
    # The routing of a step, and the loads of the step before.
    inputs = [(step[rank], past_LE) for step, past_LE in zip(routings[1:], loads[:-1], strict=True)]
    models = {name: _Variant(name, settings) for name in ("plain", "eplb", "rehome", "plan")}
    variants = {name: partial(next, starmap(model.step, inputs)) for name, model in models.items()}
    progress = "" if rank else "bench megatron --rehome"
    steps = alternate(variants, settings.pairs, warm_up=WARM_UP, progress=progress)
    prices = models["plan"].prices()
    if rank:
        return
    loads_SLR = np.stack(loads).reshape(len(loads), settings.layers, ranks, -1).sum(axis=3)
    figures: Figures = {
        "schema": "trimtab-bench-megatron-rehome-1",
        "megatron_version": megatron.core.__version__,
        "settings": settings_of(settings),
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
        "max_over_mean_at_start": float(max_over_mean(loads_SLR[WARM_UP + 1 :]).mean()),
        "drift": float(np.mean([_change(*pair) for pair in pairwise(loads)])),
        "variants": {name: _summary(mine, steps["plain"]) for name, mine in steps.items()},
        "prices": prices,
    }
    show(figures, print_figures, settings.json)


class _Variant:
    """A model with optimizer, and how its experts are balanced."""

    def __init__(self, name: str, settings: MegatronBenchmark) -> None:
        self._name = name
        self._model = MegatronModel(settings)
        config = OptimizerConfig(optimizer="adam", lr=1e-5, weight_decay=0.0, clip_grad=0.0)
        self._optimizer: Any = get_megatron_optimizer(config, [self._model.ddp])
        self._session: Any = None
        if name != "plain":
            modes: Any = {"eplb": "off", "rehome": "rehome", "plan": "plan"}
            self._session = balance(self._model.ddp, slots_per_rank=settings.slots, mode=modes[name])
            self._session.register_optimizer(self._optimizer)

    def step(self, routing: Routing, past_LE: Array) -> dict[str, float]:
        """Run a step. Returns seconds until all ranks are done, and figures of its plan. Collective."""
        self._model.zero()
        dist.barrier()
        start = time.perf_counter()
        figures = {"moved": 0.0, "replicas": 0.0, "planning_s": 0.0, "moving_s": 0.0}
        if self._name == "eplb":
            before = self._session.session.placement
            self._session.move(_eplb_homes(past_LE, self._session.session.num_ranks))
            figures["moved"] = float((before.home != self._session.session.placement.home).sum())
            figures["moving_s"] = time.perf_counter() - start
        if self._name in ("plain", "eplb"):
            self._model.step_with_replay(replayed(routing))
        else:
            self._model.step(routing, self._session)
            report = self._session.report
            figures = {
                "moved": report.homes_moved, "replicas": report.replicas, "planning_s": report.planning_s,
                "moving_s": report.moving_s,
            }  # fmt: skip
        dist.barrier()
        figures["step_s"] = time.perf_counter() - start
        self._optimizer.step()
        return figures

    def prices(self) -> list[dict[str, float]]:
        """Median seconds of moves by number of experts that every rank sends in every layer. Collective."""
        self._model.zero()
        session = self._session.session
        layers, experts = session.placement.home.shape
        # Weights and the two moments of Adam.
        per_rank = experts // session.num_ranks
        state_bytes = 3 * sum(parameter.nbytes for parameter in session.homes[0].parameters) // per_rank
        return [
            {
                "experts": count,
                "bytes": count * layers * state_bytes,
                "median_s": statistics.median(self._move_time(count) for _ in range(MOVES)),
            }
            for count in MOVED
            if count <= per_rank
        ]

    def _move_time(self, count: int) -> float:
        session = self._session.session
        after = _rotated(session.placement, count, session.num_ranks)
        dist.barrier()
        start = time.perf_counter()
        session.move(after)
        dist.barrier()
        return time.perf_counter() - start


def _eplb_homes(load_LE: Array, ranks: int) -> Placement:
    """Homes as EPLB packs them by loads, without copies."""
    layers, experts = load_LE.shape
    home_LE = np.empty((layers, experts), np.int16)
    for layer, load_E in enumerate(load_LE):
        expert_of_slot, _ = rebalance(load_E, experts, 1, 1, ranks)
        home_LE[layer, expert_of_slot] = np.arange(experts) // (experts // ranks)
    return Placement(home_LE)


def _rotated(placement: Placement, count: int, ranks: int) -> Placement:
    """Homes after each rank has sent its first experts of each layer to the next rank."""
    home_LE = placement.home.copy()
    for home_E in home_LE:
        for leaving in [np.flatnonzero(home_E == rank)[:count] for rank in range(ranks)]:
            home_E[leaving] = (home_E[leaving] + 1) % ranks
    return Placement(home_LE)


def _loads(routing_R: list[Routing], experts: int) -> Array:
    """`[L, E]` rows of each expert in a step of all ranks."""
    ids_NLK = np.concatenate([ids for routing in routing_R for ids in routing])
    return np.stack([np.bincount(ids_NLK[:, layer].ravel(), minlength=experts) for layer in range(ids_NLK.shape[1])])


def _change(before_LE: Array, after_LE: Array) -> float:
    """Part of the rows that change their expert from one step to the next."""
    return float(np.abs(after_LE - before_LE).sum() / 2 / after_LE.sum())


def _summary(steps: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, Any]:
    ratios = [step["step_s"] / other["step_s"] for step, other in zip(steps, plain, strict=True)]
    return {
        "median_s": statistics.median(step["step_s"] for step in steps),
        "ratio": statistics.median(ratios),
        **{name: statistics.mean(step[name] for step in steps) for name in ("moved", "replicas")},
        **{name: statistics.median(step[name] for step in steps) for name in ("planning_s", "moving_s")},
        "step_s": [step["step_s"] for step in steps],
    }


def print_figures(figures: Figures, console: Console) -> None:
    """Print step times, and what moves take."""
    console.print(
        f"Megatron-core {figures['megatron_version']} on {figures['ranks']} CPU ranks, "
        f"{figures['settings']['pairs']} steps; max/mean of the first homes {figures['max_over_mean_at_start']:.2f}; "
        f"from step to step {figures['drift']:.0%} of rows change their expert"
    )
    console.print(figure_table("Step time", VARIANTS, named_rows(figures["variants"])))
    console.print(figure_table("Moves of weights and Adam's moments, float32", PRICES, figures["prices"]))
