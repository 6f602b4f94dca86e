"""`LogicalState`: weights and optimizer state with the experts of all ranks in logical order.

A stack of experts becomes one tensor `[E, ...]` of the same name. A list becomes E tensors `[...]`, with the logical
expert id in place of the row in their names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.state.numbered_names import NumberedName, find_number
from trimtab.runtime.state.optimizer_rows import describe_state, expert_state

StateValue = torch.Tensor | int | float
"""One entry of an optimizer's state for one parameter."""


@dataclass(frozen=True)
class _Place:
    """The expert tensor that a name of the model's state refers to.

    Attributes:
        layer: its layer.
        row: the expert's row among the layer's home experts; None for a stack.
        name: the name with a variable expert id; None for a stack.
    """

    layer: HomeExperts
    row: int | None = None
    name: NumberedName | None = None

    @property
    def homes(self) -> list[Array]:
        """Logical ids of the home experts of each rank now, in the order of its rows."""
        return [self.layer.experts_of(rank) for rank in np.unique(self.layer.home_E).tolist()]

    def name_of(self, home: Array) -> str:
        """The name in the logical state of the expert in this row of a rank's home experts."""
        assert self.name is not None
        assert self.row is not None
        return self.name.with_number(int(home[self.row]))


class LogicalState:
    """A model's weights and optimizer state, with the experts of all ranks in logical order.

    Methods are collective over the ranks of an expert-parallel group, unless they say otherwise.

    Args:
        layers: this rank's home experts of all layers.
    """

    def __init__(self, layers: Sequence[HomeExperts], topology: Topology) -> None:
        self._layers = layers
        self._topology = topology

    def weights(self, model: torch.nn.Module, *, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's state, name by name, with the experts of all ranks in logical order.

        Every rank must iterate to the end. At a time, one gathered stack, or one expert of each rank, is in memory.

        Args:
            everywhere: yield on every rank; else only on the group's rank 0.

        Yields:
            Names and tensors that may share memory with the model.

        Raises:
            InputError: if the names of a list's Parameters have no expert number; see `find_number`.
        """
        places = self._places(model)
        for name, value in model.state_dict().items():
            for whole_name, whole in self._gather(places.get(name), name, value, everywhere=everywhere).items():
                yield whole_name, whole if everywhere else whole.cpu()

    def load_weights(self, model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's rows of whole tensors, under the present homes. Not a collective.

        Args:
            state: as `weights` yields it, from a run with any number of ranks; the same on every rank.

        Raises:
            InputError: naming a tensor that is missing, unknown, or of another shape; as `weights`.
        """
        places = self._places(model)
        targets = model.state_dict()
        expected = {whole for name in targets for whole in _whole_names(places.get(name), name)}
        if missing := sorted(expected - state.keys()):
            raise InputError(f"tensor {missing[0]!r} is missing; this model needs it")
        if unknown := sorted(state.keys() - expected):
            raise InputError(f"there is a tensor {unknown[0]!r}; this model has none of that name")
        for name, target in targets.items():
            whole_name = _own_name(places.get(name), name)
            value = self._own(places.get(name), whole_name, state[whole_name])
            if value.shape != target.shape:
                raise InputError(f"tensor {whole_name!r} has shape {_shape(value)}; this model has {_shape(target)}")
            target.copy_(value)

    def optimizer_state(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[str, dict[str, StateValue]]]:
        """The optimizer's state, parameter by parameter, with the experts of all ranks in logical order.

        Every rank must iterate to the end; only the group's rank 0 yields.

        Yields:
            Parameter names, and their state by key: tensors on the host, which may share memory with the optimizer, and
            numbers. Parameters without state are left out.

        Raises:
            InputError: as `expert_state` and `weights`; if the ranks' states differ in structure, or a parameter is not
                in the model.
        """
        places = self._places(model)
        parameters = dict(model.named_parameters())
        named = set(parameters.values())
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter not in named:
                raise InputError(
                    f"{type(optimizer).__name__} trains a tensor {_shape(parameter)} that is not in the model"
                )
        self._check_ranks_agree(optimizer, {name: parameters[name] for name in places if name in parameters}, places)
        for name, parameter in parameters.items():
            values, place = optimizer.state.get(parameter, {}), places.get(name)
            if not values:
                continue
            whole: dict[str, dict[str, StateValue]] = {
                whole_name: dict(values) for whole_name in _whole_names(place, name)
            }
            if place is not None:
                rows = expert_state(optimizer, parameter, is_stack=place.row is None)
                for key in sorted(rows):
                    for whole_name, value in self._gather(place, name, rows[key]).items():
                        whole[whole_name][key] = value
            if self._topology.rank == 0:
                for whole_name, of_name in whole.items():
                    yield (
                        whole_name,
                        {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in of_name.items()},
                    )

    def load_optimizer_state(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Mapping[str, StateValue]],
    ) -> None:
        """Replace the optimizer's state by this rank's rows of whole state, under the present homes. Not a collective.

        Learning rates and other settings of the optimizer do not change.

        Args:
            state: as `optimizer_state` yields it, from a run with any number of ranks; the same on every rank.

        Raises:
            InputError: naming a parameter that the model does not have, or state that does not fit it.
        """
        places = self._places(model)
        parameters = dict(model.named_parameters())
        known = {whole for name in parameters for whole in _whole_names(places.get(name), name)}
        for name in state:
            if name not in known:
                raise InputError(f"there is optimizer state of {name!r}; this model has no such parameter")
        mine: dict[torch.nn.Parameter, dict[str, StateValue]] = {}
        for name, parameter in parameters.items():
            place, whole_name = places.get(name), _own_name(places.get(name), name)
            if whole_name in state:
                mine[parameter] = {
                    key: self._own_value(place, whole_name, value) for key, value in state[whole_name].items()
                }
        packed = optimizer.state_dict()
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        packed["state"] = {index: mine[parameter] for index, parameter in enumerate(trained) if parameter in mine}
        optimizer.load_state_dict(packed)
        # load_state_dict moves tensors to their device, but also casts them to the dtype of the parameter.
        for parameter, values in mine.items():
            loaded = optimizer.state[parameter]
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    loaded[key] = value.to(loaded[key].device)

    def _places(self, model: torch.nn.Module) -> dict[str, _Place]:
        """The expert tensors, by name."""
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        every_name = [name for some in names.values() for name in some]
        places: dict[str, _Place] = {}
        for layer in self._layers:
            for tensor in layer.tensors:
                if isinstance(tensor, torch.Tensor):
                    places |= {name: _Place(layer) for name in names.get(id(tensor), [])}
                    continue
                names_of_rows = [names.get(id(parameter), []) for parameter in tensor]
                if len({len(some) for some in names_of_rows}) > 1:
                    raise InputError(
                        f"MoE layer {layer.index}: the model has only some of a list of experts, "
                        f"{', '.join(map(repr, itertools.chain(*names_of_rows)))}"
                    )
                for of_rows in zip(*names_of_rows, strict=True):
                    numbered = find_number(of_rows, every_name)
                    places |= {name: _Place(layer, row, numbered) for row, name in enumerate(of_rows)}
        return places

    def _gather(
        self, place: _Place | None, name: str, value: torch.Tensor, *, everywhere: bool = False
    ) -> dict[str, torch.Tensor]:
        """The tensors of all ranks in one place, by name; empty on ranks other than 0 unless `everywhere`."""
        if place is None:
            return {name: value} if everywhere or self._topology.rank == 0 else {}
        rows = value if place.row is None else value[None]
        parts = self._exchange(rows, everywhere=everywhere)
        if parts is None:
            return {}
        if place.row is not None:
            return {
                place.name_of(home): part.view(value.dtype).reshape(value.shape)
                for home, part in zip(place.homes, parts, strict=True)
            }
        num_experts = len(place.layer.home_E)
        whole = parts[0].new_empty(num_experts, parts[0].shape[1])
        for home, part in zip(place.homes, parts, strict=True):
            whole[torch.from_numpy(home).to(whole.device)] = part
        return {name: whole.view(value.dtype).reshape(num_experts, *value.shape[1:])}

    def _exchange(self, rows: torch.Tensor, *, everywhere: bool) -> list[torch.Tensor] | None:
        """All ranks' `rows [n, ...]` as bytes `[n, b]`, everywhere or on rank 0."""
        # As bytes, since backends do not support all dtypes of optimizer state.
        data = rows.detach().reshape(len(rows), -1).contiguous().view(torch.uint8)
        group = self._topology.experts
        parts = (
            [torch.empty_like(data) for _ in range(self._topology.num_ranks)]
            if everywhere or self._topology.rank == 0
            else None
        )
        if everywhere:
            dist.all_gather(parts, data, group=group)
        else:
            dist.gather(data, parts, group=group, group_dst=0)
        return parts

    def _own(self, place: _Place | None, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor: its rows `[H, ...]` of a stack, else all of it."""
        if place is None or place.row is not None:
            return whole
        home_E = place.layer.home_E
        if whole.ndim == 0 or len(whole) != len(home_E):
            raise InputError(f"a tensor of {name!r} has shape {_shape(whole)}; this model has {len(home_E)} experts")
        return whole[torch.from_numpy(place.layer.home_experts).to(whole.device)]

    def _own_value(self, place: _Place | None, name: str, value: StateValue) -> StateValue:
        """A copy of this rank's part of a value of optimizer state; single numbers are shared by all experts."""
        if not isinstance(value, torch.Tensor):
            return value
        return (self._own(place, name, value) if value.ndim else value).clone()

    def _check_ranks_agree(
        self,
        optimizer: torch.optim.Optimizer,
        experts: Mapping[str, torch.nn.Parameter],
        places: Mapping[str, _Place],
    ) -> None:
        """Raise InputError on all ranks unless their states have the same keys, row shapes and numbers."""
        mine = {
            name: describe_state(optimizer, parameter, is_stack=places[name].row is None)
            for name, parameter in experts.items()
        }
        described: list[dict[str, dict[str, object]]] = [{}] * self._topology.num_ranks
        dist.all_gather_object(described, mine, group=self._topology.experts)
        for rank, other in enumerate(described):
            for name, of_first in described[0].items():
                if other[name] != of_first:
                    raise InputError(
                        f"{type(optimizer).__name__}: the state of {name!r} is {other[name]} on rank {rank} and "
                        f"{of_first} on rank 0; it should be equal"
                    )


def _whole_names(place: _Place | None, name: str) -> list[str]:
    """The names in the logical state of all ranks' experts in a place."""
    return [name] if place is None or place.name is None else [place.name_of(home) for home in place.homes]


def _own_name(place: _Place | None, name: str) -> str:
    """The name in the logical state of this rank's expert in a place."""
    return name if place is None or place.name is None else place.name_of(place.layer.home_experts)


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
