"""Rates of computing: experts, measured on the runtime's layer, and everything outside of them, on a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.calibration.fits import Fit, GroupedTiming, fit_grouped, fit_rates, fit_ratio
from trimtab.calibration.measurement import MeasurementContext, add_random_layer, random_inputs
from trimtab.cluster import ModelSpec
from trimtab.cluster.operations import LOGIT_BYTES, ROW_PASSES, TOKEN_PASSES
from trimtab.integrations.transformers import moe_blocks
from trimtab.planner import pack_by_length
from trimtab.runtime import ExpertLayer, Session
from trimtab.runtime.program.exchange import exchange_rows
from trimtab.trace import RoutingTrace

# (fraction of a balanced rank's rows, fraction of its experts that they go to).
EXPERT_LOADS = ((1.4, 1.0), (1.02, 1.0), (0.5, 1.0), (0.25, 1.0), (1 / 16, 1.0), (1.02, 0.5), (0.25, 0.5))
# Candidates for the tile size of a grouped CUDA kernel. Row counts that fill tiles differently identify it.
TILES = (1, 16, 32, 64, 128, 256)
ROWS_OF_A_COPY = (32, 64, 96, 128, 160, 192, 256, 288, 384)
# A GPU is measured with the experts per rank of a group of at least this size.
CUDA_RANKS = 8
# Exchanges of rows in a forward, and as many in a backward.
EXCHANGES = 2

LAYERS = 2
# (layers, fraction of a micro-step's tokens, multiple of the usual sequence length). With 0 layers only the head runs.
DENSE_LOADS = (
    (LAYERS, 1.0, 1.0),
    (LAYERS, 0.5, 1.0),
    (LAYERS, 0.25, 1.0),
    (LAYERS, 1.0, 4.0),
    (LAYERS, 0.5, 8.0),
    (0, 1.0, 1.0),
)


def token_flops(model: ModelSpec) -> float:
    """Operations per token in the dense parts of an MoE layer, without attention scores."""
    return 2 * (model.moe_attention.parameters + model.shared_parameters + model.router_parameters)


def token_bytes(model: ModelSpec) -> float:
    """Bytes read and written per token in the dense parts of an MoE layer."""
    return TOKEN_PASSES * model.hidden_size * model.weight_bytes


def square_flops(model: ModelSpec) -> float:
    """Operations of attention in one layer, per pair of tokens: a sequence of t tokens has t * t.

    Layers of limited attention count in full: transformers computes all pairs and masks them.
    """
    return model.moe_attention.square_width + model.moe_attention.reach_width


def head_flops(model: ModelSpec) -> float:
    """Operations per token in the output head."""
    return 2 * model.hidden_size * model.vocab_size


def head_bytes(model: ModelSpec) -> float:
    """Bytes read and written per token in head and loss."""
    return LOGIT_BYTES * model.vocab_size


def row_flops(model: ModelSpec) -> float:
    """Operations per row in one expert."""
    return 2 * model.expert_parameters


def row_bytes(model: ModelSpec) -> float:
    """Bytes read and written per row outside the matrix products."""
    return ROW_PASSES * (model.row_width + model.expert_width) * model.weight_bytes


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
    loads = [(fraction * even / copies, max(model.top_k, round(copies * experts))) for fraction, copies in EXPERT_LOADS]
    if on_cuda:
        loads += [(float(rows), experts) for rows in ROWS_OF_A_COPY]
    session = Session(num_experts=experts, group=context.alone, slots_per_rank=0, mode="static")
    layer = add_random_layer(session, model, context.dtype, context.device)
    points = {f"{rows:.0f} rows to {copies}": _route(rows, copies, experts, model.top_k) for rows, copies in loads}
    taken = context.medians({name: _expert_variant(context, session, layer, trace) for name, trace in points.items()})
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
    usual = [figures for figures, (fraction, _) in zip(taken.values(), EXPERT_LOADS, strict=False) if fraction > 0.1]
    forward_s = np.array([figures["forward_s"] for figures in usual])
    backward_s = np.array([figures["backward_s"] for figures in usual])
    return ExpertFit(fits[tile], tile if on_cuda else None, *fit_ratio(backward_s, forward_s))


def _route(rows: float, copies: int, experts: int, top_k: int) -> RoutingTrace:
    """Routing that sends about `rows` rows to each of the first `copies` experts."""
    tokens = max(1, round(rows * copies / top_k))
    ids = np.arange(tokens * top_k).reshape(tokens, 1, top_k) % copies
    return RoutingTrace.from_sequences([ids], num_experts=experts)


def _expert_variant(
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


@dataclass(frozen=True)
class DenseFit:
    """Cost of a layer's dense parts.

    Attributes:
        fit: `rates` operations per second of projections and of attention; `fixed_s[0]` seconds per layer.
        backward: time of backward divided by time of forward.
        backward_error: relative error of that ratio over the loads.
    """

    fit: Fit
    backward: float
    backward_error: float


def measure_dense(context: MeasurementContext, config: dict[str, Any], memory_bytes_per_s: float) -> DenseFit:
    """Time forward and backward at several sequence lengths. Collective."""
    spec = context.model
    model = _without_experts(config, context)
    points = []
    for layers, fraction, stretch in DENSE_LOADS:
        length = max(1, round(context.sequence_length * stretch))
        points.append((layers, max(1, round(context.tokens * fraction / length)), length))
    taken = context.medians({f"{point}": _dense_variant(context, model, *point) for point in points})
    work, fixed, known = [], [], []
    for layers, count, length in points:
        tokens = count * length
        projections = layers * token_flops(spec) + head_flops(spec)
        work.append([tokens * projections, layers * count * length**2 * square_flops(spec)])
        fixed.append([float(layers)])
        known.append(tokens * (layers * token_bytes(spec) + head_bytes(spec)) / memory_bytes_per_s)
    forward_s = np.array([figures["forward_s"] for figures in taken.values()])
    backward_s = np.array([figures["backward_s"] for figures in taken.values()])
    fit = fit_rates(np.array(work), np.array(fixed), np.array(known), forward_s)
    return DenseFit(fit, *fit_ratio(backward_s, forward_s))


def _dense_variant(
    context: MeasurementContext, model: Any, layers: int, count: int, length: int
) -> Callable[[], dict[str, float]]:
    tokens = torch.randint(0, model.config.vocab_size, (count, length + 1), device=context.device)
    stack = model.model.layers

    def run() -> dict[str, float]:
        model.zero_grad()
        model.model.layers = stack[:layers]
        start = context.begin()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")
        middle = context.clock.now()
        loss.backward()
        end = context.clock.now()
        model.model.layers = stack
        return {"forward_s": context.clock.seconds(start, middle), "backward_s": context.clock.seconds(middle, end)}

    return run


def _without_experts(config: dict[str, Any], context: MeasurementContext) -> Any:
    """A random model of a few MoE layers whose experts return their inputs."""
    few = {"num_hidden_layers": LAYERS, "first_k_dense_replace": 0, "mlp_only_layers": [], "layer_types": None}
    chosen = AutoConfig.for_model(**{**config, **{key: value for key, value in few.items() if key in config}})
    chosen.num_hidden_layers = LAYERS
    # All experts of a large model might not fit.
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(chosen, dtype=context.dtype)
    for block in moe_blocks(model).values():
        block.experts = _IdentityExperts()
    model.to_empty(device=context.device)
    model.init_weights()
    return model


class _IdentityExperts(nn.Module):
    """Experts that return their inputs."""

    def forward(self, hidden: torch.Tensor, _ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Identity.apply(hidden, weights)
        return output


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.like = weights
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A zero gradient, so that the router's backward runs, too.
        return grads[0], torch.zeros_like(ctx.like)
