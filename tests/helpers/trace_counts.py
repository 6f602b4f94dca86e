"""`TraceCounts` for tests: from given counts, or random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.analysis import TraceCounts


def trace_counts_of(counts_MLE: Any, steps: Any = None, **changes: Any) -> TraceCounts:
    counts = np.asarray(counts_MLE, np.int32)
    tokens = int(counts[:, 0].sum())
    trace = TraceCounts(
        counts_FLE=counts, parts=1, step_M=np.zeros(len(counts), int) if steps is None else np.asarray(steps),
        counts_DLE=counts.sum(axis=0, dtype=np.int64)[None], domains=("",), layer_indices=np.arange(counts.shape[1]),
        token_budget=tokens, num_tokens=tokens, num_sequences=len(counts), unknown_routes=0,
        lengths=np.ones(tokens, np.int64), top_k=1, model="",
    )  # fmt: skip
    return replace(trace, **changes)


def random_counts(seed: int, micro_steps: int = 6, layers: int = 3, experts: int = 8) -> np.ndarray:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 40, (micro_steps, layers, experts)) ** 2
    counts[rng.random(counts.shape) < 0.2] = 0
    counts[rng.integers(micro_steps), rng.integers(layers)] = 0
    return counts
