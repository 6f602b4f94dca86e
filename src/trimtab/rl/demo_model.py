"""The model to train: a small random Qwen3-MoE, or a local Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from trimtab.errors import InputError
from trimtab.integrations.transformers import SUPPORTED_MODEL_TYPES
from trimtab.rl.config import TrainConfig
from trimtab.rl.task import TASKS, build_tokenizer, characters_of


def load_tokenizer(directory: Path | None, task: str = TrainConfig.task) -> Any:
    """The task's tokenizer, or that of a checkpoint.

    Raises:
        InputError: if the checkpoint has none, or it can't write the task's problems.
    """
    operation = TASKS[task]
    if directory is None:
        return build_tokenizer(operation)
    with _reading(directory, "no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        config = directory / "tokenizer_config.json"
        stored = json.loads(config.read_text()) if config.exists() else tokenizer.init_kwargs
    # Loading adds to what is in the file, such as how it was loaded. A resumed run stores the same as any other.
    tokenizer.init_kwargs = {name: value for name, value in tokenizer.init_kwargs.items() if name in stored}
    # Also where padding stands for unknown characters.
    unknown = {tokenizer.unk_token_id, tokenizer.pad_token_id}
    for character in characters_of(operation):
        if unknown & set(tokenizer(character, add_special_tokens=False)["input_ids"]):
            raise InputError(f"{directory}: its tokenizer has no token for {character!r}, which --task {task} needs")
    return tokenizer


def load_config(directory: Path | None, tokenizer: Any, expert_width: int = TrainConfig.expert_width) -> Any:
    """The model's config: a checkpoint's, or one of 2 MoE layers with 8 experts, top-1, that trains on 2 CPU cores.

    Args:
        directory: of a checkpoint; None for the small model.
        tokenizer: of the model.
        expert_width: inner width of the small model's experts.

    Raises:
        InputError: if the directory holds no config of a supported model.
    """
    if directory is None:
        return Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=512,
            moe_intermediate_size=expert_width,
            num_experts=8,
            num_experts_per_tok=1,
            norm_topk_prob=False,
            max_position_embeddings=512,
            initializer_range=0.05,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    with _reading(directory, "not a usable model config"):
        config = AutoConfig.from_pretrained(directory)
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
    with _reading(directory, "its weights can't be loaded"):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def save_checkpoint(config: Any, state: dict[str, torch.Tensor], tokenizer: Any, directory: Path) -> None:
    """Write model and tokenizer in the layout that vanilla transformers loads.

    Args:
        config, tokenizer: of the model.
        state: weights in logical expert order. They are not copied in memory.
        directory: to write to.
    """
    disable_progress_bar()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=next(iter(state.values())).dtype)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _reading(directory: Path, problem: str) -> Iterator[None]:
    """Raise InputError, with the first line of the reason, if the checkpoint is missing or reading it fails."""
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory}: no config.json there; --model should be a Hugging Face checkpoint directory")
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{directory}: {problem} ({reason})") from None
