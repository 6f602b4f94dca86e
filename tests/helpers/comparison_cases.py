"""A small trace of several steps, and cases of a comparison of balancers on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trimtab import ClusterSpec, RoutingTrace
from trimtab.cluster import ModelSpec
from trimtab.planner import SequenceCounts
from trimtab.simulator.comparison_case import ComparisonCase, step_of

MODEL = ModelSpec("small", num_experts=8, top_k=2, hidden_size=64, expert_width=32, moe_layers=2, vocab_size=100)


def some_trace(seed: int = 0, steps: tuple[int, ...] = (3, 3, 4, 4, 4, 7, 7), longer: int = 0) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    skew_LE = rng.gumbel(size=(2, 8))
    ids = [
        np.argsort(-rng.gumbel(size=(10 + s + longer, 2, 8)) - skew_LE, axis=-1)[:, :, :2] for s in range(len(steps))
    ]
    trace = RoutingTrace.from_sequences(ids, num_experts=8)
    return replace(trace, steps=np.array(steps, trace.steps.dtype))


def some_case(trace: RoutingTrace | None = None, **changes: Any) -> ComparisonCase:
    step, earlier = step_of(some_trace() if trace is None else trace, None)
    values: dict[str, Any] = {
        "cluster": ClusterSpec(4, 2, 1), "model": MODEL, "sequences": SequenceCounts.from_trace(step),
        "earlier": tuple(map(SequenceCounts.from_trace, earlier)), "token_budget": 20,
    }  # fmt: skip
    return ComparisonCase(**values | changes)
