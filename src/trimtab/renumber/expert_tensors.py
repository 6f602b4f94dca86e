"""Which tensors of a checkpoint are indexed by expert, by their names and shapes; whatever is unclear is refused."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError

# Model types whose names these are; tests compare the logits of those that transformers has.
KNOWN_TYPES = {
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe",
    "hy_v3", "hy_v4", "inkling2_text", "jamba", "jetmoe", "kimi_k2", "kimi_linear", "kolibri1", "laguna", "lfm2_moe",
    "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m1", "minimax_m2",
    "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "solar_open", "step3_text",
}  # fmt: skip
_LAYER = re.compile(r"^(?P<stem>(?:.*?\.)?)(?:layers|blocks|h)\.(?P<layer>\d+)\.(?P<rest>.+)$")
_SINGLE = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_BY_EXPERT = re.compile(
    r"(?:^|\.)(?:experts|router|gate|(?:in|out)put_linear)\.|(?:e_score_correction|expert)_bias$"
    r"|(?:^|\.)moe\.(?:gate|up|down)_proj\."
)
# Attention with experts has a router of its own; heads of multi-token prediction are not of the trace.
_OTHERS = re.compile(r"att(?:n|ention)|mamba|share")
_PREDICTION_HEAD = re.compile(r"(?:^|\.)mtp\.")


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        first, size: where its bytes are, from the start of the file's data.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    size: int


class Change(NamedTuple):
    """What renumbering does with a tensor.

    Attributes:
        name: new name.
        order_E: of its equal parts along the first axis, old ones by new place; None if they stay. Parts behind those
            of the experts stay at the end.
    """

    name: str
    order_E: Array | None = None


def changes_of(
    tensors: Iterable[Tensor],
    orders: Mapping[int, Array],
    *,
    model_type: str,
    zero_experts: int = 0,
    patterns: Sequence[str] = (),
) -> dict[str, Change]:
    """Changes by the name of the tensor; those of other tensors are left out.

    Args:
        orders: by decoder layer `[E]`, old ids by new ones.
        model_type: of the config; for one that is not known, patterns are needed.
        zero_experts: rows of routers behind those of the experts.
        patterns: regular expressions, searched in names behind the layer's number, of tensors that are indexed by
            expert: along the first axis, or a tensor for each expert whose number is the pattern's group.

    Raises:
        InputError: if the type is not known and there is no pattern, or a layer lacks a router or the tensors of an
            expert, or a tensor has experts along its first axis and no known name, or has the name and not the shape.
    """
    if model_type not in KNOWN_TYPES and not patterns:
        raise InputError(
            f"model type {model_type!r} is not one whose tensors are known; name those that are indexed by expert, "
            "such as --pattern 'experts\\.(\\d+)\\.' --pattern 'gate\\.weight$', behind the layer's number"
        )
    try:
        compiled = [re.compile(each) for each in patterns]
    except re.error as error:
        raise InputError(f"--pattern {error.pattern!r}: no regular expression ({error})") from None
    if several := [each.pattern for each in compiled if each.groups > 1]:
        raise InputError(f"--pattern {several[0]}: more than one group; expected none, or that of the expert's number")
    single = [each for each in compiled if each.groups] or [_SINGLE]
    stacked = [each for each in compiled if not each.groups] or [_BY_EXPERT]
    blocks: dict[int, list[tuple[Tensor, str, str]]] = defaultdict(list)
    for tensor in tensors:
        found = _LAYER.match(tensor.name)
        if found and int(found["layer"]) in orders and not _PREDICTION_HEAD.search(found["stem"]):
            blocks[int(found["layer"])].append((tensor, found["stem"], found["rest"]))
    changes: dict[str, Change] = {}
    for layer, order_E in orders.items():
        changes |= _changes_of_layer(blocks[layer], layer, order_E, zero_experts, single, stacked)
    return changes


def _changes_of_layer(
    block: Sequence[tuple[Tensor, str, str]],
    layer: int,
    order_E: Array,
    zero_experts: int,
    single: Sequence[re.Pattern[str]],
    stacked: Sequence[re.Pattern[str]],
) -> dict[str, Change]:
    experts = len(order_E)
    new_E = np.argsort(order_E)
    changes: dict[str, Change] = {}
    # Numbers of experts, by the names of their tensors without the number.
    seen: dict[str, set[int]] = defaultdict(set)
    # Of the model, as in `model.language_model.`, with the layer's part, as in `mlp`.
    parts, others = set(), []
    has_router = has_experts = False
    for tensor, stem, rest in block:
        if _OTHERS.search(rest):
            continue
        number = next(filter(None, (pattern.search(rest) for pattern in single)), None)
        if number:
            first, end = (place + len(tensor.name) - len(rest) for place in number.span(1))
            expert = int(number[1])
            if experts <= expert < experts + zero_experts:
                continue
            if expert >= experts:
                raise InputError(f"{tensor.name}: of expert {expert}; the model has {experts} experts")
            has_experts = True
            seen[tensor.name[:first] + "N" + tensor.name[end:]].add(expert)
            changes[tensor.name] = Change(f"{tensor.name[:first]}{new_E[expert]}{tensor.name[end:]}")
        elif any(pattern.search(rest) for pattern in stacked):
            rows = next((size for size in tensor.shape if size != 1), 1)
            if rows == 1:
                continue
            if rows not in (experts, experts + zero_experts):
                raise InputError(f"{tensor.name} has shape {list(tensor.shape)}; expected {experts} experts first")
            changes[tensor.name] = Change(tensor.name, np.concatenate([order_E, np.arange(experts, rows)]))
            has_experts |= len(tensor.shape) > 2
            has_router |= len(tensor.shape) == 2 and "experts" not in rest
        else:
            others.append((tensor, stem, rest))
            continue
        parts.add((stem, rest.partition(".")[0]))
    stems = {stem for stem, _ in parts}
    if len(stems) > 1:
        raise InputError(f"layer {layer}: experts under several names, {', '.join(map(repr, sorted(stems)))}")
    for name, numbers in seen.items():
        if missing := set(range(experts)) - numbers:
            raise InputError(f"layer {layer}: {name} is missing for expert {min(missing)}")
    if not (has_router and has_experts):
        what = "tensors of experts" if has_router else "router's weight"
        raise InputError(f"layer {layer}: found no {what}; see --pattern")
    for tensor, stem, rest in others:
        if tensor.shape[:1] == (experts,) and (stem, rest.partition(".")[0]) in parts:
            raise InputError(f"{tensor.name}: has a row for each expert, and its name is not known; see --pattern")
    return changes
