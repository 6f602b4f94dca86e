"""Synthetic routing: skewed or perfectly even, for benchmarks, and for trials without a recorded trace."""

from __future__ import annotations

import numpy as np

from trimtab.trace.routing import RoutingTrace, id_dtype


def synthesize(
    *,
    num_sequences: int,
    sequence_length: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    zipf: float,
    seed: int = 0,
) -> RoutingTrace:
    """A trace whose experts are drawn without replacement from a Zipf popularity, shuffled for every layer.

    Args:
        zipf: exponent of the popularity, rank**-zipf. Real models show 0.30 to 0.95. At 0 routing is not random but
            exactly even: over any `num_experts` tokens in a row each expert is used `top_k` times.
    """
    rng = np.random.default_rng(seed)
    # Sampled first, so the hot experts depend on the seed and not on the trace's length.
    experts_LE = np.stack([rng.permutation(num_experts) for _ in range(num_layers)])
    tokens = num_sequences * sequence_length
    ids_TLK = np.empty((tokens, num_layers, top_k), id_dtype(num_experts))
    for layer in range(num_layers):
        if zipf == 0:
            positions_TK = (np.arange(tokens)[:, None] * top_k + np.arange(top_k)) % num_experts
        else:
            # Gumbel top-k: the largest of log-popularity plus Gumbel noise is a draw without replacement.
            scores_TE = rng.gumbel(size=(tokens, num_experts)) - zipf * np.log(np.arange(1, num_experts + 1))
            positions_TK = np.argpartition(-scores_TE, top_k - 1, axis=1)[:, :top_k]
        ids_TLK[:, layer] = experts_LE[layer][positions_TK]
    return RoutingTrace.from_sequences(
        list(ids_TLK.reshape(num_sequences, sequence_length, num_layers, top_k)),
        num_experts=num_experts,
        model="synthetic",
    )
