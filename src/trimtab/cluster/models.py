"""`ModelSpec`: the sizes of a model that a plan and a step's time depend on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import InputError


@dataclass(frozen=True)
class ModelSpec:
    """A MoE model, as its Hugging Face `config.json` describes it.

    Attributes:
        name: what a preset or the config calls it.
        num_experts: routed experts of a layer, E.
        top_k: experts that a token uses.
        hidden_size: width of a token.
        expert_width: inner width of an expert.
        weight_bytes: bytes of one weight, 2 for bf16.
        moe_layers: decoder layers with experts, L.
        dense_layers: decoder layers without.
        dense_width: inner width of the dense layers' feed-forward part.
        shared_width: inner width of a MoE layer's shared experts, all together.
        attention_parameters: weights of one layer's attention projections; 0 for four square ones.
        attention_width: query heads of one layer times the widths of a head's key and value; 0 for twice `hidden_size`.
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

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert in one layer: gate, up and down projections."""
        return 3 * self.hidden_size * self.expert_width

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights in one layer."""
        return self.expert_parameters * self.weight_bytes

    @property
    def dense_parameters(self) -> int:
        """Weights outside the routed experts: attention, shared experts, routers, dense layers, embedding and head."""
        hidden = self.hidden_size
        attention = (self.moe_layers + self.dense_layers) * (self.attention_parameters or 4 * hidden**2)
        beside_experts = self.moe_layers * hidden * (3 * self.shared_width + self.num_experts)
        return attention + beside_experts + hidden * (3 * self.dense_layers * self.dense_width + 2 * self.vocab_size)

    @classmethod
    def from_config(cls, path: str | os.PathLike[str]) -> ModelSpec:
        """Read a `config.json`, or the one in a checkpoint directory.

        Raises:
            InputError: if there is none, or it does not describe a MoE model.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise InputError(f"{file}: no such file; expected a Hugging Face config.json or a checkpoint directory")
        try:
            config = json.loads(file.read_text())
        except (ValueError, OSError) as error:
            raise InputError(f"{file}: not a readable JSON file ({error})") from None
        if not isinstance(config, dict):
            raise InputError(f"{file}: expected a JSON object with the model's config")
        values: dict[str, int] = {}
        for field, keys in _CONFIG_KEYS.items():
            found = [config[key] for key in keys if isinstance(config.get(key), int)]
            if not found:
                raise InputError(f"{file}: not the config of a MoE model; it should have {' or '.join(keys)}")
            values[field] = found[0]
        return cls(name=str(config.get("model_type", file.parent.name)), **values)


QWEN3_30B = ModelSpec("qwen3-30b-a3b", num_experts=128, top_k=8, hidden_size=2048, expert_width=768)

_CONFIG_KEYS = {
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token"),
    "hidden_size": ("hidden_size",),
    "expert_width": ("moe_intermediate_size", "intermediate_size"),
}
