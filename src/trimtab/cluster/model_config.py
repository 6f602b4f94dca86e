"""Sizes of a model from its `config.json`, as fields of `ModelSpec`, and which keys they were read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.cluster.attention_config import attention_of, softmax_attention
from trimtab.cluster.config_keys import FAMILIES, ConfigKeys
from trimtab.cluster.decoder_layers import attention_kinds, block_types, moe_layers_of
from trimtab.errors import InputError

# Weights in float32 and float64 are trained as they are, all others, quantised ones too, in two bytes.
_WIDE_TYPES = {"float32": 4, "float": 4, "float64": 8, "double": 8}


@dataclass(frozen=True)
class ConfigReading:
    """What was read of a config.

    Attributes:
        where: file or preset.
        model_type: of the config; empty if it has none.
        used: keys that sizes follow from.
        ignored: keys that look like sizes and were not read.
        notes: what was assumed or left out.
    """

    where: str
    model_type: str
    used: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_known(self) -> bool:
        """True if the model type is one whose keys Trimtab knows."""
        return self.model_type.removesuffix("_text") in FAMILIES

    @property
    def text(self) -> str:
        """One line about a config that may not be read as meant; empty if there is nothing to say."""
        parts = list(self.notes)
        if not self.is_known and self.model_type:
            parts.insert(
                0, f"model type {self.model_type} is unknown; its sizes are read by the names of other families"
            )
        if self.ignored:
            parts.append(f"keys that are not read: {', '.join(self.ignored)}")
        return f"{self.where}: {'; '.join(parts)} (override sizes with --set KEY=VALUE)" if parts else ""


def read_sizes(
    config: dict[str, Any], where: str, overrides: Mapping[str, Any], *, routing_alone: bool = False
) -> tuple[dict[str, Any], ConfigReading]:
    """Fields of `ModelSpec` from a config, and what was read.

    Args:
        overrides: keys of the config with other values.
        routing_alone: whether the sizes of attention are left unknown where they can't be read.

    Raises:
        InputError: if it does not describe a MoE model, or an override is of no key that is read.
    """
    keys = ConfigKeys(config, where, overrides)
    if keys.is_of("ernie4_5") and keys.take_first("moe_num_experts", "moe_intermediate_size"):
        keys.notes.append(
            "the second values of moe_num_experts and moe_intermediate_size, vision experts, are left out"
        )
    num_experts, top_k = keys.count("num_experts"), keys.count("num_experts_per_tok")
    if top_k > num_experts:
        raise InputError(f"{where}: a token uses {top_k} of {num_experts} experts; it should use as many at most")
    hidden_size = keys.count("hidden_size")
    groups, chosen_groups = _expert_groups(keys, num_experts, top_k)
    expert_width, dense_width = keys.count("moe_intermediate_size"), keys.count("intermediate_size", default=0, least=0)
    # A layer of LongCat has two attention blocks and two dense feed-forward parts; transformers counts it twice.
    is_double = keys.is_of("longcat_flash")
    blocks = block_types(keys)
    given_layers = keys.count("num_layers", default=0, least=0) if is_double else 0
    given_layers = given_layers or keys.count("num_hidden_layers", default=len(blocks), least=0)
    if blocks and len(blocks) != given_layers:
        raise InputError(f"{where}: num_hidden_layers is {given_layers}; the pattern of layers has {len(blocks)}")
    layers = given_layers or 1
    moe_layers = moe_layers_of(keys, layers, blocks)
    dense_layers = layers - len(moe_layers)
    sizes = {
        "name": keys.model_types[0] if keys.model_types else Path(where).parent.name,
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden_size": hidden_size,
        "expert_width": expert_width,
        "weight_bytes": _weight_bytes(keys),
        "moe_layers": len(moe_layers),
        "moe_layer_indices": moe_layers if given_layers else (),
        "dense_layers": dense_layers,
        "dense_width": _mean_dense_width(blocks, dense_width, dense_layers),
        "shared_width": _shared_width(keys, expert_width, dense_width, hidden_size),
        "vocab_size": keys.count("vocab_size", default=0, least=0),
        "feed_forward_matrices": 2 if keys.get("mlp_hidden_act") == "relu2" else 3,
        "latent_size": keys.count("moe_latent_size", default=0, least=0),
        "zero_experts": keys.count("zero_expert_num", default=0, least=0),
        "tied_embedding": keys.get("tie_word_embeddings") is True,
        "expert_groups": groups,
        "groups_per_token": chosen_groups,
    }
    is_whole = True
    try:
        sizes |= _attention_sizes(keys, hidden_size, layers, blocks, moe_layers)
    except InputError:
        if not routing_alone:
            raise
        is_whole = False
    if is_whole:
        keys.check_overrides()
    model_type = keys.model_types[-1] if keys.model_types else ""
    return sizes, ConfigReading(
        where, model_type, tuple(keys.used), keys.ignored() if is_whole else (), tuple(keys.notes)
    )


def _expert_groups(keys: ConfigKeys, num_experts: int, top_k: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token's experts are in. A router that may use all has none."""
    groups, chosen = keys.count("n_group", default=1), keys.count("topk_group", default=1)
    if groups == 1 or chosen == groups:
        return 1, 1
    if num_experts % groups or chosen > groups or top_k > chosen * (num_experts // groups):
        raise InputError(
            f"{keys.where}: n_group {groups}, topk_group {chosen} with {num_experts} experts, {top_k} a token; "
            "groups should be of equal size, and those of a token have at least its experts"
        )
    return groups, chosen


def _shared_width(keys: ConfigKeys, expert_width: int, dense_width: int, hidden_size: int) -> int:
    """Width of what every token passes beside the routed experts of a layer, all together."""
    if keys.is_of("longcat_flash"):
        return 2 * dense_width
    if keys.is_of("gemma4"):
        return dense_width
    if keys.get("parallel_attn_mlp_res") is True:
        # Arctic.
        return hidden_size
    # The code of these families has one, which their configs don't name.
    usual = 1 if keys.is_of("llama4", "hunyuan_v1_moe") else 0
    number = keys.count("n_shared_experts", default=usual, least=0)
    return keys.count("shared_expert_intermediate_size", default=0, least=0) or number * expert_width


def _attention_sizes(
    keys: ConfigKeys, hidden_size: int, layers: int, blocks: list[str], moe_layers: tuple[int, ...]
) -> dict[str, Any]:
    kinds, is_double = attention_kinds(keys, layers, blocks), keys.is_of("longcat_flash")
    heads = keys.count("num_attention_heads", default=0, least=0)
    if set(kinds) != {"full"} or is_double:
        attention, reach = attention_of(keys, hidden_size, kinds, moe_layers, 2 if is_double else 1)
        return {"attention_heads": heads, "attention": attention, "reach": reach}
    if not heads:
        return {}
    names = ("attention_parameters", "attention_width", "cache_width", "cache_heads")
    return {
        "attention_heads": heads,
        **dict(zip(names, softmax_attention(keys, hidden_size, "full"), strict=True)),
    }


def _mean_dense_width(blocks: list[str], width: int, dense_layers: int) -> int:
    """Width of the feed-forward parts of layers without experts; if attention is a layer of its own, their mean."""
    if not dense_layers or "moe" not in blocks:
        return width if dense_layers else 0
    return round(width * blocks.count("mlp") / dense_layers)


def _weight_bytes(keys: ConfigKeys) -> int:
    dtype = str(keys.get("torch_dtype") or keys.get("dtype")).removeprefix("torch.")
    return 2 if keys.get("quantization_config") else _WIDE_TYPES.get(dtype, 2)
