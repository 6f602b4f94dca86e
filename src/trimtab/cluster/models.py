"""`ModelSpec`: sizes of a model, read from presets or a Hugging Face `config.json`."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cluster.attention import AttentionLayers, LayerAttention, mean_attention
from trimtab.cluster.model_names import hub_ids, preset_of
from trimtab.cluster.presets import preset_names, read_preset
from trimtab.errors import InputError
from trimtab.files import read_small_text

if TYPE_CHECKING:
    from trimtab.cluster.model_config import ConfigReading

log = logging.getLogger("trimtab")
# Of a checkpoint, in Hugging Face's and in Mistral's own form.
CONFIG_FILES = ("config.json", "params.json")


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
        shared_width: inner width of what every token passes beside a MoE layer's routed experts, all together: shared
            experts, or LongCat's two dense feed-forward parts.
        attention_parameters: weights of one layer's attention projections. 0: unknown, four `hidden_size` x
            `hidden_size` projections are assumed.
        attention_width: query heads of one layer * (key width + value width of a head). 0: unknown, `2 * hidden_size`
            is assumed.
        vocab_size: rows of the embedding and of the output head.
        attention: attention blocks by kind, if layers differ or not all have full attention; the two sizes above, and
            those of the cache, then don't count.
        reach: keys that a query attends to at most in layers of limited attention: the window, the chunk, or the tokens
            that an indexer selects. 0 without such layers.
        feed_forward_matrices: of an expert and of other feed-forward parts: gate, up and down; 2 without a gate.
        latent_size: width of tokens at the routed experts, if projected there (Nemotron 3 Super); 0: `hidden_size`.
        zero_experts: further choices of the router, without weights (LongCat). `top_k` counts them in.
        expert_groups, groups_per_token: the router first chooses so many of the groups that the experts of a layer are
            divided into, in order of their ids, and a token's experts only in these (DeepSeek-V3). 1 and 1: no groups.
        attention_heads: query heads, which tensor parallelism divides; 0: unknown.
        tied_embedding: the output head has the embedding's weights.
        cache_width: values of a token in one layer's KV cache. 0: unknown, `key_value_width` is assumed.
        cache_heads: key and value heads; 0 with latent attention, or unknown.
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
    attention: tuple[AttentionLayers, ...] = ()
    reach: int = 0
    feed_forward_matrices: int = 3
    latent_size: int = 0
    zero_experts: int = 0
    tied_embedding: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    attention_heads: int = 0
    cache_width: int = 0
    cache_heads: int = 0

    @property
    def row_width(self) -> int:
        """Width of a token at the routed experts, and on its way to them."""
        return self.latent_size or self.hidden_size

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert in one layer."""
        return self.feed_forward_matrices * self.row_width * self.expert_width

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights in one layer."""
        return self.expert_parameters * self.weight_bytes

    @property
    def shared_parameters(self) -> int:
        """Weights of a MoE layer's shared experts, and of the projections to and from the routed ones' width."""
        return (self.feed_forward_matrices * self.shared_width + 2 * self.latent_size) * self.hidden_size

    @property
    def router_parameters(self) -> int:
        """Weights of a MoE layer's router."""
        return self.hidden_size * (self.num_experts + self.zero_experts)

    @property
    def parameters(self) -> int:
        """All weights without biases and norms. Embedding and output head both count, unless tied."""
        embeddings = (1 if self.tied_embedding else 2) * self.vocab_size * self.hidden_size
        experts = self.num_experts * self.expert_parameters
        return self.moe_layers * experts + self._parameters_of_layers + embeddings

    @property
    def dense_parameters(self) -> int:
        """Weights outside the routed experts."""
        return self.parameters - self.moe_layers * self.num_experts * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with; not the embedding, which is a lookup.

        With zero experts a mean: of a token's choices as many are real experts as of all choices.
        """
        experts = self.top_k * self.num_experts * self.expert_parameters // (self.num_experts + self.zero_experts)
        return self.moe_layers * experts + self._parameters_of_layers + self.vocab_size * self.hidden_size

    @property
    def attention_blocks(self) -> tuple[AttentionLayers, ...]:
        """Attention blocks by kind, also if all are alike."""
        parameters, width = self.attention_parameters or 4 * self.hidden_size**2, self.attention_width
        layers = self.moe_layers, self.dense_layers
        cache = self.cache_width, self.cache_heads
        alike = AttentionLayers("full", *layers, parameters, width or 2 * self.hidden_size, 0, 0, *cache)
        return self.attention or (alike,)

    @property
    def moe_attention(self) -> LayerAttention:
        """Attention of a layer with experts, the mean of all."""
        return mean_attention(self.attention_blocks, self.moe_layers, moe=True)

    @property
    def dense_attention(self) -> LayerAttention:
        """Attention of a layer without experts, the mean of all."""
        return mean_attention(self.attention_blocks, self.dense_layers, moe=False)

    @property
    def key_value_width(self) -> float:
        """Keys and values of a token in a layer with experts, the mean of all: what context parallelism exchanges."""
        blocks = [block for block in self.attention_blocks if block.width]
        projected = [block.parameters // self.hidden_size - block.width for block in blocks]
        # Latent attention expands them to all heads.
        widths = [more if more >= 0 else block.width for more, block in zip(projected, blocks, strict=True)]
        total = sum(block.in_moe_layers * width for block, width in zip(blocks, widths, strict=True))
        return total / max(1, self.moe_layers)

    @property
    def chunked(self) -> bool:
        """True if `reach` is the size of chunks."""
        return any(block.kind == "chunk" for block in self.attention)

    @property
    def _parameters_of_layers(self) -> int:
        """Weights of all decoder layers outside the routed experts."""
        attention = sum(
            (block.in_moe_layers + block.in_dense_layers) * block.parameters for block in self.attention_blocks
        )
        feed_forward = self.feed_forward_matrices * self.hidden_size * self.dense_width
        moe = self.moe_layers * (self.shared_parameters + self.router_parameters)
        return attention + moe + self.dense_layers * feed_forward

    @classmethod
    def named(cls, name: str) -> ModelSpec:
        """Returns the preset of this name, such as `qwen3-30b-a3b`, or of its hub id, such as `Qwen/Qwen3-30B-A3B`.

        Raises:
            InputError: if there is none; it lists the names.
        """
        preset = preset_of(name)
        if preset is None:
            raise InputError(f"{name}: no such model; Trimtab has {', '.join(preset_names('model'))}")
        return _preset(preset, {})[0]

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> ModelSpec:
        """Read a `config.json`, or the one in a checkpoint directory.

        A line is logged if there are keys that look like sizes and are not read, or the model's type is unknown. See
        `read_model`.

        Args:
            overrides: keys of the config with other values.

        Raises:
            InputError: if there is none, or it does not describe a MoE model.
        """
        return _logged(*read_checkpoint(path, overrides))


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


def load_model(
    text: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None, *, routing_alone: bool = False
) -> ModelSpec:
    """Returns the model of `read_model`, and logs a line if it may not be read as meant."""
    return _logged(*read_model(text, overrides, routing_alone=routing_alone))


def read_model(
    text: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None, *, routing_alone: bool = False
) -> tuple[ModelSpec, ConfigReading]:
    """Returns the model of a preset's name, a path to a `config.json` or a checkpoint, or a hub id, and what was read.

    Of a multimodal model, the language model in `text_config` is read. Missing keys keep the value for unknown; without
    a number of layers there is one MoE layer.

    Args:
        text: a path comes before a hub id.
        overrides: keys of the config with other values.
        routing_alone: leave the sizes of attention unknown where they can't be read.

    Raises:
        InputError: if it is none of these, the file does not describe a MoE model, or an override is of no key that is
            read.
    """
    name = os.fspath(text)
    preset = name if name in preset_names("model") else None
    if preset is None and not Path(name).exists():
        preset = preset_of(name)
        if preset is None:
            near = difflib.get_close_matches(name.lower(), [known.lower() for known in hub_ids()], 3)
            nearest = ", ".join(known for known in hub_ids() if known.lower() in near)
            names = f"nearest: {nearest}" if nearest else ", ".join(preset_names("model"))
            raise InputError(
                f"{name}: neither a model that comes with Trimtab ({names}) nor a file; "
                "expected one of these, a Hugging Face config.json or a checkpoint directory"
            )
    return _preset(preset, overrides or {}) if preset else read_checkpoint(name, overrides, routing_alone=routing_alone)


def _preset(name: str, overrides: Mapping[str, Any]) -> tuple[ModelSpec, ConfigReading]:
    from trimtab.cluster.model_config import read_sizes

    text = read_preset("model", name)
    assert text is not None
    sizes, reading = read_sizes(json.loads(text), name, overrides)
    return replace(ModelSpec(**sizes), name=name), reading


def read_checkpoint(
    path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None, *, routing_alone: bool = False
) -> tuple[ModelSpec, ConfigReading]:
    """As `read_model`, of a `config.json` or a checkpoint directory alone."""
    from trimtab.cluster.model_config import read_sizes

    file = Path(path)
    if file.is_dir():
        names = [name for name in CONFIG_FILES if (file / name).is_file()]
        file /= names[0] if names else CONFIG_FILES[0]
    if not file.is_file():
        raise InputError(f"{file}: no such file; expected a Hugging Face config.json or a checkpoint directory")
    text = read_small_text(file)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not a readable JSON file ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{file}: expected a JSON object with the model's config")
    sizes, reading = read_sizes(config, str(file), overrides or {}, routing_alone=routing_alone)
    return ModelSpec(**sizes), reading


def _logged(model: ModelSpec, reading: ConfigReading) -> ModelSpec:
    if reading.text:
        log.warning(reading.text)
    return model


@cache
def default_model() -> ModelSpec:
    """Returns Qwen3-30B-A3B, whose costs count where no model is known."""
    return ModelSpec.named("qwen3-30b-a3b")
