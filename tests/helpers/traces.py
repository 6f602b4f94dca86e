"""Small random traces with every special case."""

from __future__ import annotations

import numpy as np

from trimtab import RoutingTrace
from trimtab.trace import no_route


def odd_trace(
    seed: int,
    *,
    sequences: int = 24,
    longest: int = 12,
    layers: int = 2,
    experts: int = 8,
    top_k: int = 2,
    steps: int = 2,
    unknown: float = 0.05,
) -> RoutingTrace:
    """Some sequences are empty, some tokens have no route in a layer, steps come in any order, some domains are ""."""
    rng = np.random.default_rng(seed)
    popular = rng.dirichlet(np.full(experts, 0.7), size=layers) + 1e-3
    ids = []
    for _ in range(sequences):
        length = int(rng.integers(0, longest + 1))
        chosen = np.empty((length, layers, top_k), np.int64)
        for token in range(length):
            for layer in range(layers):
                weights = popular[layer] / popular[layer].sum()
                chosen[token, layer] = rng.choice(experts, top_k, replace=False, p=weights)
                if rng.random() < unknown:
                    chosen[token, layer] = no_route(experts)
        ids.append(chosen)
    return RoutingTrace.from_sequences(
        ids,
        num_experts=experts,
        steps=rng.integers(0, steps, sequences),
        domains=np.array(["maths", "code", ""])[rng.integers(0, 3, sequences)],
        layer_indices=np.arange(layers) + 3,
        shape=(layers, top_k),
    )
