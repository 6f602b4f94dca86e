"""Checks of arguments that several functions take; their messages use the names of the command line."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from trimtab.cluster import ModelSpec, load_model
from trimtab.errors import InputError
from trimtab.trace import RoutingTrace

ModelSource = ModelSpec | str | os.PathLike[str]


def check_whole(least: int, **values: object) -> None:
    """Raise InputError unless every value is an integer of at least `least`."""
    for name, value in values.items():
        if not isinstance(value, SupportsIndex) or operator.index(value) < least:
            raise InputError(f"{name}: {value!r} should be a whole number of at least {least}")


def check_optional(least: int, **values: object) -> None:
    """Raise InputError unless every value is None or an integer of at least `least`."""
    check_whole(least, **{name: value for name, value in values.items() if value is not None})


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise InputError unless the value is one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise InputError(f"{name}: invalid choice: {value!r} (choose from {', '.join(choices)})")


def check_one_size(token_budget: object, micro_steps: object) -> None:
    """Raise InputError if both are given: each fixes the other."""
    if token_budget is not None and micro_steps is not None:
        raise InputError("micro_steps: not allowed with argument token_budget")


def numbers(value: int | Sequence[int]) -> list[int]:
    """One number, or several for a sweep, as a list."""
    return list(value) if isinstance(value, Sequence) else [value]


def model_of(model: ModelSource) -> ModelSpec:
    """The `ModelSpec` of a preset's name, a config.json or a checkpoint; a `ModelSpec` is returned as given."""
    return model if isinstance(model, ModelSpec) else load_model(os.fspath(model))


def check_model(name: str, trace: RoutingTrace, model: ModelSpec) -> None:
    """Raise InputError unless the trace, called `name`, can be of the model; it may lack layers."""
    if (model.num_experts, model.top_k) != (trace.num_experts, trace.top_k) or trace.num_layers > model.moe_layers:
        raise InputError(
            f"{name} is not of model {model.name}: the trace has {trace.shape_text}, the model {model.moe_layers} MoE "
            f"layers, {model.num_experts} experts, top-{model.top_k}"
        )
