"""`Accumulation`: gradients are summed over ranks once, between two times that they are zeroed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch


class Accumulation:
    """Remembers which gradients `finish_gradients` has summed.

    A backward that begins while experts' gradients are all zero begins another accumulation.

    Args:
        experts: reads the session's expert parameters.
    """

    def __init__(self, experts: Callable[[], Sequence[torch.nn.Parameter]]) -> None:
        self._experts = experts
        # By parameter: the gradient, and the version that it had.
        self._summed: dict[torch.nn.Parameter, tuple[weakref.ref[torch.Tensor], int]] = {}
        # Whether experts had gradients then.
        self._finished_with: torch.Tensor | None = None
        self._backward: int | None = None
        # For each backward since, whether experts had gradients as it began.
        self._began_with: list[torch.Tensor] = []

    def begin_backward(self, number: int | None) -> None:
        """A layer's backward begins, before it adds to the gradients of its experts. On CUDA the host does not wait.

        Args:
            number: of the running backward.
        """
        if not self._summed or number == self._backward:
            return
        self._backward = number
        trained = [parameter for parameter in self._experts() if parameter.requires_grad]
        if not trained:
            # This backward may have added to others already, but not to those that still have their version.
            trained = [
                p
                for p, (_, version) in self._summed.items()
                if p.grad is not None and self._was_summed(p) and p.grad._version == version
            ]
        left = _any_gradient(trained)
        if left is None:
            self._summed = {}
        else:
            self._began_with.append(left)

    def problem(self, parameters: Sequence[torch.nn.Parameter]) -> Exception | None:
        """What is wrong with summing the gradients of these parameters now."""
        again = [p.grad for p in parameters if p.grad is not None and self._was_summed(p)]
        if not any(gradient.any() for gradient in again):
            return None
        if self._began_with:
            left = all(self._began_with)
        else:
            # No backward through the layers since. Gradients of experts, if there were any, tell whether it was zeroed.
            experts = _any_gradient(self._experts())
            left = self._finished_with is None or not self._finished_with or (experts is not None and bool(experts))
        if not left:
            return None
        return RuntimeError(
            "finish_gradients() was called for gradients that it has summed over ranks already; call it once before "
            "each optimizer step, and zero the gradients after the step"
        )

    def finish(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The gradients of these parameters were summed over ranks."""
        self._summed = {p: (weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None}
        self._finished_with = _any_gradient(self._experts())
        self._backward, self._began_with = None, []

    def _was_summed(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._summed and self._summed[parameter][0]() is parameter.grad


def _any_gradient(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor | None:
    """Is any gradient not zero? A bool on the device; None if there are no gradients."""
    flags = [parameter.grad.any() for parameter in parameters if parameter.grad is not None]
    return torch.stack(flags).any() if flags else None
