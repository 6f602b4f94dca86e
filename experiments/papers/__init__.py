"""`python -m experiments.papers`: what papers published, and what our simulator gives in set-ups like theirs.

Figures and set-ups are in `published.py`, how figures are computed in `measures.py`, and the tables in `page.py`.
Traces are synthetic: presets and seeds give a range for every figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np
from rich.progress import Progress

from experiments.papers.measures import Case
from experiments.papers.page import SCHEMA
from experiments.papers.published import VARIANTS, Row, SetUp
from trimtab.cluster import ClusterSpec, load_cluster, load_model
from trimtab.planner import SequenceCounts
from trimtab.simulator.comparison import ComparisonCase, budget_for, simulate_policy
from trimtab.trace import PRESETS, synthesize_preset

# Steps of a trace. The last is simulated; the others are history, and homes begin where the one before left them.
STEPS = 3


def run_benchmark(rows: Sequence[Row], presets: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """All figures of some rows, by set-up, preset and seed."""
    with Progress(transient=True) as progress:
        task = progress.add_task("papers", total=len(presets) * len(seeds) * sum(len(r.set_ups) for r in rows))
        return {
            "schema": SCHEMA,
            "steps": STEPS,
            "seeds": list(seeds),
            "rows": {row.name: _run_row(row, presets, seeds, lambda: progress.advance(task)) for row in rows},
        }


def _run_row(row: Row, presets: Sequence[str], seeds: Sequence[int], advance: Callable[[], None]) -> dict[str, Any]:
    start = time.perf_counter()
    values: dict[tuple[int, int], dict[str, list[float]]] = {
        (s, f): {preset: [] for preset in presets} for s in range(len(row.set_ups)) for f in range(len(row.figures))
    }
    for preset in presets:
        for seed in seeds:
            # Set-ups of one size share a trace.
            draw = lru_cache(_draw)
            for s, set_up in enumerate(row.set_ups):
                model = load_model(set_up.model)
                shape = (set_up.sequences, set_up.mean_length, set_up.longest, set_up.layers)
                parts = draw(preset, seed, *shape, model.num_experts, model.top_k)
                case = _case(set_up, parts, row.policies)
                for f, figure in enumerate(row.figures):
                    values[s, f][preset].append(round(figure.measure(case), 6))
                advance()
    return {
        "paper": row.paper,
        "policies": list(row.policies),
        "seconds": round(time.perf_counter() - start, 1),
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


def _draw(
    preset: str, seed: int, sequences: int, mean_length: int, longest: int, layers: int, num_experts: int, top_k: int
) -> tuple[SequenceCounts, ...]:
    """The steps of a trace, in their order."""
    trace = synthesize_preset(
        PRESETS[preset],
        num_sequences=sequences,
        mean_length=mean_length,
        max_length=longest,
        num_layers=layers,
        num_experts=num_experts,
        top_k=top_k,
        num_steps=STEPS,
        seed=seed,
    )
    counted = SequenceCounts.from_trace(trace)
    return tuple(counted.select(np.flatnonzero(trace.steps == step)) for step in range(STEPS))


def _cluster(set_up: SetUp) -> ClusterSpec:
    return load_cluster(
        set_up.cluster, ranks=set_up.ranks, slots_per_rank=set_up.slots, ranks_per_node=set_up.ranks_per_node
    )


def _case(set_up: SetUp, parts: Sequence[SequenceCounts], policies: Sequence[str]) -> Case:
    situation = ComparisonCase(
        cluster=_cluster(set_up),
        model=load_model(set_up.model),
        sequences=parts[-1],
        earlier=tuple(parts[:-1]),
        token_budget=budget_for(parts, set_up.ranks, set_up.micro_steps),
        equal_terms=set_up.equal_terms,
    )
    return Case(situation, {name: simulate_policy(situation, name, VARIANTS.get(name)) for name in policies})
