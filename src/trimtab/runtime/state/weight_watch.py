"""`WeightWatch`: detects changes of the experts' parameters since copies of them were made.

Copies are staging memory in another dtype, mirrors in host memory, and replicas in slots. Most changes show in a
parameter's address or version. Writes through `.data`, to a flat buffer behind it, and by fused optimizers show in
neither: the session assumes them after `finish_gradients` and after an optimizer step; `verify` detects the rest.

`OptimizerWatch`: hooks before and after all optimizer steps of the process, since any of them may change weights. An
optimizer may hold tensors that it copies to the parameters later: masters of another precision, flat buffers. It also
detects optimizers whose state of experts would not be renumbered with them, and experts that no optimizer holds.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from trimtab.errors import InputError
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.state.owners import instances_of, mark, refuse_ids
from trimtab.runtime.state.parameter_checks import check_current_parameters, check_memory

# Elements of each tensor of an expert that `verify` compares.
SAMPLES = 16

Marks = tuple[list[int], list[int], list[int], list[bool]]
"""Of parameters: storages, addresses, versions, and whether they are trained."""


class WeightWatch:
    """The state of the parameters when copies were made.

    Frameworks write the weights of their layers between plans only, and every plan copies them; so these are looked at
    when a plan is applied, and with `verify`.

    Args:
        layers: all layers of the session.
        verify: also compare sampled elements of every expert.

    Attributes:
        steps: number of steps of optimizers that hold the parameters.
    """

    def __init__(self, layers: Sequence[HomeExperts], *, verify: bool) -> None:
        self._layers = [layer for layer in layers if layer.sends_rows or verify]
        self._frameworks = [layer for layer in layers if not layer.sends_rows and not verify]
        self._are_trained: list[bool] = []
        self._verify = verify
        self._marks: list[Marks] = []
        # Keeps storages from being reused, so that marks are unique.
        self._storages: dict[int, StorageWeakRef] = {}
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
            for layer in self._frameworks:
                layer.hold()
            self._are_trained = [is_trained for layer in self._frameworks for is_trained in layer.are_trained]
        else:
            marks = [_marks(layer.parameters) for layer in self._layers]
            trained = [is_trained for of_layer in marks for is_trained in of_layer[3]]
            changed = marks != self._marks
        trained += self._are_trained
        try:
            if changed:
                for layer in self._layers:
                    check_current_parameters(layer)
                for layer in self._frameworks:
                    check_memory(layer)
            elif self._verify:
                self._compare_samples()
        except (InputError, RuntimeError) as error:
            return changed, trained, error
        return changed, trained, None

    def store(self) -> None:
        """Store the present state of the parameters, of which copies were just made."""
        parameters_L = [layer.parameters for layer in self._layers]
        self._marks = [_marks(parameters) for parameters in parameters_L]
        # Parameters may be parts of one buffer. Most storages are those of before.
        storages = {
            storage: parameter
            for (storages, *_), parameters in zip(self._marks, parameters_L, strict=True)
            for storage, parameter in zip(storages, parameters, strict=True)
        }
        self._storages = {
            storage: self._storages.get(storage) or StorageWeakRef(parameter.untyped_storage())
            for storage, parameter in storages.items()
        }
        self._steps = self.steps
        if self._verify:
            self._samples = [_samples(layer) for layer in self._layers]

    def check_unchanged(self, layer: HomeExperts) -> None:
        """Raises RuntimeError if a layer's parameters changed since copies of them were made."""
        same = self.steps == self._steps
        if same and (layer.sends_rows or self._verify):
            same = _marks(layer.parameters)[:3] == self._marks[self._layers.index(layer)][:3]
        if not same:
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


def _marks(parameters: Sequence[torch.nn.Parameter]) -> Marks:
    """The marks now. A list of each kind takes less time than a tuple for each parameter: a layer has dozens."""
    try:
        versions = [p._version for p in parameters]
    except RuntimeError:  # Tensors of inference mode have none.
        versions = [-1 if p.is_inference() else p._version for p in parameters]
    storages = [p.untyped_storage()._cdata for p in parameters]
    return storages, [p.data_ptr() for p in parameters], versions, [p.requires_grad for p in parameters]


