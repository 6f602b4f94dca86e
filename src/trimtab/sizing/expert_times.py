"""`ExpertTimes`: seconds of the busiest expert rank, for micro-batches that are drawn from a trace.

A micro-batch of N tokens is one token of each of N sequences, neighbours in the trace, so that answers to one prompt
are decoded together; from a random position of their responses.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.planner.placement.serving_placement import PARTS, fill_slots
from trimtab.planner.plan.workload import max_over_mean
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts

# Draws of a micro-batch, and layers, evenly chosen, that stand for all.
DRAWS, MOST_LAYERS = 4, 8
Table = tuple[Array, Array]
"""Seconds of the busiest rank `[P, L]`, and max/mean of ranks' rows `[P]`, of P numbers of tokens; means over draws."""


class ExpertTimes:
    """Times of expert ranks by their number, their copies, and the tokens of a micro-batch.

    Args:
        trace: the step whose tokens are decoded.
        earlier: the step whose loads copies are placed by; the same step if it is the only one.
        most_tokens: of a micro-batch; times are computed for powers of the square root of 2 and interpolated.
    """

    def __init__(self, trace: RoutingTrace, earlier: RoutingTrace, most_tokens: int) -> None:
        layers = np.unique(np.linspace(0, trace.num_layers - 1, MOST_LAYERS).round().astype(np.int64))
        self._trace, self._layers = trace, layers
        parts_S = np.arange(earlier.num_sequences) * PARTS // max(1, earlier.num_sequences)
        self._earlier_MLE = count_experts(earlier, parts_S, PARTS, np.int64)[:, layers]
        steps = int(np.ceil(2 * np.log2(max(2, most_tokens)))) + 1
        self.tokens_P = np.unique(np.round(2 ** (np.arange(steps) / 2)).astype(np.int64))

    @cached_property
    def counts_PDLE(self) -> Array:
        """Rows of every expert in D draws of micro-batches of P sizes."""
        return np.stack([self._draw(int(tokens)) for tokens in self.tokens_P])

    def slots_LP(self, ranks: int, copies: int, ranks_per_node: int) -> Array:
        """The expert in each slot, `[L, P]`: in order without copies, as engines do, else as the earlier step needs."""
        experts = self._earlier_MLE.shape[2]
        if not copies:
            return np.tile(np.arange(experts), (len(self._layers), 1))
        node = ranks_per_node if ranks % ranks_per_node == 0 else ranks
        return fill_slots(self._earlier_MLE, experts + copies * ranks, ranks, node)

    def table(self, costs: OperationCosts, slots_LP: Array, ranks: int) -> Table:
        """Times of experts with these slots."""
        seconds_PL, uneven_P, layer_L1 = [], [], np.arange(len(slots_LP))[:, None]
        copies_LE = np.stack([np.bincount(slots_P, minlength=self.counts_PDLE.shape[3]) for slots_P in slots_LP])
        for counts_DLE in self.counts_PDLE:
            # Copies share their expert's rows equally.
            rows_DLS = (counts_DLE / copies_LE)[:, layer_L1, slots_LP]
            by_rank = (*rows_DLS.shape[:2], ranks, -1)
            seconds_PL.append(costs.copy_seconds(rows_DLS).reshape(by_rank).sum(axis=-1).max(axis=-1).mean(axis=0))
            uneven_P.append(max_over_mean(rows_DLS.reshape(by_rank).sum(axis=-1)).mean())
        return np.stack(seconds_PL), np.array(uneven_P)

    def _draw(self, tokens: int) -> Array:
        """`[D, L, E]` rows of every expert."""
        trace, rng = self._trace, np.random.default_rng(0)
        starts, lengths = trace.sequence_starts[:-1], np.diff(trace.sequence_starts)
        prompts = np.where(trace.prompt_lengths < lengths, trace.prompt_lengths, 0)
        used = np.flatnonzero(lengths)
        counts_DLE = np.zeros((DRAWS, len(self._layers), trace.num_experts), np.int64)
        for counts_LE in counts_DLE:
            sequences = used[(rng.integers(len(used)) + np.arange(tokens)) % len(used)]
            first, rows = prompts[sequences], lengths[sequences]
            places = starts[sequences] + first + (rng.random(tokens) * (rows - first)).astype(np.int64)
            for layer, counts_E in zip(self._layers, counts_LE, strict=True):
                ids = trace.expert_ids[places, layer].ravel()
                counts_E += np.bincount(ids[ids < trace.num_experts], minlength=trace.num_experts)
        return counts_DLE
