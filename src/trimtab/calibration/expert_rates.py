"""Rates of a rank's experts, measured on the runtime's layer without communication, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trimtab.calibration.fits import Fit, GroupedTiming, fit_grouped, fit_ratio
from trimtab.calibration.measurement_context import MeasurementContext
from trimtab.calibration.operation_counts import row_bytes, row_flops
from trimtab.calibration.random_experts import add_random_layer, random_inputs
from trimtab.planner import pack_by_length
from trimtab.runtime import ExpertLayer, Session
from trimtab.runtime.rows.exchange import exchange_rows
from trimtab.trace import RoutingTrace

# (fraction of a balanced rank's rows, fraction of its experts that they go to).
LOADS = ((1.4, 1.0), (1.02, 1.0), (0.5, 1.0), (0.25, 1.0), (1 / 16, 1.0), (1.02, 0.5), (0.25, 0.5))
# Candidates for the tile size of a grouped CUDA kernel. Row counts that fill tiles differently identify it.
TILES = (1, 16, 32, 64, 128, 256)
ROWS_OF_A_COPY = (32, 64, 96, 128, 160, 192, 256, 288, 384)
# A GPU is measured with the experts per rank of a group of at least this size.
CUDA_RANKS = 8
# Exchanges of rows in a forward, and as many in a backward.
EXCHANGES = 2


@dataclass(frozen=True)
class ExpertFit:
    """Cost of experts.

    Attributes:
        fit: `rates[0]` operations per second; `fixed_s` seconds per copy of an expert with rows, and per layer.
        tile_rows: rows of a tile of the grouped product; None on a CPU, whose products have no tiles.
        backward: time of backward divided by time of forward.
        backward_error: relative error of that ratio over the loads.
    """

    fit: Fit
    tile_rows: int | None
    backward: float
    backward_error: float


def measure_experts(context: MeasurementContext, memory_bytes_per_s: float) -> ExpertFit:
    """Time the expert part of a layer with several numbers of rows, and of experts that have rows. Collective."""
    model, on_cuda = context.model, context.device.type == "cuda"
    ranks = max(context.topology.num_ranks, CUDA_RANKS if on_cuda else 1)
    experts = max(model.num_experts // ranks, model.top_k)
    even = context.tokens * model.top_k / experts
    loads = [(fraction * even / copies, max(model.top_k, round(copies * experts))) for fraction, copies in LOADS]
    if on_cuda:
        loads += [(float(rows), experts) for rows in ROWS_OF_A_COPY]
    session = Session(num_experts=experts, group=context.alone, slots_per_rank=0, mode="static")
    layer = add_random_layer(session, model, context.dtype, context.device)
    points = {f"{rows:.0f} rows to {copies}": _route(rows, copies, experts, model.top_k) for rows, copies in loads}
    taken = context.medians({name: _variant(context, session, layer, trace) for name, trace in points.items()})
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
    # Only loads that occur in steps: with few rows, backward is mostly gradients of weights.
    usual = [figures for figures, (fraction, _) in zip(taken.values(), LOADS, strict=False) if fraction > 0.1]
    forward_s = np.array([figures["forward_s"] for figures in usual])
    backward_s = np.array([figures["backward_s"] for figures in usual])
    return ExpertFit(fits[tile], tile if on_cuda else None, *fit_ratio(backward_s, forward_s))


def _route(rows: float, copies: int, experts: int, top_k: int) -> RoutingTrace:
    """Routing that sends about `rows` rows to each of the first `copies` experts."""
    tokens = max(1, round(rows * copies / top_k))
    ids = np.arange(tokens * top_k).reshape(tokens, 1, top_k) % copies
    return RoutingTrace.from_sequences([ids], num_experts=experts)


def _variant(
    context: MeasurementContext, session: Session, layer: ExpertLayer, trace: RoutingTrace
) -> Callable[[], dict[str, float]]:
    schedule = pack_by_length(trace.sequence_lengths, num_ranks=1, token_budget=trace.num_tokens)
    hidden, live_ids, weights, gradient = random_inputs(trace, context.model, context.dtype, context.device)
    rows = context.random(trace.num_tokens * trace.top_k, context.model.hidden_size)
    weights.requires_grad_()

    def run() -> dict[str, float]:
        for leaf in (hidden, weights, *layer.parameters):
            leaf.grad = None
        session.plan(trace, schedule)
        start = context.begin()
        with session.micro_step(0):
            output = layer(hidden, layer.route(live_ids), weights)
            middle = context.clock.now()
            output.backward(gradient)
            end = context.clock.now()
            # The exchanges are subtracted: the all-to-all is measured on its own.
            for _ in range(EXCHANGES):
                exchange_rows(rows, [len(rows)], [len(rows)], context.alone)
            exchanged = context.clock.now()
        exchange_s = context.clock.seconds(end, exchanged)
        return {
            "forward_s": context.clock.seconds(start, middle) - exchange_s,
            "backward_s": context.clock.seconds(middle, end) - exchange_s,
        }

    return run
