"""`AttentionLayers`: attention, or what takes its place, in the layers of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from trimtab.array_type import Array

Kind = Literal["full", "window", "chunk", "sparse", "linear"]
# Kinds in which a query attends to `ModelSpec.reach` keys at most.
LIMITED = ("window", "chunk", "sparse")
# Operations for each value of a linear layer's state and each token: decay, update and read. Mamba-2 and lightning
# attention need five, the delta rule seven.
STATE_OPERATIONS = 6


@dataclass(frozen=True)
class AttentionLayers:
    """Attention blocks of one kind, all of the same size.

    Attributes:
        kind: `full`: a query attends to all tokens before it. `window`: to the last `reach` of them. `chunk`: to those
            in its own chunk of `reach` tokens. `sparse`: to the `reach` tokens that an indexer selects. `linear`:
            linear attention or a state-space layer (Mamba), which read a state instead.
        in_moe_layers, in_dense_layers: blocks in all decoder layers with experts, and in those without.
        parameters: weights of a block: projections, indexer, convolution.
        width: query heads * (key width + value width of a head); 0 if linear.
        index_width: sparse: heads of the indexer * their width.
        state: linear: values of the state, heads * key width * value width.
        cache_width: values of a token in the KV cache; 0 if linear or unknown.
        cache_heads: key and value heads, which tensor parallelism divides; 0 with latent attention, where all heads
            read the same values.
    """

    kind: Kind
    in_moe_layers: int
    in_dense_layers: int
    parameters: int
    width: int = 0
    index_width: int = 0
    state: int = 0
    cache_width: int = 0
    cache_heads: int = 0


class LayerAttention(NamedTuple):
    """Attention of one layer, as the mean of several layers.

    Attributes:
        parameters: weights; a token takes two operations for each.
        square_width: operations for each of the t * t pairs of a sequence of t tokens. The causal mask leaves half of
            the pairs, with two operations for each unit of width.
        reach_width: the same for each of the pairs within reach, see `pairs_within_reach`.
        state_operations: operations of a token on the state of linear layers.
    """

    parameters: float
    square_width: float
    reach_width: float
    state_operations: float


def mean_attention(blocks: Sequence[AttentionLayers], layers: int, *, moe: bool) -> LayerAttention:
    """Mean of all layers with experts, or of all without; zeros if there are no layers.

    Args:
        layers: decoder layers with experts if `moe`, else those without.
    """
    total = [0, 0, 0, 0]
    for block in blocks:
        number = block.in_moe_layers if moe else block.in_dense_layers
        square = block.width if block.kind == "full" else block.index_width
        limited = block.width if block.kind in LIMITED else 0
        values = (block.parameters, square, limited, STATE_OPERATIONS * block.state)
        total = [sum_ + number * value for sum_, value in zip(total, values, strict=True)]
    return LayerAttention(*(value / max(1, layers) for value in total))


def pairs_within_reach(lengths: Array, reach: int, *, chunked: bool) -> Array:
    """Twice the pairs of query and key within reach, by sequence, any shape, float64; t * t for t up to `reach`.

    Args:
        lengths: tokens of the sequences.
        reach: keys that a query attends to at most, or tokens of a chunk.
        chunked: queries attend inside their chunk.
    """
    lengths = np.asarray(lengths, np.float64)
    if chunked:
        return np.floor(lengths / reach) * reach**2 + np.square(lengths % reach)
    return np.square(lengths) - np.square(np.maximum(lengths - reach, 0.0))
