"""State dicts of modules and optimizers that hold experts: which expert each row has is saved and loaded with the rows.

Names in a state dict do not say where experts were when it was saved. While experts are away from their first places,
modules that hold their Parameters, and registered optimizers, therefore add a tensor of logical ids. When a state dict
is loaded, its rows are put in the present order if every module can do that alone; else it is refused. A state dict
without ids has experts at their first places.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import parametrize
from torch.utils.weak import WeakIdKeyDictionary

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.state.known_places import KnownPlaces, follow_parameter, row_of

# Appended to the name of a Parameter: int64 `[R, H]`, the logical expert in each row of each rank.
IDS = ".experts_of_rows"
# The same in the groups of an optimizer's state dict, by the numbers of its Parameters.
IDS_OF_STATE = "experts_of_rows"

T = TypeVar("T")

# Modules that hold each Parameter, and its name there, as far as they are known.
_owners = WeakIdKeyDictionary()
_hooks: list[Any] = []


def note_owners() -> None:
    """Note from now on which modules get Parameters, in this process."""
    if not _hooks:
        _hooks.append(register_module_parameter_registration_hook(_note))


def follow_owners(parameters: Sequence[torch.Tensor]) -> None:
    """Let the modules that hold experts' Parameters save and load the ids of rows; also those that get them later.

    If modules got them before `note_owners`, these are searched among all objects of the process, once for all
    Parameters that exist then.
    """
    if not all(parameter in _owners for parameter in parameters):
        for module in instances_of(nn.Module):
            follow(module)
    for parameter in parameters:
        for owner, _ in _owners.get(parameter, ()):
            if (module := owner()) is not None:
                _add_hooks(module)


def instances_of(kind: type[T]) -> list[T]:
    """All objects of a class in this process."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:  # Frozen objects are not listed.
        gc.unfreeze()
    found = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    if is_frozen:
        gc.freeze()
    return found


def follow(module: nn.Module) -> None:
    """Note which Parameters a module itself holds; see `follow_owners`."""
    for name, parameter in vars(module).get("_parameters", {}).items():
        if parameter is not None:
            _note(module, name, parameter)


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


def rows_in(name: str, state: Mapping[str, torch.Tensor], known: KnownPlaces) -> Array:
    """The experts `[R, H]` of the rows of a Parameter in a state dict: its ids, or those at the start."""
    ids = state.get(name + IDS)
    return known.first.experts_RH if ids is None else ids.cpu().numpy()


def saved_places(name: str, state: Mapping[str, torch.Tensor], known: KnownPlaces) -> ExpertPlaces:
    """The places of experts when a state dict was saved.

    Args:
        name: of one of the experts' Parameters.

    Raises:
        InputError: if it was saved on other ranks.
    """
    experts_RH, first = rows_in(name, state, known), known.first
    if experts_RH.shape != first.experts_RH.shape or not np.array_equal(
        np.sort(experts_RH, axis=None), np.arange(experts_RH.size)
    ):
        raise InputError(
            f"{name!r} was saved with experts on {len(experts_RH)} ranks, {experts_RH.shape[1]} on each; here are "
            f"{first.experts_RH.shape[0]} ranks with {first.experts_RH.shape[1]} experts; load weights in logical order"
        )
    if np.array_equal(experts_RH, first.experts_RH):
        return first
    home_E, rows_E = np.empty(experts_RH.size, np.int16), np.empty(experts_RH.size, np.int64)
    home_E[experts_RH] = np.arange(len(experts_RH), dtype=np.int16)[:, None]
    rows_E[experts_RH] = np.arange(experts_RH.shape[1])
    return ExpertPlaces(home_E, rows_E)


