"""`WeightWatch`: detects changes of the experts' parameters since copies of them were made.

Copies are staging memory in another dtype, mirrors in host memory, and replicas in slots. Most changes show in a
parameter's address or version. Writes through `.data`, to a flat buffer behind it, and by fused optimizers show in
neither: the session assumes them after `finish_gradients` and after an optimizer step; `verify` detects the rest.

`OptimizerWatch`: hooks before and after all optimizer steps of the process, since any of them may change weights. An
optimizer may hold tensors that it copies to the parameters later: masters of another precision, flat buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from trimtab.errors import InputError
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.state.parameter_checks import check_current_parameters

# Elements of each tensor of an expert that `verify` compares.
SAMPLES = 16

Mark = tuple[int, int, int, bool]
"""Storage, address and version of a parameter, and whether it is trained."""


class WeightWatch:
    """The state of the parameters when copies were made.

    Args:
        layers: all layers of the session.
        verify: also compare sampled elements of every expert.

    Attributes:
        steps: number of steps of optimizers that hold the parameters.
    """

    def __init__(self, layers: Sequence[HomeExperts], *, verify: bool) -> None:
        self._layers = layers
        self._verify = verify
        self._marks: list[list[Mark]] = []
        # Keeps storages from being reused, so that marks are unique.
        self._storages: list[StorageWeakRef] = []
        self._steps = 0
        self.steps = 0
        self._samples: list[list[torch.Tensor]] = []

    def compare(self, announced: bool) -> tuple[bool, list[bool], Exception | None]:
        """Compare the parameters with their state when copies were made.

        Args:
            announced: the parameters are known to have changed.

        Returns:
            Whether they changed, are announced to have changed, or were never copied; which of them are trained; the
            error if they are unusable.
        """
        changed = announced
        if announced:
            trained = [parameter.requires_grad for layer in self._layers for parameter in layer.parameters]
        else:
            marks = [_marks(layer) for layer in self._layers]
            trained = [mark[3] for of_layer in marks for mark in of_layer]
            changed = marks != self._marks
        try:
            if changed:
                for layer in self._layers:
                    check_current_parameters(layer)
            elif self._verify:
                self._compare_samples()
        except (InputError, RuntimeError) as error:
            return changed, trained, error
        return changed, trained, None

    def store(self) -> None:
        """Store the present state of the parameters, of which copies were just made."""
        self._marks = [_marks(layer) for layer in self._layers]
        self._storages = [StorageWeakRef(p.untyped_storage()) for layer in self._layers for p in layer.parameters]
        self._steps = self.steps
        if self._verify:
            self._samples = [_samples(layer) for layer in self._layers]

    def check_unchanged(self, layer: HomeExperts) -> None:
        """Raises RuntimeError if a layer's parameters changed since copies of them were made."""
        same = [mark[:3] for mark in _marks(layer)] == [mark[:3] for mark in self._marks[layer.index]]
        if not same or self.steps != self._steps:
            raise RuntimeError(
                f"the expert parameters of MoE layer {layer.index} changed within a micro-step, or between its forward "
                "and its backward; step optimizers, load and offload weights before or after"
            )

    def _compare_samples(self) -> None:
        for layer, before in zip(self._layers, self._samples, strict=True):
            for tensor, (then, now) in enumerate(zip(before, _samples(layer), strict=True)):
                # As bytes, since NaN differs from NaN.
                differs_H = (then.view(torch.uint8) != now.view(torch.uint8)).flatten(1).any(dim=1)
                if differs_H.any():
                    row = int(differs_H.nonzero()[0])
                    raise RuntimeError(
                        f"MoE layer {layer.index}: tensor {tensor} of expert {layer.home_experts[row]} changed without "
                        "an optimizer step, a new address or a new version; call session.weights_changed() after "
                        "writing to parameters through .data or a flat buffer"
                    )


def _marks(layer: HomeExperts) -> list[Mark]:
    return [
        (p.untyped_storage()._cdata, p.data_ptr(), -1 if p.is_inference() else p._version, p.requires_grad)
        for p in layer.parameters
    ]


def sampled_bytes(layer: HomeExperts) -> torch.Tensor:
    """Sampled elements of the first tensor of every expert, as bytes, since NaN differs from NaN."""
    return _samples(layer, 1)[0].view(torch.uint8)


def _samples(layer: HomeExperts, most_tensors: int | None = None) -> list[torch.Tensor]:
    """Sampled elements of each tensor, `[H, S]`."""
    samples = []
    for tensor, (shape, _) in [*zip(layer.tensors, layer.likes, strict=True)][:most_tensors]:
        size = shape[1:].numel()
        places = torch.linspace(0, size - 1, min(SAMPLES, size), device=layer.device).long()
        if isinstance(tensor, torch.Tensor):
            samples.append(tensor.detach().flatten(1)[:, places])
        else:
            samples.append(torch.stack([parameter.detach().flatten()[places] for parameter in tensor]))
    return samples


Step = Callable[[bool], None]

_watches: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def _watch(watch: OptimizerWatch) -> None:
    """Call the watch at all optimizer steps until it is garbage-collected.

    The hooks are registered once and never removed: removal by garbage collection in the middle of an optimizer step
    would change torch's dictionary of hooks while torch iterates over it.
    """
    _watches.add(watch)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_call_before))
        _handles.append(register_optimizer_step_post_hook(_call_after))


def _call_before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watches):
        watch.before(optimizer)


def _call_after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watches):
        watch.after(optimizer)


class OptimizerWatch:
    """Calls `before` and `after` around every optimizer step, until this value is garbage-collected.

    Args:
        experts: reads the session's expert parameters.
        before, after: called with whether the optimizer holds experts of the session.

    Attributes:
        registered: optimizers that train the experts; they may hold other tensors than the parameters.
    """

    def __init__(self, experts: Callable[[], Sequence[torch.nn.Parameter]], before: Step, after: Step) -> None:
        self.registered: list[torch.optim.Optimizer] = []
        self._experts = experts
        self._before, self._after = before, after
        _watch(self)

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer step."""
        self._before(self._holds_experts(optimizer))

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer step."""
        self._after(self._holds_experts(optimizer))

    def _holds_experts(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer in self.registered:
            return True
        experts = {id(parameter) for parameter in self._experts()}
        return any(id(parameter) in experts for group in optimizer.param_groups for parameter in group["params"])
