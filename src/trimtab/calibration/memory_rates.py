"""Rates of a rank's memory: of large copies, and of an optimizer step."""

from __future__ import annotations

from functools import partial

import torch

from trimtab.calibration.measurement_context import MeasurementContext
from trimtab.cluster.operations import OPTIMIZER_BYTES

# More than caches hold.
CPU_BYTES = 64 << 20
CUDA_BYTES = 1 << 30


def measure_memory(context: MeasurementContext) -> tuple[float, float]:
    """Bytes per second of a large copy (read and written), and of an AdamW step (by `OPTIMIZER_BYTES`). Collective."""
    nbytes = CUDA_BYTES if context.device.type == "cuda" else CPU_BYTES
    source = torch.zeros(nbytes, dtype=torch.uint8, device=context.device)
    weights = torch.nn.Parameter(torch.zeros(nbytes // 16, device=context.device))
    weights.grad = torch.ones_like(weights)
    copy = partial(torch.zeros_like(source).copy_, source)
    taken_s = context.seconds({"copy": copy, "step": torch.optim.AdamW([weights]).step})
    return 2 * nbytes / taken_s["copy"], OPTIMIZER_BYTES * weights.numel() / taken_s["step"]
