"""stub"""

from __future__ import annotations

import torch


def rows_of_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {k: v for k, v in optimizer.state.get(parameter, {}).items() if isinstance(v, torch.Tensor) and v.ndim}
