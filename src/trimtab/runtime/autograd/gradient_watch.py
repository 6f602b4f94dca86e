"""`GradientWatch`: detects gradients of experts that others take or change while a backward runs or ends.
`Accumulation`: detects gradients that would be summed over ranks twice without being zeroed in between.

Hooks on autograd's nodes may move a gradient to other memory. `DistributedDataParallel` averages gradients when the
backward ends, although every rank has other experts. Replica gradients would be lost, or added to what was sent before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from trimtab.runtime.autograd.torch_engine import will_run

REMEDY = (
    "no other module may reduce or move gradients of experts: name them in the model's attribute "
    "_ddp_params_and_buffers_to_ignore before DistributedDataParallel gets the model, and add layers whose gradients "
    "a framework keeps in buffers with add_framework_layer()"
)


class GradientWatch:
    """The gradients of one backward.

    A hook that stays on each Parameter notes the address at which autograd leaves its gradient: about 1 us each.
    """

    def __init__(self) -> None:
        # Parameters that accumulate gradients in this backward, with the number of their layer.
        self._expected: dict[torch.nn.Parameter, int] = {}
        self._addresses: dict[torch.nn.Parameter, int] = {}
        self._left: list[tuple[int, int] | None] = []

    def expect(self, layer: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Call it in a layer's backward, before gradients of these parameters accumulate."""
        for parameter in parameters:
            if parameter not in self._expected and _accumulates(parameter):
                self._expected[parameter] = layer
                hooks = parameter._post_accumulate_grad_hooks or {}
                if self._note_address not in hooks.values():
                    for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                        del hooks[key]  # Of an earlier session.
                    # It runs before hooks on the node.
                    parameter.register_post_accumulate_grad_hook(self._note_address)

    def missing(self) -> RuntimeError | None:
        """The error if a gradient is not where autograd accumulated it. Call it when the backward ends."""
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
        self._expected, self._addresses = {}, {}

    def _note_address(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)
        if parameter in self._expected and parameter.grad is not None:
            self._addresses[parameter] = parameter.grad.data_ptr()


def _is_ours(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), GradientWatch)


def has_hooks(parameter: torch.nn.Parameter, node: torch.autograd.graph.Node) -> bool:
    """Whether a parameter, or the node that accumulates its gradient, has hooks that are not of this module."""
    handle = node.register_hook(lambda *_: None)
    num_on_node = len(handle.hooks_dict_ref() or ())
    handle.remove()
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return num_on_node > 1 or bool(parameter._backward_hooks) or not all(map(_is_ours, hooks))


def _state(parameter: torch.nn.Parameter) -> tuple[int, int] | None:
    """Address and version of a gradient."""
    return None if parameter.grad is None else (parameter.grad.data_ptr(), parameter.grad._version)


def _accumulates(parameter: torch.nn.Parameter) -> bool:
    """Whether the running backward accumulates a parameter's gradient."""
    try:
        return will_run(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:  # It is an input of torch.autograd.grad.
        return False


GradientState = tuple[weakref.ref[torch.Tensor], int]
"""A gradient tensor and its version."""


class Accumulation:
    """The gradients that `finish_gradients` has summed, and whether they were zeroed since.

    A new accumulation starts with a backward before which all summed gradients were zeroed. This is tested when the
    first MoE layer's backward begins. By then dense layers above it may have added to their gradients. Therefore only
    gradients that are unchanged since the start of the forward are tested.

    Args:
        experts: returns the session's expert parameters that are trained.

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
        # Others had none on any rank; theirs can only be new.
        self._summed = [parameter for parameter in parameters if parameter.grad is not None]
        self._finished_with = _any_gradient(self._experts())
        self._backward, self._began_with, self.is_open = None, [], False
        self._store_states()

    def leave(self) -> None:
        """Call it when another session may sum gradients of the experts from now on. Some that wait stay missed."""
        self.is_open &= _is_true(_any_gradient(self._experts()))

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
        """Whether a gradient has not been written to since states were stored. Frozen parameters may keep theirs."""
        if parameter not in self._states or parameter.grad is None or not parameter.requires_grad:
            return False
        gradient, version = self._states[parameter]
        return gradient() is parameter.grad and parameter.grad._version == version


def _any_gradient(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor | None:
    """Whether any gradient is not zero, as a bool tensor on the device; None if there are no gradients."""
    flags = [parameter.grad.any() for parameter in parameters if parameter.grad is not None]
    return torch.stack(flags).any() if flags else None


def _is_true(flag: torch.Tensor | None) -> bool:
    return flag is not None and bool(flag)
