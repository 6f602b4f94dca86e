"""Rates of everything outside the experts, measured on a model's layers and head with experts that compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.calibration.fits import Fit, fit_rates, fit_ratio
from trimtab.calibration.measurement_context import MeasurementContext
from trimtab.calibration.operation_counts import head_bytes, head_flops, square_flops, token_bytes, token_flops
from trimtab.integrations.transformers import moe_blocks

LAYERS = 2
# (layers, fraction of a micro-step's tokens, multiple of the usual sequence length). With 0 layers only the head runs.
LOADS = (
    (LAYERS, 1.0, 1.0),
    (LAYERS, 0.5, 1.0),
    (LAYERS, 0.25, 1.0),
    (LAYERS, 1.0, 4.0),
    (LAYERS, 0.5, 8.0),
    (0, 1.0, 1.0),
)


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
    for layers, fraction, stretch in LOADS:
        length = max(1, round(context.sequence_length * stretch))
        points.append((layers, max(1, round(context.tokens * fraction / length)), length))
    taken = context.medians({f"{point}": _variant(context, model, *point) for point in points})
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


def _variant(
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
