"""Supervised fine-tuning of a Hugging Face model, balanced by Trimtab from the live routing: nothing is recorded.

`python examples/sft_live.py` starts two local ranks; under torchrun the process is one rank.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from trimtab.integrations.transformers import distribute_experts
from trimtab.launch import launch
from trimtab.runtime import Session

STEPS, MICRO_STEPS, BATCH, LENGTH = 6, 2, 16, 64  # sequences of a rank in a micro-step; tokens of the longest
POPULARITY = 1 / torch.arange(1, 64) ** 1.5  # of tokens, which skews the routing


def train() -> None:
    """Train on every rank. The model learns to repeat each token."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # whole, and the same on every rank
    session = Session(num_experts=8, mode="live", policy="quota")
    distribute_experts(model, session)
    replicated = session.replicated_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        total = torch.zeros(())
        for _ in range(MICRO_STEPS):
            tokens = 1 + torch.multinomial(POPULARITY, BATCH * LENGTH, replacement=True).view(BATCH, LENGTH)
            mask = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1))  # padding on the right
            positions = mask.flatten().nonzero()[:, 0]  # keeps padding out of the experts
            with session.live_micro_step(positions=positions):
                logits = model(input_ids=tokens * mask, attention_mask=mask.long(), use_cache=False).logits
            loss = F.cross_entropy(logits[mask], tokens[mask], reduction="sum")
            loss = loss / (MICRO_STEPS * BATCH * LENGTH * dist.get_world_size())  # a constant of the whole step
            loss.backward()
            total += loss.detach()
        session.finish_gradients(replicated)  # sends replica gradients home, sums the others over ranks
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        figures = session.take_metrics()
        before, after = figures["live/max_vio_before"], figures["live/max_vio_after"]
        if dist.get_rank() == 0:
            replicas = int(figures["live/replicas"])
            print(f"step {step}: loss {total:.3f}, {replicas} replicas, max_vio {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    launch(train, (), ranks=2)
