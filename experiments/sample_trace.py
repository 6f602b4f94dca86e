"""`python -m experiments.sample_trace`: records examples/sample.parquet, the trace that examples and the gallery use.

The recipe `recipes.rl` trains a small Qwen3-MoE of 8 layers with 32 experts, top-4, on counting, and the routing of its
last steps becomes one file. The model is small and random at first, but the routing is that of a model in RL, in order
of prompts and steps, not drawn from a distribution. About ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from trimtab.trace.store import read_trace, write_trace

SAMPLE = Path(__file__).parents[1] / "examples" / "sample.parquet"
LAYERS, EXPERTS, TOP_K = 8, 32, 4
# RL steps that are trained, and the last of them that are kept.
STEPS, KEPT = 8, 6
# Problems of a step, with 8 responses each.
PROBLEMS = 384


def write_model(directory: Path) -> None:
    """A random model with the tokenizer of counting, as a Hugging Face checkpoint."""
    train(directory / "tokenizer", warm_start_steps=0, steps=0, problems=2, held_out=2)
    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer" / "checkpoints" / "step-00000")
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def train(out: Path, **options: object) -> None:
    """Run the command of `recipes.rl` on counting, which records every step's routing in `out`."""
    options |= {"output": out, "task": "counting", "compare_pairs": 0}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run([sys.executable, "-m", "recipes.rl.train", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/sample"), help="of model and run")
    folder = parser.parse_args().folder
    write_model(folder / "model")
    train(folder / "run", model=folder / "model", steps=STEPS, problems=PROBLEMS, token_budget=4096)
    steps = sorted((folder / "run" / "routing").glob("*.parquet"))[-KEPT:]
    write_trace(read_trace(steps), SAMPLE)


if __name__ == "__main__":
    main()
