"""The model to train: a small Qwen3-MoE of our own, or a local Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from trimtab.errors import InputError
from trimtab.integrations.transformers import SUPPORTED_MODEL_TYPES
from trimtab.rl.task import build_tokenizer


def load_tokenizer(directory: Path | None) -> Any:
    """The task's own tokenizer, or the checkpoint's. Raises InputError if the checkpoint has none."""
    if directory is None:
        return build_tokenizer()
    _need_checkpoint(directory)
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"{directory}: no usable tokenizer ({_first_line(error)})") from None


def load_config(directory: Path | None, tokenizer: Any) -> Any:
    """The model's config: a checkpoint's, or one of 4 MoE layers with 32 experts, top-4, that trains on 2 CPU cores.

    Raises:
        InputError: if the directory holds no config of a supported model.
    """
    if directory is None:
        return Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=512,
            moe_intermediate_size=384,
            num_experts=32,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            max_position_embeddings=512,
            initializer_range=0.05,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    _need_checkpoint(directory)
    try:
        config = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise InputError(f"{directory}: not a usable model config ({_first_line(error)})") from None
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise InputError(
            f"{directory}: model type {config.model_type!r} is not supported; use one of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    return config


def load_model(directory: Path | None, config: Any, dtype: torch.dtype) -> Any:
    """A whole model on the CPU: the checkpoint's weights, or random ones from torch's current seed."""
    if directory is None:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{directory}: its weights can't be loaded ({_first_line(error)})") from None


def save_checkpoint(config: Any, state: dict[str, torch.Tensor], tokenizer: Any, directory: Path) -> None:
    """Write model and tokenizer in the layout that vanilla transformers loads.

    Args:
        state: in logical expert order. It is written as it is, without another copy in memory.
    """
    disable_progress_bar()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=next(iter(state.values())).dtype)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _need_checkpoint(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory}: no config.json there; --model should be a Hugging Face checkpoint directory")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
