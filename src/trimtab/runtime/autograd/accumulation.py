"""`Accumulation`: detects gradients that would be summed over ranks twice without being zeroed in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

GradientState = tuple[weakref.ref[torch.Tensor], int]
"""A gradient tensor and its version."""


class Accumulation:
    """The gradients that `finish_gradients` has summed, and whether they were zeroed since.

    A new accumulation starts with a backward before which all summed gradients were zeroed. This is tested when the
    first MoE layer's backward begins. By then dense layers above it may have added to their gradients. Therefore only
    gradients that are unchanged since the start of the forward are tested.

    Args:
        experts: returns the session's expert parameters.

    Attributes:
        is_open: whether a backward has run since gradients were summed.
    """

    def __init__(self, experts: Callable[[], Sequence[torch.nn.Parameter]]) -> None:
        self._experts = experts
        self._summed: list[torch.nn.Parameter] = []
        self._states: dict[torch.nn.Parameter, GradientState] = {}
        # Whether experts had gradients that were not zero when they were summed.
        self._finished_with: torch.Tensor | None = None
        self._backward: int | None = None
        # For each backward since then, whether a summed gradient was not zero when it began.
        self._began_with: list[torch.Tensor] = []
        self.is_open = False

    def begin_forward(self) -> None:
        """Call it at the start of a forward that may have a backward."""
        if self._summed:
            self._store_states()

    def begin_backward(self, number: int | None) -> None:
        """Call it when a layer's backward begins, before gradients of its experts accumulate. The host does not wait
        for CUDA.

        Args:
            number: the number of the running backward.
        """
        self.is_open = True
        if not self._summed or number == self._backward:
            return
        self._backward = number
        remaining = _any_gradient([parameter for parameter in self._states if self._is_unchanged(parameter)])
        if remaining is None:
            self._summed, self._states = [], {}
        else:
            self._began_with.append(remaining)

    def problem(self, parameters: Sequence[torch.nn.Parameter]) -> Exception | None:
        """The error of summing the gradients of these parameters now, or None."""
        summed = {id(parameter) for parameter in self._summed}
        if not self._are_summed([parameter for parameter in parameters if id(parameter) in summed]):
            return None
        return RuntimeError(
            "finish_gradients() was called for gradients that it has summed over ranks already; call it once before "
            "each optimizer step, and zero the gradients after the step"
        )

    def finish(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Call it when the gradients of these parameters were summed over ranks."""
        self._summed = list(parameters)
        self._finished_with = _any_gradient(self._experts())
        self._backward, self._began_with, self.is_open = None, [], False
        self._store_states()

    def _are_summed(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether gradients of these parameters still contain sums over ranks."""
        if not _is_true(_any_gradient(parameters)):
            return False
        if self._began_with:
            return all(self._began_with)
        if any(parameter.grad is not None and self._is_unchanged(parameter) for parameter in parameters):
            return True
        # No backward of MoE layers has run since, but all gradients were written to. They were zeroed if those of
        # experts were not zero when they were summed and are zero now.
        return not _is_true(self._finished_with) or _is_true(_any_gradient(self._experts()))

    def _store_states(self) -> None:
        parameters = [*self._summed, *self._experts()] if self._summed else []
        self._states = {p: (weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None}

    def _is_unchanged(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a gradient has not been written to since states were stored."""
        if parameter not in self._states or parameter.grad is None:
            return False
        gradient, version = self._states[parameter]
        return gradient() is parameter.grad and parameter.grad._version == version


def _any_gradient(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor | None:
    """Whether any gradient is not zero, as a bool tensor on the device; None if there are no gradients."""
    flags = [parameter.grad.any() for parameter in parameters if parameter.grad is not None]
    return torch.stack(flags).any() if flags else None


def _is_true(flag: torch.Tensor | None) -> bool:
    return flag is not None and bool(flag)
