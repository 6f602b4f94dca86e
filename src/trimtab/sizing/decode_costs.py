"""`DecodeCosts`: seconds and bytes of decoding one token of every sequence, on ranks of one kind.

A product with few tokens reads its weights for longer than it computes; it takes the longer of both (roofline), as does
attention over its cache. Sizes of caches: grouped heads (arXiv 2305.13245), latent vectors with absorbed projections
(DeepSeek-V2, arXiv 2405.04434). Rates and fixed times are those of the cluster's file, each with its source there; what
is read and written beside products is that of training's forward (`trimtab.cluster.operations`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import AttentionLayers, ClusterSpec, ModelSpec
from trimtab.cluster.attention import LIMITED, STATE_OPERATIONS
from trimtab.cluster.operations import LOGIT_BYTES, TENSOR_PASSES, TOKEN_PASSES, OperationCosts, even_share

# vLLM's long-time default of gpu_memory_utilization; the rest is for activations, graphs and the CUDA context.
MEMORY_PART = 0.9
# Rows of a tile where experts have few: the block of vLLM's Triton kernel for up to as many tokens as experts.
TILE_ROWS = 16
Values = Any
"""A number, or an array of any shape."""


@dataclass(frozen=True)
class DecodeCosts:
    """Costs of a model's decode on a kind of rank.

    Attributes:
        cluster: rates of the rank, its memory and its links.
        model: its sizes.
        context: tokens in the KV cache of a sequence, the mean.
    """

    cluster: ClusterSpec
    model: ModelSpec
    context: float

    def attention_s(self, sequences: Values, tp: int) -> Values:
        """Seconds of a MoE layer outside its routed experts: attention, shared experts, router, norms.

        Args:
            sequences: of a group of `tp` ranks, any shape.
        """
        model = self.model
        beside = self._product_s(model.shared_parameters + model.router_parameters, sequences, tp)
        exchanges = 1 + (model.shared_width > 0)
        return self._block_s(sequences, tp, exchanges, moe=True) + beside

    def outer_s(self, sequences: Values, tp: int) -> Values:
        """Seconds of all dense layers, output head and sampling; `sequences` as in `attention_s`."""
        model, memory = self.model, self.cluster.memory_bytes_per_s
        feed_forward = model.feed_forward_matrices * model.hidden_size * model.dense_width
        dense = self._block_s(sequences, tp, 2, moe=False) + self._product_s(feed_forward, sequences, tp)
        head = self._product_s(model.vocab_size * model.hidden_size, sequences, tp)
        return model.dense_layers * dense + head + sequences * LOGIT_BYTES * model.vocab_size / tp / memory

    def _block_s(self, sequences: Values, tp: int, exchanges: int, *, moe: bool) -> Values:
        """Attention of a layer, the mean of those with or without experts, and the exchanges of tensor parallelism."""
        model, cluster, wide = self.model, self.cluster, self.model.weight_bytes
        layers = max(1, model.moe_layers if moe else model.dense_layers)
        seconds = cluster.layer_s + sequences * TOKEN_PASSES * model.hidden_size * wide / cluster.memory_bytes_per_s
        for block in model.attention_blocks:
            part = (block.in_moe_layers if moe else block.in_dense_layers) / layers
            # A linear layer writes its state, too.
            times = 2 if block.kind == "linear" else 1
            values = sequences * times * self._cached(block, self._reach(block)) / self._shards(block, tp)
            read = values * wide / cluster.memory_bytes_per_s
            computed = sequences * self._query_s(block) / tp
            products = self._product_s(block.parameters, sequences, tp)
            seconds = seconds + part * (products + np.maximum(read, computed))
        if tp > 1:
            token_bytes = TENSOR_PASSES * (tp - 1) / tp * model.hidden_size * wide
            link = cluster.node_bytes_per_s or cluster.host_bytes_per_s
            seconds = seconds + exchanges * (cluster.dispatch_s + sequences * token_bytes / link)
        return seconds

    def _product_s(self, parameters: float, tokens: Values, tp: int) -> Values:
        """Tokens through weights that `tp` ranks share: the longer of reading them and of computing."""
        read = parameters * self.model.weight_bytes / tp / self.cluster.memory_bytes_per_s
        computed = 2 * parameters / tp * tokens / self.cluster.dense_flops
        return np.maximum(read, computed)

    def _reach(self, block: AttentionLayers) -> float:
        return min(self.context, self.model.reach) if block.kind in LIMITED else self.context

    def _cached(self, block: AttentionLayers, tokens: float) -> float:
        """Values in the cache of so many tokens of a sequence, in one layer. Index keys of `sparse` don't count."""
        return block.state if block.kind == "linear" else (block.cache_width or self.model.key_value_width) * tokens

    def _query_s(self, block: AttentionLayers) -> float:
        """Computing a query on one rank. With latent attention all heads multiply the latent vectors in place of keys
        and of values, at the rate of dense products (FlashMLA: 660 TFLOP/s on H800, 120 to 130 on H20)."""
        cluster, heads = self.cluster, self.model.attention_heads
        if block.kind == "linear":
            return STATE_OPERATIONS * block.state / cluster.attention_flops
        is_latent = block.cache_width and not block.cache_heads
        width = 2 * heads * block.cache_width if is_latent else block.width
        rate = cluster.dense_flops if is_latent else cluster.attention_flops
        return 2 * (width * self._reach(block) + block.index_width * self.context) / rate

    def _shards(self, block: AttentionLayers, tp: int) -> int:
        """Ranks that share out the cache: each has whole heads; all have a latent vector."""
        return tp if block.kind == "linear" else min(tp, block.cache_heads or 1)

    def attention_bytes(self, sequences: Values, tp: int) -> Values:
        """Weights outside the routed experts, and KV cache, of a rank.

        Args:
            sequences: of a group of `tp` ranks, in all its micro-batches.
        """
        wide, cache = self.model.weight_bytes, 0.0
        for block in self.model.attention_blocks:
            values = self._cached(block, self.context if block.kind == "sparse" else self._reach(block))
            cache += (block.in_moe_layers + block.in_dense_layers) * values / self._shards(block, tp)
        return wide * (math.ceil(self.model.dense_parameters / tp) + sequences * cache)

    def expert_costs(self) -> OperationCosts:
        """Of routed experts: training's forward in smaller tiles."""
        tile_rows = min(self.cluster.tile_rows, TILE_ROWS)
        return OperationCosts.of(replace(self.cluster, tile_rows=tile_rows), self.model)

    def expert_bytes(self, slots: int) -> int:
        """Weights of the experts and copies of a rank, `slots` in each layer."""
        return slots * self.model.moe_layers * self.model.expert_bytes

    @property
    def usable_bytes(self) -> float:
        """Memory of a rank for weights and KV cache."""
        return MEMORY_PART * self.cluster.device_bytes


