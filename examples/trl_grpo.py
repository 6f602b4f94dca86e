"""TRL's GRPO trainer of a model in FSDP2 and expert parallelism, with balanced experts.

`TrimtabGRPOTrainer` in place of `GRPOTrainer`, and `ep_implementation="trimtab"`, are the only changes.

`torchrun --nproc-per-node 2 examples/trl_grpo.py` takes half a minute on 2 CPU cores, and a minute more the first time,
when kernels are compiled. On GPUs use it or `accelerate launch --multi_gpu`; on CPUs `accelerate launch` needs MPI for
several processes. The model is small and random, and the reward is the fraction of even digits.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3MoeConfig,
    TrainerCallback,
)
from transformers.distributed import DistributedConfig
from trl import GRPOConfig

from trimtab.integrations.trl import TrimtabGRPOTrainer

ALPHABET = "0123456789abcdefghij+<|>^=,~."


def build_tokenizer() -> Any:
    """A token for each character; "." ends a text."""
    letters = {token: index for index, token in enumerate(["<pad>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=".", padding_side="left")


def reward(completions: list[str], **_: Any) -> list[float]:
    """The fraction of even digits."""
    return [sum(letter in "02468" for letter in text) / max(len(text), 1) for text in completions]


class PrintSteps(TrainerCallback):
    """Prints a line for every optimizer step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(
                f"step {state.global_step}: reward {logs['reward']:.3f}, loss {logs['loss']:.5f}, "
                f"{logs['trimtab/replicas']:.0f} replicas, max_vio {logs['trimtab/max_vio_before']:.3f} before, "
                f"{logs['trimtab/max_vio_after']:.3f} planned",
                flush=True,
            )


def main() -> None:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list("0123456789+="), 16)) for _ in range(64)]
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    folder, ranks = tempfile.gettempdir() + f"/trimtab-trl-{os.getppid()}", dist.get_world_size()
    if dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    dist.barrier()
    sharded = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="trimtab")
    trainer = TrimtabGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=sharded),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[PrintSteps()],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=not torch.cuda.is_available(), bf16=False, max_steps=6,
            per_device_train_batch_size=16, gradient_accumulation_steps=4, num_generations=16, learning_rate=3e-3,
            max_completion_length=16, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if trainer.accelerator.is_main_process:
        steps = [log for log in trainer.state.log_history if "loss" in log]
        before, after, planning, step = (
            np.median([log[name] for log in steps])
            for name in ("trimtab/max_vio_before", "trimtab/max_vio_after", "trimtab/planning_s", "step_time")
        )
        replicas = sum(log["trimtab/replicas"] for log in steps)
        print(
            f"The busiest rank had {before:.0%} more rows than the mean before planning, {after:.0%} after it. "
            f"{replicas:.0f} replicas in {len(steps)} steps; a plan took "
            f"{planning * 1e3:.0f} ms, a step with its rollout {step:.2f} s."
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
