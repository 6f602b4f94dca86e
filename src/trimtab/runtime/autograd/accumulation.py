"""`Accumulation`: gradients are summed over ranks once, between two times that they are zeroed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

State = tuple[weakref.ref[torch.Tensor], int]
"""A gradient and its version."""


class Accumulation:
    """Remembers which gradients `finish_gradients` has summed.

    A backward begins another accumulation if no gradient is left as it begins. A gradient is left if it is what it was
    as the forward began, and not zero: dense layers above the MoE layers may have added to theirs in this backward.

    Args:
        experts: reads the session's expert parameters.

    Attributes:
        is_open: whether a backward came since gradients were summed.
    """

    def __init__(self, experts: Callable[[], Sequence[torch.nn.Parameter]]) -> None:
        self._experts = experts
        self._summed: list[torch.nn.Parameter] = []
        self._states: dict[torch.nn.Parameter, State] = {}
        # Whether experts had gradients as they were finished.
        self._finished_with: torch.Tensor | None = None
        self._backward: int | None = None
        # For each backward since, whether a gradient was left as it began.
        self._began_with: list[torch.Tensor] = []
        self.is_open = False

    def begin_forward(self) -> None:
        """A micro-step begins whose backward may come."""
        if self._summed:
            self._note()

    def begin_backward(self, number: int | None) -> None:
        """A layer's backward begins, before it adds to the gradients of its experts. On CUDA the host does not wait.

        Args:
            number: of the running backward.
        """
        self.is_open = True
        if not self._summed or number == self._backward:
            return
        self._backward = number
        left = _any_gradient([parameter for parameter in self._states if self._is_as_noted(parameter)])
        if left is None:
            self._summed, self._states = [], {}
        else:
            self._began_with.append(left)

    def problem(self, parameters: Sequence[torch.nn.Parameter]) -> Exception | None:
        """What is wrong with summing the gradients of these parameters now."""
        summed = {id(parameter) for parameter in self._summed}
        again = [parameter for parameter in parameters if id(parameter) in summed]
        if not self._is_left(again):
            return None
        return RuntimeError(
            "finish_gradients() was called for gradients that it has summed over ranks already; call it once before "
            "each optimizer step, and zero the gradients after the step"
        )

    def finish(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The gradients of these parameters were summed over ranks."""
        self._summed = list(parameters)
        self._finished_with = _any_gradient(self._experts())
        self._backward, self._began_with, self.is_open = None, [], False
        self._note()

    def _is_left(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether summing now would sum gradients twice."""
        if not _is_true(_any_gradient(parameters)):
            return False
        if self._began_with:
            return all(self._began_with)
        if any(parameter.grad is not None and self._is_as_noted(parameter) for parameter in parameters):
            return True
        # No backward through the layers since, but gradients were written to. Those of experts tell whether they were
        # zeroed, if there were some.
        return not _is_true(self._finished_with) or _is_true(_any_gradient(self._experts()))

    def _note(self) -> None:
        parameters = [*self._summed, *self._experts()] if self._summed else []
        self._states = {p: (weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None}

    def _is_as_noted(self, parameter: torch.nn.Parameter) -> bool:
        if parameter not in self._states or parameter.grad is None:
            return False
        gradient, version = self._states[parameter]
        return gradient() is parameter.grad and parameter.grad._version == version


def _any_gradient(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor | None:
    """Whether any gradient is not zero: a bool on the device; None if there are no gradients."""
    flags = [parameter.grad.any() for parameter in parameters if parameter.grad is not None]
    return torch.stack(flags).any() if flags else None


def _is_true(flag: torch.Tensor | None) -> bool:
    return flag is not None and bool(flag)
