"""`Calibration`: what to measure, and what is measured where nothing is asked for."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from trimtab.calibration.small_model import SEQUENCE_LENGTH, TOKENS, small_config
from trimtab.cluster import ModelSpec, load_model
from trimtab.cluster.presets import read_preset
from trimtab.errors import InputError
from trimtab.integrations.transformers.families import SUPPORTED_MODEL_TYPES

GPU_MODEL = "qwen3-30b-a3b"
GPU_TOKENS = 8192
GPU_SEQUENCE_LENGTH = 1024
CPU_RANKS = 2


@dataclass(frozen=True)
class Calibration:
    """What to measure.

    Attributes:
        config: of the model, as its `config.json` has it.
        model: the same model's sizes.
        ranks: local ranks, unless torchrun says.
        tokens: of a rank in a micro-step.
        sequence_length: of most of them.
        name: what to call the kind of node.
        rounds: timed repetitions of everything.
    """

    config: dict[str, Any]
    model: ModelSpec
    ranks: int
    tokens: int
    sequence_length: int
    name: str
    rounds: int


def settings_for(model: str | None, *, ranks: int | None, rounds: int, name: str) -> Calibration:
    """Settings for this machine.

    Args:
        model: a name or a path, as `load_model` takes it; what `trimtab bench runtime` runs on a CPU by default.
        ranks: default all GPUs, or 2 on a CPU.

    Raises:
        InputError: if there is no such model, or it can't be run.
    """
    on_cuda = torch.cuda.is_available()
    chosen = model or (GPU_MODEL if on_cuda else None)
    given = small_config() if chosen is None else _config_of(chosen)
    if given.get("model_type") not in SUPPORTED_MODEL_TYPES:
        raise InputError(
            f"{chosen}: model type {given.get('model_type')!r} can't be run; use one of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    # With what transformers takes for granted, so that what runs is what is counted.
    config = AutoConfig.for_model(**given).to_dict()
    return Calibration(
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


def _config_of(chosen: str) -> dict[str, Any]:
    """Raises InputError unless it is the config of a MoE model."""
    load_model(chosen)
    text = read_preset("model", chosen)
    if text is None:
        path = Path(chosen)
        text = (path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config
