"""`LateCopies`: replaces the copying thread, so that a missing wait is always detected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trimtab.runtime.transfer.copy_engine import Wait


class LateCopies:
    """Copies when the target is waited for, which is the last allowed moment."""

    def __init__(self) -> None:
        self._late: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Wait:
        for target, _ in pairs:
            waiting = [other for late in self._late.values() for other, _ in late]
            assert all(target.data_ptr() != other.data_ptr() for other in waiting), "two copies into one slot"
        number = max(self._late, default=0) + 1
        self._late[number] = [*pairs]

        def wait() -> None:
            for target, source in self._late.pop(number):
                # Like the copying thread, without a new version of the target.
                np.copyto(target.view(torch.uint8).numpy(), source.detach().view(torch.uint8).numpy())

        return wait
