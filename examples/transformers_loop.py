"""A user's training loop with a Hugging Face model, balanced by Trimtab.

`python examples/transformers_loop.py` starts two local ranks; under torchrun the process is one rank. The model is
small and random, and the reward is the fraction of even tokens. A real loop calls `session` at the same points.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from trimtab import Schedule
from trimtab.integrations.transformers import distribute_experts, record_routing
from trimtab.launch import launch
from trimtab.runtime import Session

EXPERTS = 8
MICRO_STEPS, MINI_BATCHES = 4, 2  # of an RL step; the optimizer steps after every mini-batch
SAMPLES, PROMPT, RESPONSE = 16, 16, 16  # responses to a prompt (one micro-batch); tokens of each


def train(rl_steps: int = 2) -> None:
    """Train on every rank."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        moe_intermediate_size=64, num_experts=EXPERTS, num_experts_per_tok=2, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    rollout_model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # whole, and the same on every rank

    # Once: keep this rank's experts in the session and drop all others. Then create the optimizer.
    session = Session(num_experts=EXPERTS)
    distribute_experts(model, session)
    replicated = session.replicated_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.register_optimizers(optimizer)  # so that renumber() knows their state

    # The rank and micro-step of every sequence. Here each rank trains on the sequences that it generated, in order.
    ranks = dist.get_world_size()
    schedule = Schedule(
        micro_step=np.tile(np.repeat(np.arange(MICRO_STEPS, dtype=np.int32), SAMPLES), ranks),
        rank=np.repeat(np.arange(ranks, dtype=np.int32), MICRO_STEPS * SAMPLES),
        mini_batch_of_micro_step=np.arange(MICRO_STEPS, dtype=np.int32) * MINI_BATCHES // MICRO_STEPS,
        num_ranks=ranks,
    )
    torch.manual_seed(1 + dist.get_rank())
    for step in range(rl_steps):
        # Rollout with the current weights: sequences, and the experts of every fed token.
        rollout_model.load_state_dict(session.whole_state_dict(model))
        prompts = torch.randint(1, 64, (MICRO_STEPS, PROMPT)).repeat_interleave(SAMPLES, dim=0)
        with record_routing(rollout_model) as record:
            tokens = rollout_model.generate(
                prompts, do_sample=True, max_new_tokens=RESPONSE, min_new_tokens=RESPONSE, eos_token_id=None
            )
        routing = record.trace(tokens, torch.ones_like(prompts))  # last tokens are not fed and have no row
        rewards = (tokens[:, PROMPT:] % 2 == 0).float().mean(dim=1)
        groups = rewards.split(SAMPLES)
        batches = [(t, g - g.mean()) for t, g in zip(tokens.split(SAMPLES), groups, strict=True)]

        # Plan: the routing of all ranks is known, so the whole step is balanced before it runs.
        report = session.plan(routing, schedule)

        # Recompute: log-probabilities before the step. Every rank runs every micro-step, with the recorded experts.
        old = []
        for index, (batch, _) in enumerate(batches):
            with torch.no_grad(), session.micro_step(index):
                old.append(log_probs(model, batch))

        # Update: the loss is a sum over tokens divided by a constant, the tokens of the mini-batch on all ranks.
        constant = ranks * SAMPLES * RESPONSE * MICRO_STEPS // MINI_BATCHES
        total = torch.zeros(())
        for mini_batch in range(MINI_BATCHES):
            for index in schedule.micro_steps_of(mini_batch):
                batch, advantages = batches[index]
                with session.micro_step(index):
                    ratio = (log_probs(model, batch) - old[index]).exp()
                    loss = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
                    loss = loss.sum() / constant
                    loss.backward()
                total += loss.detach()
            session.finish_gradients(replicated)  # sends replica gradients home, sums the others over ranks
            session.clip_gradients(replicated, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()

        dist.all_reduce(total)
        reward = rewards.mean()
        dist.all_reduce(reward)
        if dist.get_rank() == 0:
            print(
                f"step {step}: reward {reward / ranks:.3f}, loss {total:.5f}, {report.replicas} replicas, "
                f"max_vio {report.max_vio_before:.3f} before, {report.max_vio_after:.3f} planned",
                flush=True,
            )


def log_probs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[B, RESPONSE]` of the response's tokens. The last token is not fed, so it has no route."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
    return logits.log_softmax(-1).gather(2, tokens[:, PROMPT:, None])[:, :, 0]


if __name__ == "__main__":
    launch(train, (), ranks=2)
