"""How far a result is from the expected one."""

from __future__ import annotations

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The error relative to the norm of the tensor; absolute if the expected tensor is zero."""
    scale = float(expected.detach().norm()) or 1.0
    return float((actual - expected).detach().norm()) / scale
