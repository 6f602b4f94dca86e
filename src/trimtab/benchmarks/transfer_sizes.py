"""Models and sizes that `trimtab bench transfer` measures on a GPU and on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.cluster import QWEN3_30B, ModelSpec


@dataclass(frozen=True)
class TransferSizes:
    """Models and sizes for one kind of device.

    Attributes:
        models: models whose experts are measured.
        dtype: of weights and activations.
        tokens_per_expert: measured in `grouped`.
        ranks: of the expert-parallel group; a rank has `num_experts / ranks` experts.
        tokens_per_rank: of an instance, in `critical_path` and `planned_layer`.
        peers: processes that copy from each other in `peer_path`.
        overlap_s: approximate seconds for which copies and compute overlap in `host_path`.
        tolerance: relative difference between results that should be equal.
    """

    models: tuple[ModelSpec, ...]
    dtype: torch.dtype
    tokens_per_expert: tuple[int, ...]
    tokens_per_rank: int
    peers: int
    tolerance: float
    ranks: int = 8
    overlap_s: float = 0.05


GPU = TransferSizes(
    models=(QWEN3_30B, ModelSpec.named("qwen3-235b-a22b")),
    dtype=torch.bfloat16,
    tokens_per_expert=(16, 64, 256, 1024, 4096),
    tokens_per_rank=4096,
    peers=4,
    tolerance=2e-2,
)
CPU = TransferSizes(
    models=(
        ModelSpec("qwen3-30b-a3b/64", 32, 4, hidden_size=256, expert_width=96, weight_bytes=4),
        ModelSpec("qwen3-235b-a22b/64", 32, 4, hidden_size=512, expert_width=192, weight_bytes=4),
    ),
    dtype=torch.float32,
    tokens_per_expert=(4, 16, 64),
    tokens_per_rank=128,
    peers=2,
    tolerance=1e-5,
)
