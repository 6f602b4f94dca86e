"""Warm start: a short supervised phase, so that RL starts from a model that solves some problems."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.integrations.transformers import moe_blocks
from trimtab.integrations.transformers.families import family_of
from trimtab.rl.config import TrainConfig
from trimtab.rl.losses import token_log_probs
from trimtab.rl.task import TASKS, draw_demonstration
from trimtab.runtime import Session

# The default of `router_aux_loss_coef` in transformers. Experts may specialise.
BALANCE_WEIGHT = 0.001


def warm_start(
    model: Any,
    session: Session,
    replicated: list[torch.nn.Parameter],
    tokenizer: Any,
    config: TrainConfig,
    on_step: Callable[[float], None],
) -> None:
    """Train on demonstrations, without a plan: their routing is not known, so layers follow the router. Collective.

    Args:
        replicated: the model's parameters outside experts.
        on_step: called after every step with this rank's loss.
    """
    rng = random.Random(f"warm start {config.seed}")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.warm_start_learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.warm_start_learning_rate, total_steps=config.warm_start_steps + 1, pct_start=0.1
    )
    device = next(model.parameters()).device
    for _ in range(config.warm_start_steps):
        demonstrations = [draw_demonstration(rng, TASKS[config.task]) for _ in range(config.warm_start_batch)]
        mine = [(problem.prompt, response) for problem, response in demonstrations[session.rank :: session.num_ranks]]
        tokens, fed, response_mask = _encode(tokenizer, mine, device)
        targets = tokens[:, 1:]
        with session.live_micro_step(positions=fed), recorded_routers(model) as routed:
            log_probs = token_log_probs(model(input_ids=tokens[:, :-1], use_cache=False).logits, targets)
            loss = -(log_probs * response_mask).sum() / response_mask.sum()
            balance = sum(load_balancing_loss(logits[fed], ids[fed]) for logits, ids in routed)
            # All ranks have equal weight; the constant is known before the step.
            ((loss + BALANCE_WEIGHT * balance) / session.num_ranks).backward()
        session.finish_gradients(replicated)
        session.clip_gradients(replicated, config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(float(loss.detach()))


@contextmanager
def recorded_routers(model: Any) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """A list of the `(logits [T, E], ids [T, K])` of all routers that run in the context."""
    routed: list[tuple[torch.Tensor, torch.Tensor]] = []
    router = family_of(model.config).router
    hooks = [
        getattr(block, router).register_forward_hook(lambda _router, _args, output: routed.append(output[::2]))
        for block in moe_blocks(model).values()
    ]
    try:
        yield routed
    finally:
        for hook in hooks:
            hook.remove()


def load_balancing_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The auxiliary loss of Switch Transformers (arXiv 2101.03961) of one layer; 1 if all experts are equally likely.

    Args:
        logits: `[T, E]` of the router.
        ids: `[T, K]` chosen experts.
    """
    num_experts = logits.shape[1]
    fraction_E = torch.bincount(ids.flatten(), minlength=num_experts) / ids.numel()
    return num_experts * (fraction_E * logits.softmax(dim=-1).mean(dim=0)).sum()


def _encode(
    tokenizer: Any, batch: list[tuple[str, str]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors of (prompt, response) pairs, padded on the right.

    Returns:
        Tokens `[B, T + 1]`; positions `[n]` of fed tokens among all B * T rows; `[B, T]` float32, 1 where the target
        belongs to the response.
    """
    texts = [prompt + response for prompt, response in batch]
    tokens = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    prompt_lengths = torch.tensor([len(tokenizer(prompt)["input_ids"]) for prompt, _ in batch])
    present = tokens["attention_mask"].bool()
    response = (torch.arange(present.shape[1]) >= prompt_lengths[:, None]) & present
    # A token is fed if another one follows it.
    fed = present[:, 1:].flatten().nonzero().squeeze(1)
    return tokens["input_ids"].to(device), fed.to(device), response[:, 1:].float().to(device)
