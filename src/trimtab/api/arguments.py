"""Checks of arguments that several functions take; their messages use the names of the command line."""

from __future__ import annotations

import logging
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

from trimtab.cluster import ClusterSpec, Layout, ModelSpec, load_cluster, load_model, model_like, preset_of_label
from trimtab.cluster.parallel_layout import GRANULARITIES, SHARDINGS, Checkpointing
from trimtab.cluster.specs import AUTO, slot_numbers
from trimtab.errors import InputError, unknown
from trimtab.trace import RoutingTrace
from trimtab.trace.message_text import clip

ModelSource = ModelSpec | str | os.PathLike[str]
Overrides = Mapping[str, Any] | Iterable[tuple[str, Any]]

# Least values of arguments that are whole numbers, choices of others, and those that may be None.
LEAST = {"slots": 0, "step": 0} | dict.fromkeys(
    ("ranks", "ranks_per_node", "groups", "micro_steps", "token_budget", "mini_batches", "steps", "tp", "pp", "cp",
     "draws", "max_rows_per_rank"), 1
)  # fmt: skip
# What is sent to a node: every row, or a token once; see `ClusterSpec.dispatch_forwards`.
DISPATCHERS = {"rows": False, "tokens": True}
GROUPS_MEET = ("layer", "step")
CHOICES: dict[str, Iterable[str]] = {"dispatcher": DISPATCHERS, "sharding": SHARDINGS, "groups_meet": GROUPS_MEET}
MAY_BE_NONE = (
    "ranks", "ranks_per_node", "micro_steps", "token_budget", "step", "steps", "dispatcher", "max_rows_per_rank",
)  # fmt: skip

# Of any number of things; larger ones would not fit the integers of kernels.
LARGEST = 2**31 - 1
TOKEN_COUNT = "a number of tokens, such as 20M"

log = logging.getLogger("trimtab")


def token_count(value: int | str) -> int:
    """A number of tokens, also of a text such as 20M, 1.5M or 80k.

    Raises:
        InputError: if it is none of these, or not from 1 to `LARGEST`.
    """
    text = str(value)
    factor = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
    try:
        count = round(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        count = 0
    if not 1 <= count <= LARGEST:
        raise InputError(f"step_tokens: {value!r} should be {TOKEN_COUNT}")
    return count


def check_whole(least: int, **values: object) -> None:
    """Raise InputError unless every value is an integer of at least `least` that fits 32 bits."""
    for name, value in values.items():
        if not isinstance(value, SupportsIndex) or operator.index(value) < least:
            raise InputError(f"{name}: {value!r} should be a whole number of at least {least}")
        if operator.index(value) > LARGEST:
            raise InputError(f"{name}: {value!r} is too large; it should be at most {LARGEST}")


def check_optional(least: int, **values: object) -> None:
    """Raise InputError unless every value is None or an integer of at least `least`."""
    check_whole(least, **{name: value for name, value in values.items() if value is not None})


def check_run(arguments: Mapping[str, Any]) -> None:
    """Check the arguments that `LEAST` and `CHOICES` have, and that at most one of them gives the size of a micro-step.

    Raises:
        InputError: if one is out of range.
    """
    for name, value in arguments.items():
        if name in LEAST and not (value is None and name in MAY_BE_NONE):
            if name == "slots" and value == AUTO:
                continue
            check_whole(LEAST[name], **{name: value})
        if name in CHOICES and not (value is None and name in MAY_BE_NONE):
            check_choice(name, value, CHOICES[name])
    if arguments.get("step_tokens") is not None:
        token_count(arguments["step_tokens"])
    # Each fixes the other.
    if arguments["token_budget"] is not None and arguments["micro_steps"] is not None:
        raise InputError("micro_steps: not allowed with argument token_budget")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise InputError unless the value is one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise InputError(unknown(name, value, choices))


def layout_of(model: ModelSpec, ranks: Iterable[int], *, groups: int, tp: int, pp: int, cp: int) -> Layout:
    """The layout of a run of a model, on any of these numbers of ranks.

    Raises:
        InputError: if such a run can't exist; it names the nearest values that can.
    """
    layout = Layout(tp, pp, cp)
    for each in ranks:
        layout.check(model, each, groups)
    return layout


def recomputed(checkpointing: bool | str | None) -> Checkpointing:
    """`StepSettings.checkpointing` of True, False or the name of a granularity; of None that which is tried first."""
    if isinstance(checkpointing, bool | None):
        return bool(checkpointing)
    check_choice("checkpointing", checkpointing, GRANULARITIES)
    return GRANULARITIES[checkpointing]


def nodes_of(
    cluster: str | os.PathLike[str], ranks: int, slots: int | str, ranks_per_node: int | None, dispatcher: str | None
) -> ClusterSpec:
    """The ranks' cluster: a preset or a file, with another dispatcher if one is given; of several slots the fewest."""
    fewest = slot_numbers(slots)[0]
    nodes = load_cluster(cluster, ranks=ranks, slots_per_rank=fewest, ranks_per_node=ranks_per_node)
    return nodes if dispatcher is None else replace(nodes, dispatch_forwards=DISPATCHERS[dispatcher])


def ranks_of(trace: RoutingTrace, name: str, ranks: int | None) -> int:
    """The given ranks, or the largest power of two up to 16 that divides the experts of the trace, called `name`.

    Raises:
        InputError: if the given ranks don't divide them.
    """
    if ranks is None:
        return math.gcd(trace.num_experts, 16)
    if trace.num_experts % ranks:
        divisors = [str(each) for each in range(1, trace.num_experts + 1) if trace.num_experts % each == 0]
        raise InputError(
            f"--ranks {ranks} doesn't divide the {trace.num_experts} experts of {name}; "
            f"use one of {', '.join(divisors)}"
        )
    return ranks


def numbers(value: Any) -> list[Any]:
    """One number or text, or several for a sweep, as a list."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def split_names(value: str | Sequence[str]) -> list[str]:
    """Names of a list, or of one text with commas, as options of the command line take them."""
    return [name for text in ([value] if isinstance(value, str) else value) for name in text.split(",")]


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
