"""Modules that hold the experts' Parameters: whether they still do, and what their state dicts are not for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import parametrize
from torch.utils.weak import WeakIdKeyDictionary

from trimtab.errors import InputError

# In old state dicts, at the end of a Parameter's name, and in groups of optimizers; see `state_in_order`.
IDS = "experts_of_rows"

T = TypeVar("T")

# Modules that hold each Parameter, and its name there, as far as they are known.
_owners = WeakIdKeyDictionary()
_hooks: list[Any] = []
# By module, the names of experts.
_experts: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def note_owners() -> None:
    """Note from now on which modules get Parameters, so that they need not be searched."""
    if not _hooks:
        _hooks.append(register_module_parameter_registration_hook(_note))


def _note(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
    if parameter is not None:
        _owners.setdefault(parameter, {})[weakref.ref(module), name] = None


def find_owners(parameters: Sequence[torch.Tensor]) -> None:
    """Find the modules that hold Parameters. All objects of the process are searched, once for all modules that exist
    then."""
    if not all(parameter in _owners for parameter in parameters):
        for module in instances_of(nn.Module):
            for name, parameter in vars(module).get("_parameters", {}).items():
                _note(module, name, parameter)


def follow_owners(parameters: Sequence[torch.Tensor]) -> None:
    """Find the modules that hold experts' Parameters, and refuse state dicts that would lose experts."""
    find_owners(parameters)
    for parameter in parameters:
        for owner, name in _owners.get(parameter, ()):
            if (module := owner()) is not None:
                _experts.setdefault(module, set()).add(name)
                if _mark_experts not in module._state_dict_hooks.values():
                    module.register_state_dict_post_hook(_mark_experts)
                    module.register_load_state_dict_pre_hook(_refuse_ids)


def instances_of(kind: type[T]) -> list[T]:
    """All objects of a class in this process."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:  # Frozen objects are not listed.
        gc.unfreeze()
    found = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    if is_frozen:
        gc.freeze()
    return found


def check_owners(index: int, parameters: Iterable[torch.Tensor]) -> None:
    """Raises InputError if modules have other Parameters now under the names of a layer's `parameters`.

    Args:
        index: the layer's number.
    """
    for parameter in parameters:
        owners = [(module, name) for ref, name in _owners.get(parameter, ()) if (module := ref()) is not None]
        have_it = [module._parameters.get(name) is parameter for module, name in owners]
        if all(have_it):
            continue
        for module, name in owners:
            where = f"MoE layer {index}: {name!r} of {type(module).__name__}"
            if parametrize.is_parametrized(module, name):
                raise InputError(
                    f"{where} is parametrized, as LoRA by torch.nn.utils.parametrize is, so it is not a Parameter but "
                    "computed from others; experts in a session should be Parameters: merge it, or adapt other modules"
                )
            if not any(have_it) and module._parameters.get(name) is not None:
                raise InputError(
                    f"{where} has been replaced in the model since the layer was added, as by "
                    "load_state_dict(assign=True) or fully_shard, so the model's weights are not those that are "
                    "computed; add layers with a function that returns their parameters"
                )


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of a model's Parameters, by their `id`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def refuse_ids(groups: Iterable[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError if an optimizer has loaded state whose rows may be of other experts."""
    if any(IDS in group for group in groups):
        raise RuntimeError(_old(f"the state of {type(optimizer).__name__}"))


def mark(value: object) -> None:
    """Let `torch.distributed.checkpoint` raise an error for a tensor of a state dict, unless it is a Parameter or a
    framework's DTensor. It takes a plain tensor for one that all ranks hold, and saves that of one rank.

    Files of torch.save do not have the mark.
    """
    if type(value) is torch.Tensor and value.ndim:
        vars(value).update(__create_write_items__=_refuse, __create_chunk_list__=_refuse, __getstate__=dict)


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError(
        "torch.distributed.checkpoint would save the experts of one rank and lose those that have the same names on "
        "other ranks; save and load session.dcp_state_dict(model), and state of optimizers by session.whole"
    )


def _mark_experts(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in _experts.get(module, ()):
        mark(state.get(prefix + name))


def _refuse_ids(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in _experts.get(module, ()):
        if f"{prefix}{name}.{IDS}" in state:
            raise RuntimeError(_old(f"{prefix + name!r}"))


def _old(what: str) -> str:
    return (
        f"{what} was saved while experts were on other ranks, by a version of Trimtab that moved them; give the state "
        "dict to session.state_in_order() first, on all ranks"
    )
