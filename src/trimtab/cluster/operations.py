"""`OperationCosts`: seconds of each operation of a training step on one rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.attention import pairs_within_reach
from trimtab.cluster.models import ModelSpec
from trimtab.cluster.parallel_layout import FSDP, SELECTIVE, ZERO1, Checkpointing, Layout
from trimtab.cluster.specs import ClusterSpec

# A replica's gradient, in float32.
GRADIENT_BYTES = 4
# Moving a home transfers the weights with their float32 master copy and two Adam moments.
STATE_BYTES = 12
# Reads and writes of values outside the matrix products. A token of a layer: two norms, two residual sums,
# query, key and value, rotary embedding. A row, as wide as a token and an expert together: into and out of the dispatch
# buffers, gate and up, activation, the weighted sum.
TOKEN_PASSES = 20
ROW_PASSES = 5
# The loss reads and writes float32 logits and their log-softmax.
LOGIT_BYTES = 12
# Selective recomputation reads and writes again: two norms of a token in token widths, the product of a row's gate and
# up in expert widths.
AGAIN_TOKEN_PASSES, AGAIN_ROW_PASSES = 4, 3
# Tensor parallelism with sequence parallelism gathers the tokens of a block's input and scatters its summed output.
TENSOR_PASSES = 2
# Adam reads gradient, master weight and two moments in float32, writes three of them and the weight.
OPTIMIZER_BYTES = 30

# Least and most part of the tokens that use a group, so that odds are finite.
LEAST_USED, MOST_USED = 1e-9, 0.98
# Seconds that are measured, and not scaled.
_MEASURED = ("near_state_s", "far_state_s")


class OperationCosts(NamedTuple):
    """Seconds of operations; forward, except where noted.

    Backward takes `dense_backward` or `expert_backward` times as long.

    Attributes:
        layer_s: a MoE layer's small operations, for any number of tokens.
        token_s: a token in the dense parts of a MoE layer: projections, shared experts, router, norms.
        square_s: attention over a sequence of t tokens, in one layer, for each of t * t. Mean of the MoE layers if they
            differ.
        reach_s: the same for each of the pairs within reach, where attention is limited (`pairs_within_reach`).
        outer_s: as `layer_s`, all dense layers together.
        outer_token_s: a token in all dense layers, embedding, output head and loss together.
        outer_square_s, outer_reach_s: as `square_s` and `reach_s`, all dense layers together.
        tile_rows: rows of a tile of a grouped matrix product.
        tile_s: a tile through one expert.
        copy_s: fixed time of a copy of an expert with rows.
        weights_s: reading one expert's weights, the least time of a copy with rows.
        row_s: a row outside the matrix products: gathered, activated, weighted.
        dispatch_s: fixed time of an all-to-all.
        near_row_s, far_row_s: a transfer of a row through a rank's all-to-all, inside the node or between nodes.
        forwards: see `ClusterSpec.dispatch_forwards`.
        top_k: rows of a token that share one transfer to a node, and one to a rank, where the dispatcher forwards; else
            1. How many do depends on where the rows go, see `rank_work`.
        expert_groups, groups_per_token: see `ModelSpec`.
        near_share, far_share: transfers of a row inside the node or between nodes, the mean with even routing.
        near_weights_s, far_weights_s, host_weights_s: one expert's weights over a rank's link inside the node, between
            nodes, or from host memory; 0 without such a link, which no plan uses.
        near_gradient_s, far_gradient_s: one expert's gradient in float32 over the same links.
        near_state_s, far_state_s: weights and optimizer state of one expert, for a home that moves.
        near_spare, far_spare: the part of a link's rate that an all-to-all leaves to other transfers.
        transfer_tax: see `ClusterSpec`.
        hop_row_s: a row copied to another rank of its node.
        optimizer_s: an optimizer step over this rank's share of the parameters.
        reduce_s: summing gradients, of dense parameters over all ranks and of experts over groups, and spreading their
            new weights, once an optimizer step.
        reach, chunked: keys that a query attends to at most, where attention is limited; inside a chunk of so many.
        pieces: ranks that share a sequence; lengths are those of a rank's piece, and `square_s` of its square.
        exchange_token_s, outer_exchange_token_s: tensor parallelism's exchange for a token in a MoE layer, and in
            everything outside them. Backward takes as long.
        ring_token_s: context parallelism's exchange of keys and values for a token in a MoE layer, beside attention.
            Backward takes twice as long.
        head_part: of `outer_token_s`, output head and loss.
        send_token_s: a token's activations to the next pipeline stage, without its share of layers in the trace.
    """

    layer_s: float
    token_s: float
    square_s: float
    outer_s: float
    outer_token_s: float
    outer_square_s: float
    tile_rows: int
    tile_s: float
    copy_s: float
    weights_s: float
    row_s: float
    dense_backward: float
    expert_backward: float
    dispatch_s: float
    near_row_s: float
    far_row_s: float
    forwards: bool
    near_weights_s: float
    far_weights_s: float
    host_weights_s: float
    near_gradient_s: float
    far_gradient_s: float
    near_state_s: float
    far_state_s: float
    near_spare: float
    far_spare: float
    transfer_tax: float
    hop_row_s: float
    optimizer_s: float
    reduce_s: float
    reach_s: float
    outer_reach_s: float
    reach: int
    chunked: bool
    top_k: int
    near_share: float
    far_share: float
    expert_groups: int
    groups_per_token: int
    pieces: int
    exchange_token_s: float
    outer_exchange_token_s: float
    ring_token_s: float
    head_part: float
    send_token_s: float

    @property
    def even_near_row_s(self) -> float:
        """`near_row_s` of a row with even routing."""
        return self.near_row_s * self.near_share

    @property
    def even_far_row_s(self) -> float:
        """`far_row_s` of a row with even routing."""
        return self.far_row_s * self.far_share

    def scaled(self, factor: float) -> OperationCosts:
        """All seconds but those of moves, times a factor."""
        changed = {
            name: value * factor
            for name, value in self._asdict().items()
            if name.endswith("_s") and name not in _MEASURED
        }
        return self._replace(**changed)

    @classmethod
    def of(
        cls,
        cluster: ClusterSpec,
        model: ModelSpec,
        *,
        moe_layers: int | None = None,
        groups: int = 1,
        sharding: str = ZERO1,
        checkpointing: Checkpointing = False,
        layout: Layout | None = None,
    ) -> OperationCosts:
        """Costs of a model on a cluster.

        Args:
            moe_layers: MoE layers that are simulated; all of the model's by default. Dense layers, head and optimizer
                count in proportion.
            groups: expert-parallel groups; the dense parameters' optimizer state is shared out over all their ranks.
            sharding: of training state, which moves with a home.
            checkpointing: selective recomputation takes longer in backward.
            layout: costs are those of all stages together.
        """
        layout = layout or Layout()
        tp, cp, pieces = layout.tp, layout.cp, layout.pieces
        part = 1.0 if moe_layers is None else moe_layers / model.moe_layers
        hidden = model.hidden_size
        attention, outer_attention = model.moe_attention, model.dense_attention
        dense_s, memory_s = 1 / cluster.dense_flops, 1 / cluster.memory_bytes_per_s
        passes_s = TOKEN_PASSES * hidden * model.weight_bytes * memory_s
        around_s, outer_around_s = (
            2 * mean.parameters * dense_s + mean.state_operations / cluster.attention_flops + passes_s
            for mean in (attention, outer_attention)
        )
        beside_experts_s = 2 * (model.shared_parameters + model.router_parameters) * dense_s
        feed_forward_s = 2 * model.feed_forward_matrices * hidden * model.dense_width * dense_s
        head_s = 2 * hidden * model.vocab_size * dense_s + LOGIT_BYTES * model.vocab_size * memory_s
        top_k = model.top_k if cluster.dispatch_forwards else 1
        # Each group that a token uses has one of its experts.
        of_experts = model.expert_groups, min(model.groups_per_token, model.top_k)
        row_bytes = model.row_width * model.weight_bytes
        parameters = model.expert_parameters
        state_bytes = moved_bytes(model, sharding, groups)
        gradient_bytes = GRADIENT_BYTES * parameters
        near, far, host = cluster.node_bytes_per_s, cluster.network_bytes_per_s, cluster.host_bytes_per_s
        ranks = cluster.ranks * groups
        dense_parameters = part * model.dense_parameters
        expert_parameters = part * model.moe_layers * model.num_experts * parameters / cluster.ranks
        # Dense parameters are on all ranks, those that share tensors have parts of them; experts once in every group.
        holders = ranks / tp
        summed = dense_parameters / tp * (holders - 1) / holders + expert_parameters * (groups - 1) / groups
        token_bytes = hidden * model.weight_bytes

        def link(ranks: int) -> float:
            """Of so many neighbouring ranks."""
            return (far if ranks > cluster.ranks_per_node else near) or host

        # Each rank receives the tokens of the others, or sends them sums.
        tensor_s = TENSOR_PASSES * (tp - 1) * token_bytes / link(tp)
        key_value_bytes = model.key_value_width * model.weight_bytes
        row_s = ROW_PASSES * (model.row_width + model.expert_width) * model.weight_bytes * memory_s
        token_s = around_s + beside_experts_s
        again_token_s = again_row_s = 0.0
        if checkpointing == SELECTIVE:
            widths = AGAIN_TOKEN_PASSES * hidden + AGAIN_ROW_PASSES * model.shared_width
            again_token_s = widths * model.weight_bytes * memory_s
            again_row_s = AGAIN_ROW_PASSES * model.expert_width * model.weight_bytes * memory_s
        outer_token_s = part * (model.dense_layers * (outer_around_s + feed_forward_s) + head_s)
        return cls(
            layer_s=cluster.layer_s,
            token_s=token_s,
            square_s=pieces * attention.square_width / cluster.attention_flops,
            outer_s=part * model.dense_layers * cluster.layer_s,
            outer_token_s=outer_token_s,
            outer_square_s=pieces * part * model.dense_layers * outer_attention.square_width / cluster.attention_flops,
            tile_rows=cluster.tile_rows,
            tile_s=cluster.tile_rows * 2 * parameters / cluster.expert_flops,
            copy_s=cluster.copy_s,
            weights_s=model.expert_bytes * memory_s,
            row_s=row_s,
            dense_backward=cluster.dense_backward + again_token_s / token_s,
            expert_backward=cluster.expert_backward + again_row_s / (2 * parameters / cluster.expert_flops + row_s),
            dispatch_s=cluster.dispatch_s,
            near_row_s=row_bytes / cluster.dispatch_node_bytes_per_s,
            far_row_s=row_bytes / cluster.dispatch_network_bytes_per_s,
            forwards=cluster.dispatch_forwards,
            near_weights_s=_seconds(model.expert_bytes, near),
            far_weights_s=_seconds(model.expert_bytes, far),
            host_weights_s=_seconds(model.expert_bytes, host),
            near_gradient_s=_seconds(gradient_bytes, near or host),
            far_gradient_s=_seconds(gradient_bytes, far or host),
            near_state_s=_seconds(state_bytes, near or host),
            far_state_s=_seconds(state_bytes, far or host),
            near_spare=_spare(cluster.dispatch_node_bytes_per_s, near),
            far_spare=_spare(cluster.dispatch_network_bytes_per_s, far),
            transfer_tax=cluster.transfer_tax,
            hop_row_s=_seconds(row_bytes, near or host),
            optimizer_s=OPTIMIZER_BYTES * (expert_parameters + dense_parameters / ranks) * memory_s,
            reduce_s=(GRADIENT_BYTES + model.weight_bytes) * summed / link(ranks),
            reach_s=attention.reach_width / cluster.attention_flops,
            outer_reach_s=part * model.dense_layers * outer_attention.reach_width / cluster.attention_flops,
            reach=model.reach,
            chunked=model.chunked,
            top_k=top_k,
            near_share=even_share(cluster.ranks, top_k, model.num_experts, *of_experts),
            far_share=even_share(cluster.nodes, top_k, model.num_experts, *of_experts),
            expert_groups=of_experts[0],
            groups_per_token=of_experts[1],
            pieces=pieces,
            # Attention, and shared experts; in dense layers attention and feed-forward part, then the output head.
            exchange_token_s=tensor_s * (1 + (model.shared_width > 0)),
            outer_exchange_token_s=part * tensor_s * (2 * model.dense_layers + bool(model.vocab_size)),
            ring_token_s=(cp - 1) * key_value_bytes / link(pieces),
            head_part=part * head_s / outer_token_s if outer_token_s else 0.0,
            send_token_s=token_bytes / link(ranks * layout.pp) if layout.pp > 1 else 0.0,
        )

    def pairs_within_reach(self, lengths: Array) -> Array:
        """Pairs that `reach_s` prices, by sequence; zeros if no layer's attention is limited."""
        if not self.reach:
            return np.zeros(lengths.shape)
        return pairs_within_reach(lengths * self.pieces, self.reach, chunked=self.chunked) / self.pieces

    def copy_seconds(self, rows: Array) -> Array:
        """Forward seconds of copies of experts with these rows each, any shape."""
        tiles = -(-rows // self.tile_rows)
        seconds = self.copy_s + np.maximum(tiles * self.tile_s, self.weights_s) + rows * self.row_s
        return np.where(rows > 0, seconds, 0.0)

    def transfers(self, rows_XE: Array, places: int) -> Array:
        """Transfers `[..., P]` float64 to P places with contiguous homes, see `transfers_to`."""
        return transfers_to(rows_XE, places, self.top_k, self.expert_groups, self.groups_per_token)


def moved_bytes(model: ModelSpec, sharding: str = ZERO1, groups: int = 1) -> float:
    """Bytes that a rank sends for each home that moves: weights and optimizer state, or its shard of them.

    Args:
        groups: expert-parallel groups, which move the same homes and share out what is sharded.
    """
    state_bytes = STATE_BYTES * model.expert_parameters
    if sharding == FSDP:
        # The float32 weights are the master copy.
        return state_bytes / groups
    return model.expert_bytes + (state_bytes / groups if sharding == ZERO1 else state_bytes)


def _seconds(size: float, bytes_per_s: float) -> float:
    return size / bytes_per_s if bytes_per_s else 0.0


def _spare(used: float, bytes_per_s: float) -> float:
    return max(0.0, 1 - used / bytes_per_s) if bytes_per_s else 0.0


def transfers_to(rows_XE: Array, places: int, top_k: int, groups: int = 1, chosen: int = 1) -> Array:
    """Transfers `[..., P]` float64 to P places, each with the experts of E / P neighbouring ids.

    A token is sent to a place once, whatever number of its experts is there.

    `rank_work` estimates the same in a kernel, for any homes; `token_replay` counts, where every token is known.

    If the router doesn't limit a token's experts to groups, those of a token are taken as independent, see `rank_work`.

    Args:
        rows_XE: `[..., E]` rows of every expert, with all experts of their tokens.
        places: P, which divides E.
        top_k: rows of a token; 1 if none share a transfer.
        groups, chosen: of experts, and how many of them a token's experts are in.
    """
    rows_XPC = rows_XE.reshape(*rows_XE.shape[:-1], places, -1)
    if top_k == 1:
        return np.asarray(rows_XPC.sum(axis=-1, dtype=np.float64))
    tokens_X1 = np.maximum(rows_XE.sum(axis=-1, keepdims=True) / top_k, 1.0)
    if groups > 1:
        place_E = np.arange(rows_XE.shape[-1]) * places // rows_XE.shape[-1]
        rows_XPE = rows_XE[..., None, :] * (np.arange(places)[:, None] == place_E)
        rows_XPG = rows_XPE.reshape(*rows_XPE.shape[:-1], groups, -1).sum(axis=-1, dtype=np.float64)
        return np.asarray(tokens_X1 * _used(rows_XPG, top_k, chosen))
    without = np.prod(1 - np.minimum(1, rows_XPC / tokens_X1[..., None]), axis=-1)
    power = np.maximum(0, 1 - rows_XPC.sum(axis=-1) / (tokens_X1 * top_k)) ** top_k
    return np.asarray(tokens_X1 * (1 - np.minimum(without, power)))


def even_share(places: int, top_k: int, num_experts: int, groups: int = 1, chosen: int = 1) -> float:
    """Transfers of a row with even routing and neighbouring ids at a place, on average."""
    if top_k == 1:
        return 1.0
    if groups > 1 and num_experts % places == 0:
        # Any number of tokens.
        rows_E = np.full(num_experts, 1e6 * top_k / num_experts)
        return float(transfers_to(rows_E, places, top_k, groups, chosen).sum() / (1e6 * top_k))
    without = (1 - top_k / num_experts) ** (num_experts / places)
    return places * (1 - min(without, (1 - 1 / places) ** top_k)) / top_k


def _used(rows_XPG: Array, top_k: int, chosen: int) -> Array:
    """Part of the tokens `[..., P]` that have an expert at a place, for rows by place and group.

    A token chooses groups, the more popular ones more often. It has one row in each of them, and its others are spread
    over them independently. The chance that no row is at the place is a ratio of elementary symmetric polynomials of
    the groups' odds; exact for groups of equal popularity that are at one place each.
    """
    rows_X1G = rows_XPG.sum(axis=-2, keepdims=True)
    share_X1G = rows_X1G / np.maximum(rows_X1G.sum(axis=-1, keepdims=True), 1.0)
    chosen_X1G = np.clip(chosen * share_X1G, LEAST_USED, MOST_USED)
    odds_X1G = chosen_X1G / (1 - chosen_X1G)
    at_place_XPG = rows_XPG / np.maximum(rows_X1G, 1.0)
    others = max(1, top_k - chosen)
    others_X1G = np.maximum(0, top_k * share_X1G / chosen_X1G - 1) / others
    missed_XPG = odds_X1G * (1 - at_place_XPG) * np.maximum(0, 1 - at_place_XPG * others_X1G) ** others
    return np.asarray(1 - _symmetric(missed_XPG, chosen) / _symmetric(odds_X1G, chosen))


def _symmetric(values: Array, degree: int) -> Array:
    """The sum, along the last axis, of the products of `degree` of the values."""
    sums = [np.ones(values.shape[:-1])] + [np.zeros(values.shape[:-1]) for _ in range(degree)]
    for value in np.moveaxis(values, -1, 0):
        for size in range(degree, 0, -1):
            sums[size] = sums[size] + value * sums[size - 1]
    return sums[degree]
