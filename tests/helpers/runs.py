"""Small runs of `trimtab train`: a tiny model that they start fast with, their command, their processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from trimtab.rl.demo_model import save_checkpoint
from trimtab.rl.task import build_tokenizer


def save_tiny_model(directory: Path) -> None:
    """A random Qwen3-MoE of 2 layers with 8 experts."""
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_checkpoint(config, model.state_dict(), tokenizer, directory)


def train_command(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "trimtab.cli.main", "train", "--out", str(out), *more]


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """A run's metrics, step by step, but for times and what the machine had left."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if not name.endswith(("_s", "free_bytes"))} for line in lines]


def processes_under(leader: int) -> list[int]:
    """Living processes of the session that `leader` leads, without itself."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state != "Z" and int(stat.parent.name) != leader:
            found.append(int(stat.parent.name))
    return sorted(found)
