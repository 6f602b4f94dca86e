"""Simulate the set-ups of `published.py` on synthetic traces, and compute their figures.

`measures.py` computes figures, `page.py` writes tables. Every preset and seed gives one value of each figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import numpy as np
from rich.progress import Progress

from experiments.papers.measures import Case
from experiments.papers.page import SCHEMA
from experiments.papers.published import VARIANTS, Row, SetUp
from trimtab.cluster import ClusterSpec, load_cluster, load_model
from trimtab.planner import SequenceCounts, budget_for
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.yardstick import yardstick
from trimtab.trace import PRESETS, RoutingTrace, synthesize_preset

# Steps of a trace. The last one is simulated, with the homes that planning the step before it leaves and the history of
# all earlier ones.
STEPS = 3


def run_papers(
    rows: Sequence[Row],
    presets: Sequence[str] = ("qwen3-30b-math", "qwen3-30b-mixed"),
    seeds: Sequence[int] = (0, 1, 2),
) -> dict[str, Any]:
    """All figures of some rows, by set-up, preset and seed, as `--json` writes them."""
    with Progress(transient=True) as progress:
        task = progress.add_task("papers", total=len(presets) * len(seeds) * sum(len(r.set_ups) for r in rows))
        return {
            "schema": SCHEMA,
            "yardstick": yardstick(),
            "steps": STEPS,
            "seeds": list(seeds),
            "rows": {row.name: _run_row(row, presets, seeds, lambda: progress.advance(task)) for row in rows},
        }


def _run_row(row: Row, presets: Sequence[str], seeds: Sequence[int], advance: Callable[[], None]) -> dict[str, Any]:
    start = time.process_time()
    values: dict[tuple[int, int], dict[str, list[float]]] = {
        (s, f): {preset: [] for preset in presets} for s in range(len(row.set_ups)) for f in range(len(row.figures))
    }
    for preset in presets:
        for seed in seeds:
            # Set-ups of equal size share a trace.
            draw = lru_cache(_draw)
            for s, set_up in enumerate(row.set_ups):
                model = load_model(set_up.model)
                steps = draw(
                    preset,
                    set_up.steeper,
                    seed,
                    num_sequences=set_up.sequences,
                    mean_length=set_up.mean_length,
                    max_length=set_up.longest,
                    num_layers=set_up.layers,
                    num_experts=model.num_experts,
                    top_k=model.top_k,
                )
                case = _case(set_up, steps, row.policies)
                for f, figure in enumerate(row.figures):
                    values[s, f][preset].append(round(figure.measure(case), 6))
                advance()
    return {
        "paper": row.paper,
        "policies": list(row.policies),
        "seconds": round(time.process_time() - start, 1),
        "set_ups": [
            {
                "title": set_up.title,
                **asdict(set_up),
                "ranks_per_node": _cluster(set_up).ranks_per_node,
                "sequences": set_up.sequences,
                "figures": [
                    {
                        "title": figure.title,
                        "published": figure.published,
                        "style": figure.style,
                        "values": values[s, f],
                    }
                    for f, figure in enumerate(row.figures)
                ],
            }
            for s, set_up in enumerate(row.set_ups)
        ],
    }


def _draw(preset: str, steeper: float, seed: int, **sizes: int) -> tuple[RoutingTrace, ...]:
    """The steps of a trace."""
    low, high = PRESETS[preset].zipf
    skew = replace(PRESETS[preset], zipf=(steeper * low, steeper * high))
    trace = synthesize_preset(skew, num_steps=STEPS, seed=seed, **sizes)
    return tuple(trace.select(np.flatnonzero(trace.steps == step)) for step in range(STEPS))


def _cluster(set_up: SetUp) -> ClusterSpec:
    return load_cluster(
        set_up.cluster, ranks=set_up.ranks, slots_per_rank=set_up.slots, ranks_per_node=set_up.ranks_per_node
    )


def _case(set_up: SetUp, steps: Sequence[RoutingTrace], policies: Sequence[str]) -> Case:
    parts = [SequenceCounts.from_trace(step) for step in steps]
    case = ComparisonCase(
        cluster=_cluster(set_up),
        model=load_model(set_up.model),
        sequences=parts[-1],
        earlier=tuple(parts[:-1]),
        token_budget=budget_for([part.lengths for part in parts], set_up.ranks, set_up.micro_steps),
        equal_terms=set_up.equal_terms,
        traces=(steps[-1],),
    )
    return Case(case, {name: simulate_policy(case, name, VARIANTS.get(name)) for name in policies})
