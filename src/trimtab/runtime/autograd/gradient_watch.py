"""`GradientWatch`: detects gradients of experts that others take or change while a backward runs or ends.

Hooks on autograd's nodes may move a gradient to other memory. `DistributedDataParallel` averages gradients when the
backward ends, although every rank has other experts. Replica gradients would be lost, or added to what was sent before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from trimtab.runtime.autograd.torch_engine import will_run

REMEDY = (
    "no other module may reduce or move gradients of experts: name them in the model's attribute "
    "_ddp_params_and_buffers_to_ignore before DistributedDataParallel gets the model, and add layers whose gradients "
    "a framework keeps in buffers with add_framework_layer()"
)


class GradientWatch:
    """The gradients of one backward.

    Attributes:
        is_thorough: also compare the addresses at which autograd left gradients, by hooks on all parameters.
    """

    def __init__(self) -> None:
        self.is_thorough = True
        # Parameters that accumulate gradients in this backward, with the number of their layer.
        self._expected: dict[torch.nn.Parameter, int] = {}
        self._addresses: dict[torch.nn.Parameter, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._left: list[tuple[int, int] | None] = []

    def expect(self, layer: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Call it in a layer's backward, before gradients of these parameters accumulate."""
        for parameter in parameters:
            if parameter not in self._expected and _accumulates(parameter):
                self._expected[parameter] = layer
                if self.is_thorough:
                    # It runs before hooks on the node.
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._note_address))

    def missing(self) -> RuntimeError | None:
        """The error if a gradient is not where autograd accumulated it. Call it when the backward ends."""
        self._remove_hooks()
        for parameter, layer in self._expected.items():
            address, gradient = self._addresses.pop(parameter, None), parameter.grad
            if address is not None and (gradient is None or gradient.data_ptr() != address):
                return RuntimeError(
                    f"MoE layer {layer}: a hook has moved the gradient of an expert tensor {list(parameter.shape)} "
                    f"during backward; {REMEDY}"
                )
        return None

    def leave(self) -> None:
        """Note the gradients when they are complete, before others' callbacks of the backward run."""
        self._left = [_state(parameter) for parameter in self._expected]

    def check_left(self) -> None:
        """Raises RuntimeError if gradients were changed since `leave`. Call it when all callbacks have run."""
        expected, self._expected = self._expected, {}
        for (parameter, layer), state in zip(expected.items(), self._left, strict=True):
            if _state(parameter) != state:
                raise RuntimeError(
                    f"MoE layer {layer}: the gradient of an expert tensor {list(parameter.shape)} was changed at the "
                    f"end of the backward; {REMEDY}"
                )

    def drop(self) -> None:
        """Call it after a failed backward."""
        self._remove_hooks()
        self._expected, self._addresses = {}, {}

    def _note_address(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.grad is not None
        self._addresses[parameter] = parameter.grad.data_ptr()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def has_hooks(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter has hooks on its gradient, but for those of this module."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or not all(
        isinstance(getattr(hook, "__self__", None), GradientWatch) for hook in hooks
    )


def _state(parameter: torch.nn.Parameter) -> tuple[int, int] | None:
    """Address and version of a gradient."""
    return None if parameter.grad is None else (parameter.grad.data_ptr(), parameter.grad._version)


def _accumulates(parameter: torch.nn.Parameter) -> bool:
    """Whether the running backward accumulates a parameter's gradient."""
    try:
        return will_run(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:  # It is an input of torch.autograd.grad.
        return False
