"""`CalibrationSettings`: model and sizes to measure, and their defaults; on a CPU a small Qwen3-MoE."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from trimtab.cluster import ModelSpec, load_model
from trimtab.cluster.model_names import preset_of
from trimtab.cluster.presets import read_preset
from trimtab.errors import InputError
from trimtab.files import read_small_text
from trimtab.integrations.transformers.families import SUPPORTED_MODEL_TYPES

LAYERS, HIDDEN, WIDTH, EXPERTS, TOP_K = 4, 256, 512, 32, 4
TOKENS, SEQUENCE_LENGTH = 2048, 128
GPU_MODEL = "qwen3-30b-a3b"
GPU_TOKENS = 8192
GPU_SEQUENCE_LENGTH = 1024
CPU_RANKS = 2


def small_config(
    *, layers: int = LAYERS, hidden: int = HIDDEN, width: int = WIDTH, experts: int = EXPERTS, top_k: int = TOP_K
) -> dict[str, Any]:
    """The model's config, as in a `config.json`. `width` is the intermediate size of an expert."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": 1024,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "dtype": "float32",
    }


@dataclass(frozen=True)
class CalibrationSettings:
    """Model and sizes to measure.

    Attributes:
        config: content of the model's `config.json`.
        model: the same model's sizes.
        ranks: local ranks; ignored under torchrun.
        tokens: tokens per rank in a micro-step.
        sequence_length: usual tokens of a sequence.
        name: name of the measured cluster.
        rounds: timed repetitions of each measurement.
    """

    config: dict[str, Any]
    model: ModelSpec
    ranks: int
    tokens: int
    sequence_length: int
    name: str
    rounds: int


def settings_for(
    model: str | None, overrides: Mapping[str, Any] | None = None, *, ranks: int | None, rounds: int, name: str
) -> CalibrationSettings:
    """Settings for this machine.

    Args:
        model: a name, a hub id or a path, as for `load_model`; by default the model of `benchmarks.runtime` on
            a CPU, and Qwen3-30B-A3B on GPUs.
        overrides: keys of the given model's config with other values.
        ranks: all GPUs by default, or 2 on a CPU.
        rounds: timed repetitions of each measurement.
        name: name of the measured cluster.

    Raises:
        InputError: if there is no such model, or its type is not supported.
    """
    on_cuda = torch.cuda.is_available()
    chosen = model or (GPU_MODEL if on_cuda else None)
    changes = overrides or {}
    if changes and chosen is None:
        raise InputError(f"--set {next(iter(changes))}: needs --model")
    given = small_config() if chosen is None else _config_of(chosen, changes)
    if given.get("model_type") not in SUPPORTED_MODEL_TYPES:
        raise InputError(
            f"{chosen}: model type {given.get('model_type')!r} can't be run; use one of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    # With transformers' defaults, so that the sizes are those of the model that runs.
    config = AutoConfig.for_model(**given).to_dict()
    return CalibrationSettings(
        config=config,
        model=_sizes_of(config),
        ranks=ranks or (torch.cuda.device_count() if on_cuda else CPU_RANKS),
        tokens=GPU_TOKENS if on_cuda else TOKENS,
        sequence_length=GPU_SEQUENCE_LENGTH if on_cuda else SEQUENCE_LENGTH,
        name=name,
        rounds=rounds,
    )


def _sizes_of(config: dict[str, Any]) -> ModelSpec:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return ModelSpec.from_config(folder)


def _config_of(chosen: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a model's `config.json`. Raises InputError unless it is the config of an MoE model."""
    # Raises InputError if it is not the config of an MoE model.
    load_model(chosen, overrides)
    preset = None if Path(chosen).exists() else preset_of(chosen)
    text = read_preset("model", preset) if preset else None
    if text is None:
        path = Path(chosen)
        text = read_small_text(path / "config.json" if path.is_dir() else path)
    config: dict[str, Any] = json.loads(text)
    return {key: value for key, value in (config | dict(overrides)).items() if key not in ("hub_ids", "published")}
