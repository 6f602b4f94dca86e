"""The model of a trace: the given one, the one that the trace names, or a preset like it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.cluster import ModelSpec, load_model, model_like, preset_of_label
from trimtab.errors import InputError
from trimtab.trace import RoutingTrace
from trimtab.trace.message_text import clip

ModelSource = ModelSpec | str | os.PathLike[str]
Overrides = Mapping[str, Any] | Iterable[tuple[str, Any]]

log = logging.getLogger("trimtab")


def model_of(name: str, trace: RoutingTrace, source: ModelSource | None, overrides: Overrides = ()) -> ModelSpec:
    """The model of a trace: the given one, else the one that the trace names, else a preset like it.

    A line is logged if a preset like the trace is assumed.

    Args:
        name: of the trace, for messages.
        source: a `ModelSpec` is returned as given.
        overrides: keys of the given model's config with other values.

    Raises:
        InputError: if the trace can't be of the given model, or there is no preset like it.
    """
    changes = dict(overrides)
    if source is None or isinstance(source, ModelSpec):
        if changes:
            raise InputError(f"--set {next(iter(changes))}: needs --model with a name, a config.json or a checkpoint")
        if source is None:
            return _unnamed_model(name, trace)
        model = source
    else:
        model = load_model(source, changes)
    check_model(name, trace, model)
    return model


def model_or_none(
    name: str, trace: RoutingTrace, source: ModelSource | None, overrides: Overrides = ()
) -> ModelSpec | None:
    """The model as `model_of`; None if none is given or named, and there is no preset like the trace."""
    if source is not None or dict(overrides):
        return model_of(name, trace, source, overrides)
    try:
        return model_of(name, trace, None)
    except InputError:
        return None


def check_model(name: str, trace: RoutingTrace, model: ModelSpec) -> None:
    """Raise InputError unless the trace, called `name`, can be of the model; it may lack layers."""
    if model.zero_experts and trace.num_experts == model.num_experts + model.zero_experts:
        raise InputError(
            f"{name} counts the {model.zero_experts} zero experts of {model.name} as experts; tokens that choose them "
            "are computed by no rank, which is not supported"
        )
    if not _fits(trace, model):
        raise InputError(
            f"{name} is not of model {model.name}: the trace has {trace.shape_text}, the model {model.moe_layers} MoE "
            f"layers, {model.num_experts} experts, top-{model.top_k}"
        )


def _fits(trace: RoutingTrace, model: ModelSpec) -> bool:
    same = (model.num_experts, model.top_k) == (trace.num_experts, trace.top_k)
    return same and trace.num_layers <= model.moe_layers


def _unnamed_model(name: str, trace: RoutingTrace) -> ModelSpec:
    """The preset that the trace names if it fits, else one like the trace."""
    preset = preset_of_label(trace.model)
    if preset is not None:
        model = ModelSpec.named(preset)
        if _fits(trace, model):
            return model
    model = model_like(trace.num_experts, trace.top_k, trace.num_layers)
    check_model(name, trace, model)
    named = f"names {clip(trace.model)}" if trace.model else "names no model"
    log.info("model: %s is assumed, by experts and top-k; the trace %s; --model gives another", model.name, named)
    return model
