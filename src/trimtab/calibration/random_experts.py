"""What is measured on a GPU and on the CPU, and the experts that it is measured with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.cluster import QWEN3_30B, ModelSpec
from trimtab.runtime import ExpertWeight, RowGroups, gated_experts


@dataclass(frozen=True)
class Sizes:
    """What is measured on a kind of device.

    Attributes:
        models: whose experts.
        dtype: what is computed in.
        tokens_per_expert: in `grouped`.
        ranks: of the expert-parallel group that is stood for; a rank has its share of a layer's experts.
        tokens_per_rank: of an instance, in `critical_path` and `planned_layer`.
        peers: processes that pull from each other.
        overlap_s: how long copies and compute run at once, about.
        tolerance: relative difference between results that should be equal.
    """

    models: tuple[ModelSpec, ...]
    dtype: torch.dtype
    tokens_per_expert: tuple[int, ...]
    ranks: int
    tokens_per_rank: int
    peers: int
    overlap_s: float
    tolerance: float


GPU = Sizes(
    (QWEN3_30B, ModelSpec.named("qwen3-235b-a22b")),
    torch.bfloat16, (16, 64, 256, 1024, 4096), 8, 4096, 4, 0.05, 2e-2,
)  # fmt: skip
CPU = Sizes(
    (
        ModelSpec("qwen3-30b-a3b/64", 32, 4, hidden_size=256, expert_width=96, weight_bytes=4),
        ModelSpec("qwen3-235b-a22b/64", 32, 4, hidden_size=512, expert_width=192, weight_bytes=4),
    ),
    torch.float32, (4, 16, 64), 8, 128, 2, 0.05, 1e-5,
)  # fmt: skip


def this_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def random_experts(model: ModelSpec, experts: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random weights of some experts: gate and up, down."""
    width, hidden = model.expert_width, model.hidden_size
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
    return [torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5 for shape in shapes]


def run_experts(stacks: list[torch.Tensor], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    return gated_experts()([ExpertWeight(stack) for stack in stacks], rows, groups)
