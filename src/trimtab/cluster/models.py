"""`ModelSpec`: sizes of a model, read from presets or a Hugging Face `config.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.cluster.presets import preset_names, read_preset
from trimtab.errors import InputError

# Weights in float32 and float64 are trained as they are, all others, quantised ones too, in two bytes.
_WIDE_TYPES = {"float32": 4, "float": 4, "float64": 8, "double": 8}
# Upper limit of all sizes: far above any model, and loops over layers stay short.
_LARGEST = 1 << 20


@dataclass(frozen=True)
class ModelSpec:
    """A MoE model, as its Hugging Face `config.json` describes it.

    Attributes:
        name: of the preset or in the config.
        num_experts: routed experts of a layer, E.
        top_k: experts that a token uses.
        hidden_size: width of a token.
        expert_width: inner width of an expert.
        weight_bytes: bytes of one weight, 2 for bf16.
        moe_layers: decoder layers with experts, L.
        moe_layer_indices: their indices, ascending; empty if unknown.
        dense_layers: decoder layers without experts.
        dense_width: inner width of the dense layers' feed-forward part.
        shared_width: inner width of a MoE layer's shared experts, all together.
        attention_parameters: weights of one layer's attention projections. 0: unknown, four `hidden_size` x
            `hidden_size` projections are assumed.
        attention_width: query heads of one layer * (key width + value width of a head). 0: unknown, `2 * hidden_size`
            is assumed.
        vocab_size: rows of the embedding and of the output head.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    expert_width: int
    weight_bytes: int = 2
    moe_layers: int = 1
    dense_layers: int = 0
    dense_width: int = 0
    shared_width: int = 0
    attention_parameters: int = 0
    attention_width: int = 0
    vocab_size: int = 0
    moe_layer_indices: tuple[int, ...] = ()

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert in one layer: gate, up and down projections."""
        return 3 * self.hidden_size * self.expert_width

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights in one layer."""
        return self.expert_parameters * self.weight_bytes

    @property
    def parameters(self) -> int:
        """All weights without biases and norms. Embedding and output head both count, even if tied."""
        idle = self.moe_layers * (self.num_experts - self.top_k) * self.expert_parameters
        return self.active_parameters + idle + self.vocab_size * self.hidden_size

    @property
    def dense_parameters(self) -> int:
        """Weights outside the routed experts."""
        return self.parameters - self.moe_layers * self.num_experts * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with; not the embedding, which is a lookup."""
        attention = self.attention_parameters or 4 * self.hidden_size**2
        moe = self.top_k * self.expert_parameters + (3 * self.shared_width + self.num_experts) * self.hidden_size
        dense = 3 * self.hidden_size * self.dense_width
        return (
            (self.moe_layers + self.dense_layers) * attention
            + self.moe_layers * moe
            + self.dense_layers * dense
            + self.vocab_size * self.hidden_size
        )

    @classmethod
    def named(cls, name: str) -> ModelSpec:
        """Returns the preset of this name, such as `qwen3-30b-a3b`.

        Raises:
            InputError: if there is none; it lists the names.
        """
        text = read_preset("model", name)
        if text is None:
            raise InputError(f"{name}: no such model; Trimtab has {', '.join(preset_names('model'))}")
        return replace(_read(json.loads(text), name), name=name)

    @classmethod
    def from_config(cls, path: str | os.PathLike[str]) -> ModelSpec:
        """Read a `config.json`, or the one in a checkpoint directory.

        The families that it knows completely are Qwen3-MoE, GLM-4 MoE, DeepSeek-V3, Kimi-K2, GPT-OSS and Mixtral. A
        `text_config` is read for the language model of a multimodal one. Missing keys keep the value for unknown;
        without a number of layers there is one MoE layer. Sliding windows are ignored.

        Raises:
            InputError: if there is none, or it does not describe a MoE model.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise InputError(f"{file}: no such file; expected a Hugging Face config.json or a checkpoint directory")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise InputError(f"{file}: not a readable JSON file ({error})") from None
        if not isinstance(config, dict):
            raise InputError(f"{file}: expected a JSON object with the model's config")
        return _read(config, str(file))


def model_like(num_experts: int, top_k: int, moe_layers: int) -> ModelSpec:
    """Returns the preset with these experts and top-k.

    If several match: one with the same number of MoE layers, else the smallest.

    Raises:
        InputError: if none does.
    """
    models = [ModelSpec.named(name) for name in preset_names("model")]
    matching = [model for model in models if (model.num_experts, model.top_k) == (num_experts, top_k)]
    if not matching:
        raise InputError(
            f"no model that comes with Trimtab has {num_experts} experts, top-{top_k}; "
            "say which one it is: --model with a config.json or a checkpoint folder"
        )
    return min(matching, key=lambda model: (model.moe_layers != moe_layers, model.parameters))


def load_model(text: str) -> ModelSpec:
    """Returns the model of a preset's name, or of a path to a `config.json` or a checkpoint.

    Raises:
        InputError: if it is neither, or the file does not describe a MoE model.
    """
    if text in preset_names("model"):
        return ModelSpec.named(text)
    if not Path(text).exists():
        raise InputError(
            f"{text}: neither a model that comes with Trimtab ({', '.join(preset_names('model'))}) nor a file; "
            "expected one of these, a Hugging Face config.json or a checkpoint directory"
        )
    return ModelSpec.from_config(text)