def exchange_s(attention: DecodeCosts, experts: DecodeCosts, tokens: Array, senders: int, receivers: int) -> Array:
    """Seconds `[...]` of sending the tokens of a micro-batch to the ranks of their experts; the sums take as long.

    A dispatcher that forwards sends a token once to a node, and there once to each rank; else every row is sent. The
    ranks with the fewest of their kind share the whole load.

    Args:
        tokens: `[...]` of all senders.
        receivers: expert ranks; 0: the senders themselves (colocated), where tokens of the own rank or node stay.
    """
    cluster, other, model = attention.cluster, experts.cluster, attention.model
    colocated, ranks = not receivers, receivers or senders
    per_node = min(other.ranks_per_node, ranks)
    is_one_node = cluster.name == other.name and senders + receivers <= cluster.ranks_per_node
    nodes = 1 if is_one_node else math.ceil(ranks / per_node)

    def sent(places: int) -> float:
        """Transfers of a token to places."""
        top_k = model.top_k if cluster.dispatch_forwards else 1
        groups = model.expert_groups, min(model.groups_per_token, model.top_k)
        return model.top_k * even_share(places, top_k, model.num_experts, *groups)

    far = 0.0 if is_one_node else sent(nodes) * (1 - colocated / nodes)
    near = sent(ranks)
    if colocated:
        near *= (per_node - 1) / ranks if nodes == 1 else 1 - 1 / per_node
    elif not is_one_node:
        near *= (1 - 1 / per_node) if cluster.dispatch_forwards else 0.0
    row = tokens * model.row_width * model.weight_bytes
    far_rate = min(senders * cluster.dispatch_network_bytes_per_s, ranks * other.dispatch_network_bytes_per_s)
    near_ranks = min(senders, ranks) if is_one_node else ranks
    near_s = near / (near_ranks * other.dispatch_node_bytes_per_s)
    return max(cluster.dispatch_s, other.dispatch_s) + row * (far / far_rate + near_s)
