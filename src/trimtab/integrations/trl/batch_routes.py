"""Tokens of TRL's batches, and their routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.errors import InputError
from trimtab.integrations.transformers import moe_blocks


def check_routes(routes: Sequence[Any], lengths: Sequence[int]) -> None:
    """Raise InputError unless `routed_experts` of a rollout fits completions of these lengths, prompts included."""
    if len(routes) != len(lengths):
        raise InputError(f"routed_experts has {len(routes)} entries for {len(lengths)} completions")
    for number, (ids, length) in enumerate(zip(routes, lengths, strict=True)):
        shape = tuple(torch.as_tensor(ids).shape)
        if len(shape) != 3 or length - shape[0] not in (0, 1):
            raise InputError(
                f"routed_experts of completion {number} has shape {list(shape)}; it should be [n, layers, top_k], with "
                f"n = {length} for its tokens and the prompt's, or {length - 1} without the last one"
            )


def mask_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tokens `[B, T]` bool of a batch without padding."""
    return torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool()


def positions_of(fed: torch.Tensor) -> torch.Tensor:
    """Rows `[n]` int64 of tokens `[B, T]` bool among those that MoE layers are given."""
    return fed.reshape(-1).nonzero()[:, 0]


@contextmanager
def recorded_routes(model: Any, shape: torch.Size) -> Iterator[list[torch.Tensor]]:
    """A context that adds the routes `[B, T, L, K]` of a forward over `shape = [B, T]` tokens to a list."""
    layers: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    hooks = [
        block.experts.register_forward_pre_hook(lambda _experts, inputs: layers.append(inputs[1]))
        for block in moe_blocks(model).values()
    ]
    try:
        yield found
        found.append(torch.stack(layers, dim=1).to(torch.int32).cpu().view(*shape, len(layers), -1))
    finally:
        for hook in hooks:
            hook.remove()
