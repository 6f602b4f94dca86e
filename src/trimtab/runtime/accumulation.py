"""`Accumulation`: gradients are summed over ranks once, between two times that they are zeroed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch


class Accumulation:
    """Remembers which gradients `finish_gradients` has summed.

    Args:
        experts: reads the session's expert parameters.
    """

    def __init__(self, experts: Callable[[], Sequence[torch.nn.Parameter]]) -> None:
        self._experts = experts
        self._summed: list[tuple[torch.nn.Parameter, weakref.ref[torch.Tensor], int]] = []
        self._has_backward = False
        self._still_there: list[torch.Tensor] = []

    def begin_backward(self) -> None:
        """A layer's backward begins, before it adds to the gradients of any expert. On CUDA the host does not wait."""
        if self._has_backward or not self._summed:
            return
        self._has_backward = True
        for parameter, gradient, version in self._summed:
            # Dense layers above may have added to theirs in this backward: only those that nobody wrote to are certain.
            if parameter.grad is not None and parameter.grad is gradient() and parameter.grad._version == version:
                self._still_there.append(torch.ones((), dtype=torch.bool, device=parameter.device))
                return
        self._still_there = [p.grad.any() for p in self._experts() if p.grad is not None]

    def problem(self, parameters: Sequence[torch.nn.Parameter]) -> Exception | None:
        """What is wrong with summing the gradients of these parameters now."""
        if self._has_backward:
            left = any(bool(flag) for flag in self._still_there)
        else:
            summed = {id(parameter): gradient for parameter, gradient, _ in self._summed}
            again = [p.grad for p in parameters if p.grad is not None and id(p) in summed and summed[id(p)]() is p.grad]
            left = any(bool(gradient.any()) for gradient in again)
        if not left:
            return None
        return RuntimeError(
            "finish_gradients() was called for gradients that it has summed over ranks already; call it once before "
            "each optimizer step, and zero the gradients after the step"
        )

    def finish(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The gradients of these parameters were summed over ranks."""
        self._summed = [(p, weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None]
        self._has_backward = False
        self._still_there = []
