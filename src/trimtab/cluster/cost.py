"""`CostModel`: seconds of rows, replicas and moves, which planning minimises. A short form of a step's time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.attention import pairs_within_reach
from trimtab.cluster.models import ModelSpec
from trimtab.cluster.specs import ClusterSpec

# Passes over a routed row: forward once for recompute, forward and backward (twice a forward) for update.
FORWARDS_PER_STEP = 4
# A row crosses the network to its expert and back in recompute, forward and backward.
CROSSINGS_PER_STEP = 6
# A replica's weights are fetched for recompute, forward and backward; its gradient is sent once, in float32.
FETCHES_PER_STEP = 3
GRADIENT_BYTES = 4
# Moving a home transfers the weights with their float32 master copy and two Adam moments.
STATE_BYTES = 12


@dataclass(frozen=True)
class CostModel:
    """Seconds that one unit costs.

    Attributes:
        row_s: one routed row, through one expert, on the rank that computes it.
        near_replica_s, far_replica_s: one replica, over the links inside a node or between nodes.
        far_row_s: one row that an expert on another node computes. Rows of a token to the same node share a transfer;
            their number is that of even routing.
        near_move_s, far_move_s: moving the home of one expert of one layer, inside a node or between nodes.
        attention_token_rows, attention_square_rows, attention_reach_rows: a sequence of t tokens costs its rank as much
            in attention and other dense parts of a MoE layer as so many rows do, by operations: for each token, each of
            t * t pairs, and each pair within reach (`pairs_within_reach`).
        reach, chunked: see `ModelSpec`.
    """

    row_s: float
    near_replica_s: float
    far_replica_s: float
    far_row_s: float
    near_move_s: float
    far_move_s: float
    attention_token_rows: float
    attention_square_rows: float
    attention_reach_rows: float = 0.0
    reach: int = 0
    chunked: bool = False

    @classmethod
    def of(cls, cluster: ClusterSpec, model: ModelSpec) -> CostModel:
        """Returns the costs of a model on a cluster, without any overlap."""
        parameters = model.expert_parameters
        attention = model.moe_attention
        nodes = cluster.nodes
        rows_far = model.top_k * (nodes - 1) / nodes
        # A token goes once to a node, however many of its experts are there.
        nodes_far = (nodes - 1) * (1 - (1 - 1 / nodes) ** model.top_k)
        row_bytes = model.row_width * model.weight_bytes * (nodes_far / rows_far if nodes > 1 else 1.0)
        replica_bytes = FETCHES_PER_STEP * model.expert_bytes + GRADIENT_BYTES * parameters
        state_bytes = model.expert_bytes + STATE_BYTES * parameters
        # Without links between ranks, all transfers use host memory.
        near_bytes_per_s = cluster.node_bytes_per_s or cluster.host_bytes_per_s
        far_bytes_per_s = cluster.network_bytes_per_s or cluster.host_bytes_per_s
        return cls(
            row_s=FORWARDS_PER_STEP * 2 * parameters / cluster.expert_flops,
            near_replica_s=replica_bytes / near_bytes_per_s,
            far_replica_s=replica_bytes / far_bytes_per_s,
            far_row_s=CROSSINGS_PER_STEP * row_bytes / far_bytes_per_s,
            near_move_s=state_bytes / near_bytes_per_s,
            far_move_s=state_bytes / far_bytes_per_s,
            # Projections and shared experts per token; a query attends to half of the sequence on average.
            attention_token_rows=(attention.parameters + model.shared_parameters + attention.state_operations / 2)
            / parameters,
            attention_square_rows=attention.square_width / (2 * parameters),
            attention_reach_rows=attention.reach_width / (2 * parameters),
            reach=model.reach,
            chunked=model.chunked,
        )

    def attention_rows(self, lengths: Array) -> Array:
        """Rows that cost as much as attention and other dense parts of a MoE layer, by sequence, float64.

        Args:
            lengths: tokens of the sequences, any shape.
        """
        lengths = lengths.astype(np.float64)
        rows = lengths * (self.attention_token_rows + self.attention_square_rows * lengths)
        if self.reach:
            rows = rows + self.attention_reach_rows * pairs_within_reach(lengths, self.reach, chunked=self.chunked)
        return rows
