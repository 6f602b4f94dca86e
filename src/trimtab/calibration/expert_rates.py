"""How fast are a rank's experts? The runtime's own layer, forward and backward, with nobody to exchange rows with."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trimtab.calibration.fits import Fit, GroupedTiming, fit_grouped
from trimtab.calibration.random_experts import random_experts
from trimtab.calibration.site import Site
from trimtab.calibration.timed_work import row_bytes, row_flops
from trimtab.planner import pack_by_length
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.rows.exchange import exchange_rows
from trimtab.trace import RoutingTrace

# Parts of a balanced rank's rows, and of its experts that they go to.
LOADS = ((1.4, 1.0), (1.02, 1.0), (0.5, 1.0), (0.25, 1.0), (1 / 16, 1.0), (1.02, 0.5), (0.25, 0.5))
# A grouped kernel on CUDA works in tiles of one of these; rows that fill them well and badly tell which.
TILES = (1, 16, 32, 64, 128, 256)
ROWS_OF_A_COPY = (32, 64, 96, 128, 160, 192, 256, 288, 384)
# The fewest ranks of a group for which a GPU's share of the experts is measured, also where there are fewer.
CUDA_RANKS = 8
# Exchanges of rows in a forward; there are as many in a backward.
EXCHANGES = 2


@dataclass(frozen=True)
class ExpertFigures:
    """What experts cost.

    Attributes:
        fit: `rates[0]` operations a second; `fixed_s` of a copy and of a layer.
        tile_rows: rows of a tile.
        backward: time of backward over that of forward.
    """

    fit: Fit
    tile_rows: int
    backward: float


def measure_experts(site: Site, memory_bytes_per_s: float) -> ExpertFigures:
    """Time the expert half of a layer with several numbers of rows and of experts that have any. Collective."""
    model, on_cuda = site.model, site.device.type == "cuda"
    ranks = max(site.topology.num_ranks, CUDA_RANKS if on_cuda else 1)
    experts = max(model.num_experts // ranks, model.top_k)
    even = site.tokens * model.top_k / experts
    loads = [(part * even / copies, max(model.top_k, round(copies * experts))) for part, copies in LOADS]
    if on_cuda:
        loads += [(float(rows), experts) for rows in ROWS_OF_A_COPY]
    session = Session(num_experts=experts, group=site.alone, slots_per_rank=0, mode="static")
    layer_experts = [torch.nn.Parameter(stack) for stack in random_experts(model, experts, site.dtype, site.device)]
    session.add_layer(layer_experts, gated_experts())
    points = {f"{rows:.0f} rows to {copies}": _route(rows, copies, experts, model.top_k) for rows, copies in loads}
    taken = site.medians({name: _variant(site, session, trace) for name, trace in points.items()})
    session.close()
    rows = {name: np.bincount(trace.expert_ids.reshape(-1), minlength=experts) for name, trace in points.items()}
    timings = [GroupedTiming(tuple(rows[name].tolist()), figures["forward_s"]) for name, figures in taken.items()]
    fits = {
        tile: fit_grouped(
            timings,
            row_flops=row_flops(model),
            row_memory_s=row_bytes(model) / memory_bytes_per_s,
            weights_s=model.expert_bytes / memory_bytes_per_s,
            tile_rows=tile,
        )
        for tile in (TILES if on_cuda else (1,))
    }
    tile = min(fits, key=lambda size: fits[size].error)
    # Of the loads that steps have: backward of a few rows is mostly gradients of weights.
    usual = [figures for figures, (part, _) in zip(taken.values(), LOADS, strict=False) if part > 0.1]
    backward = statistics.median(figures["backward_s"] / figures["forward_s"] for figures in usual)
    return ExpertFigures(fits[tile], tile, backward)


def _route(rows: float, copies: int, experts: int, top_k: int) -> RoutingTrace:
    """As many tokens as bring about `rows` to each of the first `copies` experts, `top_k` of them each."""
    tokens = max(1, round(rows * copies / top_k))
    ids = np.arange(tokens * top_k).reshape(tokens, 1, top_k) % copies
    return RoutingTrace.from_sequences([ids], num_experts=experts)


def _variant(site: Site, session: Session, trace: RoutingTrace) -> Callable[[], dict[str, float]]:
    (layer,) = session.layers
    schedule = pack_by_length(trace.sequence_lengths, num_ranks=1, token_budget=trace.num_tokens)
    hidden, gradient = (site.random(trace.num_tokens, site.model.hidden_size) for _ in range(2))
    live_ids = torch.zeros(trace.num_tokens, trace.top_k, dtype=torch.int64, device=site.device)
    weights = torch.rand(live_ids.shape, dtype=site.dtype, device=site.device).softmax(dim=-1)
    rows = site.random(trace.num_tokens * trace.top_k, site.model.hidden_size)
    hidden.requires_grad_()
    weights.requires_grad_()

    def run() -> dict[str, float]:
        for leaf in (hidden, weights, *layer.parameters):
            leaf.grad = None
        session.plan(trace, schedule)
        start = site.begin()
        with session.micro_step(0):
            output = layer(hidden, layer.route(live_ids), weights)
            middle = site.clock.now()
            output.backward(gradient)
            end = site.clock.now()
            # What belongs to the all-to-all, which has figures of its own.
            for _ in range(EXCHANGES):
                exchange_rows(rows, [len(rows)], [len(rows)], site.alone)
            exchanged = site.clock.now()
        aside_s = site.clock.seconds(end, exchanged)
        return {
            "forward_s": site.clock.seconds(start, middle) - aside_s,
            "backward_s": site.clock.seconds(middle, end) - aside_s,
        }

    return run