def follow_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Let an optimizer save the ids of rows, and refuse state whose rows have other experts.

    Returns:
        Whether it has loaded state with ids before, which are those of the present rows.

    Raises:
        RuntimeError: if it has loaded such state before.
    """
    known, ids = _numbered(optimizer), _ids_of_state(optimizer.param_groups)
    for number in known.keys() & ids.keys():
        _check_rows(optimizer, known[number], ids[number])
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if hooks is not None and _add_ids_of_state not in hooks.values():
        optimizer.register_state_dict_post_hook(_add_ids_of_state)
        optimizer.register_load_state_dict_pre_hook(_check_ids_of_state)
        optimizer.register_load_state_dict_post_hook(_drop_ids_of_state)
    _drop_ids_of_state(optimizer)
    return bool(ids)


def _note(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
    """Called when a module gets a Parameter."""
    if parameter is None:
        return
    owners = _owners.setdefault(parameter, [])
    if not any(owner() is module and name == known for owner, known in owners):
        owners.append((weakref.ref(module), name))
    before = module._parameters.get(name)
    if before is not None and before is not parameter:
        follow_parameter(before, parameter)
    if row_of(parameter) is not None:
        _add_hooks(module)


def _add_hooks(module: nn.Module) -> None:
    # A copy of a module has its hooks.
    if _add_ids not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_add_ids)
        module.register_load_state_dict_pre_hook(_order_rows)


def _add_ids(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """After a module's part of a state dict was made: mark its experts; add the ids of their rows, while they are
    away."""
    for name, parameter in module._parameters.items():
        row = None if parameter is None else row_of(parameter)
        if row is None or prefix + name not in state:
            continue
        _mark(state[prefix + name])
        if not row[0].are_first:
            state[prefix + name + IDS] = torch.from_numpy(row[0].now.experts_RH.astype(np.int64))


def _mark(value: object) -> None:
    """Let `torch.distributed.checkpoint` raise an error for a tensor of a state dict, unless it is a Parameter or a
    framework's DTensor. It takes a plain tensor for one that all ranks hold, and saves that of one rank.

    Files of torch.save do not have the mark.
    """
    if type(value) is torch.Tensor and value.ndim:
        vars(value).update(__create_write_items__=_refuse, __create_chunk_list__=_refuse, __getstate__=dict)


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError(
        "torch.distributed.checkpoint would save the experts of one rank and lose those that have the same names on "
        "other ranks; save and load session.dcp_state_dict(model), and state of optimizers by session.logical"
    )


def _order_rows(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module loads its part of a state dict: put rows in the order of the module's experts."""
    # By layer and tensor, the names of Parameters by row; a stack is all rows.
    tensors: dict[tuple[int, int], tuple[KnownPlaces, dict[int | None, str]]] = {}
    for name, parameter in module._parameters.items():
        found = None if parameter is None else row_of(parameter)
        if found is not None and prefix + name in state:
            known, t, row = found
            tensors.setdefault((id(known), t), (known, {}))[1][row] = prefix + name
    for known, name_of_row in tensors.values():
        one = next(iter(name_of_row.values()))
        # Within `first_homes` those of the trained model, which has ids, stay as they are for its end.
        places = known.now if known.returns_to is None or one + IDS not in state else known.returns_to
        saved_RH, now_RH = rows_in(one, state, known), places.experts_RH
        if known.returns_to is None:
            known.noted = None
        for name in name_of_row.values():
            state.pop(name + IDS, None)
        if np.array_equal(saved_RH, now_RH) or any(kept.has(state[one]) for kept in known.states):
            continue
        has_all = None in name_of_row or len(name_of_row) == now_RH.shape[1]
        # Of all ranks, so that all refuse it.
        if not has_all or not np.array_equal(np.sort(saved_RH), np.sort(now_RH)):
            raise RuntimeError(_difference(f"{one!r} has", saved_RH, known))
        saved = saved_RH[known.rank].tolist()
        order = [saved.index(expert) for expert in now_RH[known.rank].tolist()]
        if None in name_of_row:
            state[one] = state[one][order]
        else:
            state.update({name_of_row[row]: state[name_of_row[old]] for row, old in enumerate(order)})


def _difference(what: str, saved_RH: Array, known: KnownPlaces) -> str:
    now_RH = known.now.experts_RH
    saved = saved_RH[known.rank].tolist() if saved_RH.shape == now_RH.shape else saved_RH.tolist()
    return (
        f"state_dict: {what} the rows of experts {saved} of this rank, and experts have moved: this rank has "
        f"{now_RH[known.rank].tolist()} now; call session.move_to_saved(model, state_dict) on all ranks before "
        "load_state_dict, or save and load in logical order (session.logical)"
    )


def _numbered(optimizer: torch.optim.Optimizer) -> dict[int, KnownPlaces]:
    """The places of experts by the number of their Parameter in an optimizer's state dict."""
    parameters = list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())
    rows = {number: row_of(parameter) for number, parameter in enumerate(parameters)}
    return {number: row[0] for number, row in rows.items() if row is not None}


def _add_ids_of_state(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    # In the groups, since optimizers that no session knows yet keep what these have.
    known = _numbered(optimizer)
    for value in (value for number in known for value in packed["state"].get(number, {}).values()):
        _mark(value)
    for group in packed["param_groups"]:
        away = [number for number in group["params"] if number in known and not known[number].are_first]
        if away:
            group[IDS_OF_STATE] = {n: torch.from_numpy(known[n].now.experts_RH.astype(np.int64)) for n in away}


def _check_ids_of_state(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    known, ids = _numbered(optimizer), _ids_of_state(packed["param_groups"])
    for number in known.keys() & packed["state"].keys():
        _check_rows(optimizer, known[number], ids.get(number))


def _drop_ids_of_state(optimizer: torch.optim.Optimizer) -> None:
    drop_ids(optimizer.param_groups)


def drop_ids(groups: Sequence[dict[str, Any]]) -> None:
    """Remove the ids of rows from an optimizer's groups, or those of its state dict."""
    for group in groups:
        group.pop(IDS_OF_STATE, None)


def _ids_of_state(groups: Sequence[Mapping[str, Any]]) -> dict[int, torch.Tensor]:
    return {number: ids for group in groups for number, ids in group.get(IDS_OF_STATE, {}).items()}


def _check_rows(optimizer: torch.optim.Optimizer, known: KnownPlaces, saved: torch.Tensor | None) -> None:
    saved_RH = known.first.experts_RH if saved is None else saved.cpu().numpy()
    if not np.array_equal(saved_RH, known.now.experts_RH):
        raise RuntimeError(_difference(f"state of {type(optimizer).__name__} has", saved_RH, known))