def _samples(layer: HomeExperts) -> list[torch.Tensor]:
    """Sampled elements of each tensor, `[H, S]`."""
    samples = []
    for tensor, (shape, _) in zip(layer.tensors, layer.likes, strict=True):
        size = shape[1:].numel()
        places = torch.linspace(0, size - 1, min(SAMPLES, size), device=layer.device).long()
        if isinstance(tensor, torch.Tensor):
            samples.append(tensor.detach().flatten(1)[:, places])
        else:
            samples.append(torch.stack([parameter.detach().flatten()[places] for parameter in tensor]))
    return samples


BeforeStep = Callable[[bool], None]
AfterStep = Callable[[Sequence[HomeExperts], bool], None]

_watches: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()
_handles: list[RemovableHandle] = []
# Optimizers that have stepped.
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _call_before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watches):
        watch.before(optimizer)


def _call_after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _stepped.add(optimizer)
    for watch in list(_watches):
        watch.after(optimizer)


class OptimizerWatch:
    """Calls `before` and `after` around every optimizer step, until this value is garbage-collected.

    Args:
        layers: the session's layers whose experts torch's optimizers train.
        before: called with whether the optimizer is registered, or holds experts of the session.
        after: called with the layers whose experts the optimizer holds, and whether it is registered.

    Attributes:
        registered: optimizers that train the experts; they may hold other tensors than the parameters.
    """

    def __init__(self, layers: Callable[[], Sequence[HomeExperts]], before: BeforeStep, after: AfterStep) -> None:
        self.registered: list[torch.optim.Optimizer] = []
        self._layers = layers
        self._before, self._after = before, after
        # Of the last finished gradients: all of their parameters, and the experts among them, which optimizers update.
        self._finished: list[torch.Tensor] = []
        self._trained: list[torch.Tensor] = []
        # What optimizers that have stepped since then hold.
        self._held: set[int] = set()
        # The class of an optimizer that has stepped since then with experts that were replaced.
        self._outdated = ""
        _watches.add(self)
        # Registered once and never removed: removal by garbage collection in the middle of an optimizer step would
        # change torch's dictionary of hooks while torch iterates over it.
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_call_before))
            _handles.append(register_optimizer_step_post_hook(_call_after))

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer step. Raises RuntimeError as `refuse_ids`."""
        refuse_ids(optimizer.param_groups, optimizer)
        self._before(bool(self._held_layers(optimizer)) or self._is_registered(optimizer))

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer step."""
        held = self._held_layers(optimizer)
        self._after(held, self._is_registered(optimizer))
        self._held |= _held_ids(optimizer)
        if not held and self._held_before(optimizer):
            self._outdated = type(optimizer).__name__

    def register(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Register optimizers in place of those before. Raises RuntimeError as `refuse_ids`."""
        for optimizer in optimizers:
            refuse_ids(optimizer.param_groups, optimizer)
            hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
            if hooks is not None and _mark_state not in hooks.values():
                optimizer.register_state_dict_post_hook(_mark_state)
        self.registered = list(optimizers)

    def check_registered(self, layers: Iterable[HomeExperts]) -> None:
        """Check that the state of all optimizers is renumbered with the experts of these layers.

        Raises:
            InputError: if an optimizer that is not registered has state of experts, or if no registered one holds
                experts that are trained, since it may have copies of them.
        """
        names = self._unregistered()
        if names:
            gc.collect()  # Optimizers of an earlier session may be in reference cycles.
            names = self._unregistered()
        if names:
            raise InputError(
                f"experts can't be renumbered: {', '.join(names)} {'has' if len(names) == 1 else 'have'} state of them "
                "and would keep it; register all optimizers that train experts with session.register_optimizers(), and "
                "drop those that are not used"
            )
        held = set().union(*map(_held_ids, self.registered))
        for layer in layers if self.registered else ():
            if any(parameter.requires_grad and id(parameter) not in held for parameter in layer.parameters):
                raise InputError(
                    "experts can't be renumbered: no registered optimizer holds all trained expert tensors of MoE "
                    f"layer {layer.index}. Copies that an optimizer trains instead (masters) would stay as they are; "
                    "tensors that are not trained should have requires_grad=False"
                )

    def finish(self, dense: Sequence[torch.Tensor], experts: Sequence[torch.Tensor]) -> None:
        """Call it when gradients are complete.

        Args:
            dense: the replicated parameters.
            experts: the trained experts.
        """
        self._trained = [parameter for parameter in experts if parameter.grad is not None]
        self._finished, self._held, self._outdated = [*dense, *self._trained], set(), ""

    def untrained(self) -> InputError | None:
        """The error of experts whose complete gradients no optimizer uses, once for each step; or None.

        It is known when an optimizer has stepped that holds others of the parameters with complete gradients.
        """
        if optimizer := self._outdated:
            self.finish((), ())
            return InputError(
                f"no optimizer holds the experts' present Parameters: {optimizer} has those from before they were "
                "replaced, as by load_state_dict(assign=True); replace Parameters before the optimizer is made"
            )
        if self._held.isdisjoint(map(id, self._finished)):
            return None
        trained, held = self._trained, self._held
        self.finish((), ())
        # A registered optimizer that holds none of the experts has copies of them in another precision.
        held_by_R = [_held_ids(optimizer) & {id(p) for p in trained} for optimizer in self.registered]
        if not all(held_by_R):
            return None
        if not all(id(parameter) in held for parameter in trained):
            # Others step less often, or have skipped this step.
            held = held.union(*held_by_R, *map(_held_ids, list(_stepped)))
        if not all(id(parameter) in held for parameter in trained):
            every = [each for each in instances_of(torch.optim.Optimizer) if hasattr(each, "param_groups")]
            held = held.union(*map(_held_ids, every))
        missing = [parameter for parameter in trained if id(parameter) not in held]
        if not missing:
            return None
        index = next(layer.index for layer in self._layers() if any(p is missing[0] for p in layer.parameters))
        return InputError(
            f"MoE layer {index}: no optimizer holds {len(missing)} of {len(trained)} trained expert tensors, and one "
            "has stepped after finish_gradients(); the model's tensors may have been replaced after add_layer, as by "
            "load_state_dict(assign=True) or fully_shard (then add layers with a function that returns their "
            "parameters), or the optimizer has copies of them (then register it with session.register_optimizers()). "
            "Experts that are not trained should have requires_grad=False"
        )

    def _unregistered(self) -> list[str]:
        others = [optimizer for watch in list(_watches) for optimizer in watch.registered]
        return [
            type(optimizer).__name__
            for optimizer in {id(each): each for each in [*list(_stepped), *others]}.values()
            if not self._is_registered(optimizer)
            and any(_has_state(optimizer, layer) for layer in self._held_layers(optimizer))
        ]

    def _is_registered(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer or one that wraps it is registered."""
        return any(each is optimizer or each.state is optimizer.state for each in self.registered)

    def _held_before(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer holds Parameters that layers had before others replaced them; it holds none of now."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return any(layer.had(parameter) for layer in self._layers() for parameter in held)

    def _held_layers(self, optimizer: torch.optim.Optimizer) -> list[HomeExperts]:
        """The layers of which an optimizer holds experts."""
        held = _held_ids(optimizer)
        return [layer for layer in self._layers() if not held.isdisjoint(map(id, layer.parameters))]


def _mark_state(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    """After a state dict was made: mark the state of experts; see `mark`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    experts = {id(each) for watch in list(_watches) for layer in watch._layers() for each in layer.parameters}
    for number, of_one in packed["state"].items():
        if id(parameters[number]) in experts:
            for value in of_one.values():
                mark(value)


def _held_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _has_state(optimizer: torch.optim.Optimizer, layer: HomeExperts) -> bool:
    """Whether an optimizer has state of single experts; numbers such as a step count are not."""
    return any(
        not isinstance(value, int | float | None) and not (isinstance(value, torch.Tensor) and value.ndim == 0)
        for parameter in layer.parameters
        for value in optimizer.state.get(parameter, {}).values()
    )
