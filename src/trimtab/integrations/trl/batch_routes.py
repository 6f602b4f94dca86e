"""Tokens of TRL's batches, and their routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.integrations.transformers import moe_blocks, num_experts
from trimtab.integrations.transformers.families import top_k
from trimtab.trace import RoutingTrace
from trimtab.trace.formats.from_memory import from_vllm
from trimtab.trace.formats.records import ImportOptions


def rollout_routes(outputs: Any, model: Any) -> list[Array]:
    """What a `rollout_func` returns as `routed_experts`: for each completion `[n, L, K]` int32, -1 where unknown.

    Args:
        outputs: what vLLM's `LLM.generate` returned with `enable_return_routed_experts=True`; or a `RoutingTrace` of
            the completions, as `record_routing` makes it of a model's own `generate`.
        model: the trained model, of which the routes are.

    Raises:
        InputError: naming the completion, if it has no routes, or they are not of this model.
    """
    trace = outputs
    if not isinstance(outputs, RoutingTrace):
        config, layers = model.config, tuple(moe_blocks(model))
        known = {"num_layers": config.num_hidden_layers, "moe_layers": layers, "top_k": top_k(config)}
        trace = from_vllm(outputs, ImportOptions(num_experts=num_experts(config), **known))
    whole = np.where(trace.expert_ids == trace.no_route, -1, trace.expert_ids.astype(np.int32))
    return np.split(whole, trace.sequence_starts[1:-1])


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
