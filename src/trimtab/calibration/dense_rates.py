"""How fast is everything beside the experts? A real model's layers and head, with experts that do nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.calibration.fits import Fit, fit_rates
from trimtab.calibration.site import Site
from trimtab.calibration.timed_work import (
    head_bytes,
    head_flops,
    square_flops,
    token_bytes,
    token_flops,
)
from trimtab.integrations.transformers import moe_blocks

LAYERS = 2
# Layers, parts of a micro-step's tokens, and lengths in parts of the usual one. Without layers, only the head is left.
LOADS = (
    (LAYERS, 1.0, 1.0),
    (LAYERS, 0.5, 1.0),
    (LAYERS, 0.25, 1.0),
    (LAYERS, 1.0, 4.0),
    (LAYERS, 0.5, 8.0),
    (0, 1.0, 1.0),
)


@dataclass(frozen=True)
class DenseFigures:
    """What the dense half of a layer costs.

    Attributes:
        fit: `rates` operations a second of projections and of attention; `fixed_s` of a layer.
        backward: time of backward over that of forward.
    """

    fit: Fit
    backward: float


def measure_dense(site: Site, config: dict[str, Any], memory_bytes_per_s: float) -> DenseFigures:
    """Time forward and backward with several lengths of sequences. Collective."""
    spec = site.model
    model = _without_experts(config, site)
    points = []
    for layers, part, stretch in LOADS:
        length = max(1, round(site.sequence_length * stretch))
        points.append((layers, max(1, round(site.tokens * part / length)), length))
    taken = site.medians({f"{point}": _variant(site, model, *point) for point in points})
    work, fixed, known = [], [], []
    for layers, count, length in points:
        tokens = count * length
        projections = layers * token_flops(spec) + head_flops(spec)
        work.append([tokens * projections, layers * count * length**2 * square_flops(spec)])
        fixed.append([float(layers)])
        known.append(tokens * (layers * token_bytes(spec) + head_bytes(spec)) / memory_bytes_per_s)
    forward_s = np.array([figures["forward_s"] for figures in taken.values()])
    backward = statistics.median(figures["backward_s"] / figures["forward_s"] for figures in taken.values())
    fit = fit_rates(np.array(work), np.array(fixed), np.array(known), forward_s)
    return DenseFigures(fit, backward)


def _variant(site: Site, model: Any, layers: int, count: int, length: int) -> Callable[[], dict[str, float]]:
    tokens = torch.randint(0, model.config.vocab_size, (count, length + 1), device=site.device)
    stack = model.model.layers

    def run() -> dict[str, float]:
        model.zero_grad()
        model.model.layers = stack[:layers]
        start = site.begin()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")
        middle = site.clock.now()
        loss.backward()
        end = site.clock.now()
        model.model.layers = stack
        return {
            "forward_s": site.clock.seconds(start, middle),
            "backward_s": site.clock.seconds(middle, end),
        }

    return run


def _without_experts(config: dict[str, Any], site: Site) -> Any:
    """A model of a few MoE layers, random, whose experts give back what they get."""
    few = {"num_hidden_layers": LAYERS, "first_k_dense_replace": 0, "mlp_only_layers": [], "layer_types": None}
    chosen = AutoConfig.for_model(**{**config, **{key: value for key, value in few.items() if key in config}})
    chosen.num_hidden_layers = LAYERS
    # All experts of a large model might not fit.
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(chosen, dtype=site.dtype)
    for block in moe_blocks(model).values():
        block.experts = _Nothing()
    model.to_empty(device=site.device)
    model.init_weights()
    return model


class _Nothing(nn.Module):
    """In the place of experts."""

    def forward(self, hidden: torch.Tensor, _ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = _Pass.apply(hidden, weights)
        return passed


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.like = weights
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # So that the router has a backward, too.
        return grads[0], torch.zeros_like(ctx.like)
