"""What each decoder layer holds, from the keys of a config: experts or not, and which kind of attention."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.cluster.attention import Kind
from trimtab.cluster.config_keys import ConfigKeys
from trimtab.errors import InputError

# Nemotron-H: a layer is either attention or a feed-forward part.
_PATTERN = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_KINDS: dict[str, Kind | None] = {
    "full_attention": "full", "attention": "full", "sliding_attention": "window", "chunked_attention": "chunk",
    "indexed_attention": "sparse", "linear_attention": "linear", "mamba": "linear", "moe": None, "mlp": None,
}  # fmt: skip
# Defaults of model types whose configs may leave the kinds of layers to the model's code.
_HYBRID_QWEN, _FULL_ATTENTION_INTERVAL = ("qwen3_next", "qwen3_5_moe"), 4
_ROPE_INTERVAL = 4


def block_types(keys: ConfigKeys) -> list[str]:
    """One name per layer if attention and feed-forward parts are layers of their own, else empty."""
    pattern = keys.get("hybrid_override_pattern")
    if pattern is None:
        return keys.listed("layers_block_type", str)
    if not isinstance(pattern, str) or not set(pattern) <= set(_PATTERN):
        raise InputError(f"{keys.where}: hybrid_override_pattern should be a word of the letters {' '.join(_PATTERN)}")
    return [_PATTERN[letter] for letter in pattern]


def moe_layers_of(keys: ConfigKeys, layers: int, blocks: list[str]) -> tuple[int, ...]:
    """Indices of layers with experts. A layer is dense if any key says so.

    Args:
        layers: decoder layers.
        blocks: see `block_types`.

    Raises:
        InputError: if none has experts, or a list doesn't fit the layers.
    """
    every = range(layers)
    first = keys.count("first_k_dense_replace", default=0, least=0)
    step = keys.count("decoder_sparse_step", default=1)
    interleave = keys.count("interleave_moe_layer_step", default=1)
    period = keys.count("expert_layer_period", default=1)
    offset = keys.count("expert_layer_offset", default=0, least=0)
    kinds = keys.listed("mlp_layer_types", str, length=layers)
    mlp_only = keys.listed("mlp_only_layers", int)
    allowed: list[Iterable[int]] = [
        every[first:],
        every[step - 1 :: step],
        keys.listed("moe_layers", int) or every[interleave - 1 :: interleave],
        _of_enum(keys) or every,
        every[offset::period],
        _of_frequency(keys, layers),
        _of_interval(keys, layers),
        [layer for layer in every if layer not in mlp_only],
        [layer for layer in every if not kinds or kinds[layer] != "dense"],
        [layer for layer in every if "moe" not in blocks or blocks[layer] == "moe"],
    ]
    moe_layers = tuple(sorted(set(every).intersection(*allowed)))
    if not moe_layers:
        raise InputError(f"{keys.where}: none of the {layers} layers has experts; expected the config of a MoE model")
    return moe_layers


def attention_kinds(keys: ConfigKeys, layers: int, blocks: list[str]) -> list[Kind | None]:
    """Kind of attention of each layer; None if a layer has none.

    Raises:
        InputError: if a list doesn't fit the layers.
    """
    names = blocks or keys.listed("layer_types", str, length=layers)
    unknown = sorted(set(names) - _KINDS.keys())
    if unknown:
        keys.notes.append(f"layers of type {', '.join(unknown)} count as full attention")
    kinds = [_KINDS.get(name, "full") for name in names] or _unlisted_kinds(keys, layers)
    if keys.get("index_topk") is not None:
        kinds = ["sparse" if kind == "full" else kind for kind in kinds]
    return kinds


def _of_enum(keys: ConfigKeys) -> list[int]:
    """Step-3: the layers' numbers in a string, with commas."""
    text = keys.get("moe_layers_enum")
    if not isinstance(text, str):
        return keys.listed("moe_layers_enum", int)
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"{keys.where}: moe_layers_enum should be numbers of layers, with commas") from None


def _of_frequency(keys: ConfigKeys, layers: int) -> list[int]:
    if isinstance(keys.get("moe_layer_freq"), list):
        marks = keys.listed("moe_layer_freq", int, length=layers)
        return [layer for layer, mark in enumerate(marks) if mark]
    return list(range(0, layers, keys.count("moe_layer_freq", default=1)))


def _of_interval(keys: ConfigKeys, layers: int) -> list[int]:
    """ERNIE-4.5: every `moe_layer_interval`-th layer between two. The multimodal model has two ranges."""
    interval = keys.count("moe_layer_interval", default=1)
    ends = [keys.get("moe_layer_start_index"), keys.get("moe_layer_end_index")]
    start, end = (values if isinstance(values, list) else [values] for values in ends)
    if not all(value is None or (isinstance(value, int) and abs(value) <= layers + 1) for value in (*start, *end)):
        raise InputError(f"{keys.where}: moe_layer_start_index and moe_layer_end_index should be numbers of layers")
    low = min((value for value in start if value is not None), default=0)
    high = max((value for value in end if value is not None), default=-1)
    last = layers - 1 if high < 0 else high
    return [layer for layer in range(layers) if low <= layer <= last and (layer + 1) % interval == 0]


def _unlisted_kinds(keys: ConfigKeys, layers: int) -> list[Kind | None]:
    """Kinds of a config without a list of their names."""
    marks = keys.listed("attn_type_list", int, length=layers)
    if marks:
        # MiniMax: 0 is lightning attention, 1 is full.
        return ["full" if mark else "linear" for mark in marks]
    period = keys.count("attn_layer_period", default=0, least=0)
    if period:
        offset = keys.count("attn_layer_offset", default=0, least=0)
        return ["full" if layer % period == offset else "linear" for layer in range(layers)]
    interval = keys.count(
        "full_attention_interval", default=_FULL_ATTENTION_INTERVAL if keys.is_of(*_HYBRID_QWEN) else 0, least=0
    )
    if interval:
        return ["linear" if (layer + 1) % interval else "full" for layer in range(layers)]
    if keys.get("attention_chunk_size") is not None:
        # Llama 4: layers with rotary embedding attend in chunks.
        every = keys.count("no_rope_layer_interval", default=_ROPE_INTERVAL)
        rotary = keys.listed("no_rope_layers", int) or [int((layer + 1) % every != 0) for layer in range(layers)]
        return ["chunk" if layer < len(rotary) and rotary[layer] else "full" for layer in range(layers)]
    if keys.get("sliding_window") is None or keys.get("use_sliding_window") is False:
        return ["full"] * layers
    if keys.is_of("gpt_oss"):
        return ["full" if layer % 2 else "window" for layer in range(layers)]
    return ["window"] * layers