def _read(config: dict[str, Any], where: str) -> ModelSpec:
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config = {**config, **text_config, "model_type": config.get("model_type", text_config.get("model_type"))}

    def count(*keys: str, default: int | None = None, least: int = 1) -> int:
        for key in keys:
            value = config.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
                raise InputError(f"{where}: {key} should be a whole number from {least} to {_LARGEST:,}")
            return value
        if default is None:
            raise InputError(f"{where}: not the config of a MoE model; it should have {' or '.join(keys)}")
        return default

    num_experts = count("num_experts", "n_routed_experts", "num_local_experts")
    top_k = count("num_experts_per_tok", "num_experts_per_token")
    if top_k > num_experts:
        raise InputError(f"{where}: a token uses {top_k} of {num_experts} experts; it should use as many at most")
    hidden_size, expert_width = count("hidden_size"), count("moe_intermediate_size", "intermediate_size")
    layers = count("num_hidden_layers", default=1)
    moe_layers = _moe_layers(config, where, count, layers)
    shared = count("n_shared_experts", default=0, least=0) * expert_width
    attention_parameters, attention_width = _attention(count, hidden_size)
    dtype = str(config.get("torch_dtype") or config.get("dtype")).removeprefix("torch.")
    return ModelSpec(
        str(config.get("model_type") or Path(where).parent.name),
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        expert_width=expert_width,
        weight_bytes=2 if config.get("quantization_config") else _WIDE_TYPES.get(dtype, 2),
        moe_layers=len(moe_layers),
        dense_layers=layers - len(moe_layers),
        dense_width=count("intermediate_size", default=0, least=0) if len(moe_layers) < layers else 0,
        shared_width=shared or count("shared_expert_intermediate_size", default=0, least=0),
        attention_parameters=attention_parameters,
        attention_width=attention_width,
        vocab_size=count("vocab_size", default=0, least=0),
        moe_layer_indices=moe_layers if config.get("num_hidden_layers") else (),
    )


def _moe_layers(config: dict[str, Any], where: str, count: Callable[..., int], layers: int) -> tuple[int, ...]:
    """Indices of layers with experts, from seven keys of model families. A layer is dense if any key says so."""
    first = count("first_k_dense_replace", default=0, least=0)
    step = count("decoder_sparse_step", default=1)
    every = count("interleave_moe_layer_step", default=1)
    listed_layers = _listed(config, where, "moe_layers", int) or range(every - 1, layers, every)
    dense = set(_listed(config, where, "mlp_only_layers", int))
    kinds = _listed(config, where, "mlp_layer_types", str, length=layers) or ["sparse"] * layers
    if isinstance(config.get("moe_layer_freq"), list):
        marks = _listed(config, where, "moe_layer_freq", int, length=layers)
    else:
        frequency = count("moe_layer_freq", default=1)
        marks = [int(layer % frequency == 0) for layer in range(layers)]
    moe_layers = tuple(
        layer
        for layer, (mark, kind) in enumerate(zip(marks, kinds, strict=True))
        if layer >= first
        and (layer + 1) % step == 0
        and layer in listed_layers
        and layer not in dense
        and mark != 0
        and kind != "dense"
    )
    if not moe_layers:
        raise InputError(f"{where}: none of the {layers} layers has experts; expected the config of a MoE model")
    return moe_layers


def _listed(
    config: dict[str, Any], where: str, key: str, kind: type[int] | type[str], *, length: int | None = None
) -> list[Any]:
    values = config.get(key)
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise InputError(f"{where}: {key} should be a list of {'names' if kind is str else 'whole numbers'}")
    if length is not None and len(values) != length:
        raise InputError(f"{where}: {key} has {len(values)} entries; it should have one for each of {length} layers")
    return values


def _attention(count: Callable[..., int], hidden_size: int) -> tuple[int, int]:
    """Weights of a layer's projections, and query heads * (key width + value width of a head); zeros if unknown."""
    heads = count("num_attention_heads", default=0)
    if not heads:
        return 0, 0
    kv_rank = count("kv_lora_rank", default=0, least=0)
    if not kv_rank:
        head = count("head_dim", default=max(1, hidden_size // heads))
        kv_heads = count("num_key_value_heads", default=heads)
        return 2 * hidden_size * (heads + kv_heads) * head, 2 * heads * head
    # Latent attention: queries, keys and values through low ranks; the rotary part of a key is shared by all heads.
    q_rank = count("q_lora_rank", default=0, least=0)
    plain, rotary, value = count("qk_nope_head_dim"), count("qk_rope_head_dim"), count("v_head_dim")
    query = heads * (plain + rotary)
    parameters = q_rank * (hidden_size + query) if q_rank else hidden_size * query
    parameters += hidden_size * (kv_rank + rotary) + kv_rank * heads * (plain + value) + heads * value * hidden_size
    return parameters, heads * (plain + rotary + value)


QWEN3_30B = ModelSpec.named("qwen3-30b-a3b")
