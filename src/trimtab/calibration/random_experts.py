"""Random experts to measure with: their weights, a layer of them in a session, and its inputs."""

from __future__ import annotations

import torch

from trimtab.cluster import ModelSpec
from trimtab.runtime import ExpertLayer, ExpertWeight, RowGroups, Session, gated_experts
from trimtab.trace import RoutingTrace


def this_device() -> torch.device:
    """This rank's CUDA device, or the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def random_experts(model: ModelSpec, experts: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random weights of some experts: gate and up `[experts, 2 * width, hidden]`, down `[experts, hidden, width]`."""
    width, hidden = model.expert_width, model.hidden_size
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
    return [torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5 for shape in shapes]


def run_experts(stacks: list[torch.Tensor], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Outputs `[N, hidden]` of rows that are grouped by expert."""
    return gated_experts()([ExpertWeight(stack) for stack in stacks], rows, groups)


def add_random_layer(session: Session, model: ModelSpec, dtype: torch.dtype, device: torch.device) -> ExpertLayer:
    """Add a layer of random experts to a session."""
    stacks = random_experts(model, len(session.home_experts), dtype, device)
    return session.add_layer([torch.nn.Parameter(stack) for stack in stacks], gated_experts())


def random_inputs(
    trace: RoutingTrace, model: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of one layer for all tokens of a trace.

    Returns:
        Hidden states `[T, hidden]` that need a gradient, live ids `[T, K]` that replay replaces, router weights
        `[T, K]`, and a gradient of the outputs `[T, hidden]`.
    """
    shape = (trace.num_tokens, model.hidden_size)
    hidden, gradient = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    live_ids = torch.zeros(trace.num_tokens, trace.top_k, dtype=torch.int64, device=device)
    weights = torch.rand(live_ids.shape, dtype=dtype, device=device).softmax(dim=-1)
    return hidden.requires_grad_(), live_ids, weights, gradient
