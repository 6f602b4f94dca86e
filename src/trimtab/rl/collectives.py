"""Collectives over all ranks of a run."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


def reduce(value: float, device: torch.device, operation: Any = dist.ReduceOp.SUM) -> float:
    """The sum, or another reduction, of all ranks' values. Collective."""
    reduced = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, operation)
    return float(reduced)


def gather(value: Value) -> list[Value]:
    """All ranks' values in rank order on rank 0; an empty list on other ranks. Collective."""
    is_first = dist.get_rank() == 0
    values: list[Value] | None = [value] * dist.get_world_size() if is_first else None
    dist.gather_object(value, values)
    return values or []
