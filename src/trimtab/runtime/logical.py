"""Weights and optimizer state in logical expert order: whole tensors to leave the runtime with, and the way back.

Knows which rows of an expert tensor are whose; knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from trimtab.errors import InputError
from trimtab.runtime.home_experts import HomeExperts
from trimtab.runtime.topology import Topology

StateValue = torch.Tensor | int | float
"""One entry of an optimizer's state for one parameter."""


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
        """The model's state, name by name, with experts gathered to `[E, ...]` in logical order.

        Iterate to the end on every rank. A rank holds one gathered tensor at a time, unless it keeps more.

        Args:
            everywhere: give it to every rank; else only the group's rank 0 is given anything.

        Yields:
            Names and tensors that may share memory with the model.
        """
        layers = self._layers_by_name(model)
        for name, value in model.state_dict().items():
            whole = self._gather_rows(layers[name], value, everywhere=everywhere) if name in layers else value
            if everywhere or self._topology.rank == 0:
                yield name, whole if everywhere else whole.cpu()

    def load_weights(self, model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Give this rank its rows of whole tensors, under its present homes. Not a collective.

        Args:
            state: as `weights` yields it, from any number of ranks; on every rank.

        Raises:
            InputError: naming a tensor that is missing, unknown, or of another shape.
        """
        layers = self._layers_by_name(model)
        targets = model.state_dict()
        if missing := sorted(targets.keys() - state.keys()):
            raise InputError(f"tensor {missing[0]!r} is missing; this model needs it")
        if unknown := sorted(state.keys() - targets.keys()):
            raise InputError(f"there is a tensor {unknown[0]!r}; this model has none of that name")
        for name, target in targets.items():
            value = state[name]
            if name in layers:
                value = self._own_rows(layers[name], name, value)
            if value.shape != target.shape:
                raise InputError(f"tensor {name!r} has shape {_shape(value)}; this model has {_shape(target)}")
            target.copy_(value)

    def optimizer_state(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[str, dict[str, StateValue]]]:
        """The optimizer's state, parameter by parameter, with rows of experts gathered to `[E, ...]` in logical order.

        Iterate to the end on every rank; only the group's rank 0 is given anything.

        Yields:
            Parameter names, and their state by key: tensors on the host, that may share memory with the optimizer, and
            numbers. Parameters without state are left out.

        Raises:
            InputError: as `rows_of_state`; if the ranks' states don't go together, or a parameter is not the model's.
        """
        layers = self._layers_by_name(model)
        parameters = dict(model.named_parameters())
        named = set(parameters.values())
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter not in named:
                raise InputError(
                    f"{type(optimizer).__name__} trains a tensor {_shape(parameter)} that is not the model's"
                )
        self._check_ranks_agree(optimizer, {name: parameters[name] for name in layers if name in parameters})
        for name, parameter in parameters.items():
            values = dict(optimizer.state.get(parameter, {}))
            if name in layers:
                rows = rows_of_state(optimizer, parameter)
                values |= {key: self._gather_rows(layers[name], rows[key]) for key in sorted(rows)}
            if values and self._topology.rank == 0:
                yield name, {key: v.detach().cpu() if isinstance(v, torch.Tensor) else v for key, v in values.items()}

    def load_optimizer_state(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Mapping[str, StateValue]],
    ) -> None:
        """Put whole state in place of the optimizer's, with this rank's rows under its present homes. Not a collective.

        Learning rates and other settings of the optimizer stay as they are.

        Args:
            state: as `optimizer_state` yields it, from any number of ranks; on every rank.

        Raises:
            InputError: naming a parameter that the model does not have, or state that does not fit it.
        """
        layers = self._layers_by_name(model)
        parameters = dict(model.named_parameters())
        for name in state:
            if name not in parameters:
                raise InputError(f"there is optimizer state of {name!r}; this model has no such parameter")
        mine: dict[torch.nn.Parameter, dict[str, StateValue]] = {}
        for name in state:
            values = dict(state[name])
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    of_expert = name in layers and value.ndim > 0
                    values[key] = self._own_rows(layers[name], name, value) if of_expert else value.clone()
            mine[parameters[name]] = values
        packed = optimizer.state_dict()
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        packed["state"] = {index: mine[parameter] for index, parameter in enumerate(trained) if parameter in mine}
        optimizer.load_state_dict(packed)
        # It brings everything to where the optimizer wants it, but rounds what is wider than its parameter.
        for parameter, values in mine.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    optimizer.state[parameter][key] = value.to(parameter.device)

    def _layers_by_name(self, model: torch.nn.Module) -> dict[str, HomeExperts]:
        """The layer of every expert parameter, by the parameter's name."""
        layers = {id(parameter): layer for layer in self._layers for parameter in layer.parameters}
        named = model.named_parameters(remove_duplicate=False)
        return {name: layers[id(parameter)] for name, parameter in named if id(parameter) in layers}

    def _gather_rows(self, layer: HomeExperts, rows: torch.Tensor, *, everywhere: bool = False) -> torch.Tensor:
        """All ranks' `rows [H, ...]` as `[E, ...]`, everywhere or on rank 0; elsewhere the rows as they came."""
        # As bytes, since not every type of optimizer state can travel.
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
        if parts is None:
            return rows
        home_E = layer.home_E
        whole = data.new_empty(len(home_E), data.shape[1])
        for rank, part in enumerate(parts):
            whole[torch.from_numpy(np.flatnonzero(home_E == rank)).to(whole.device)] = part
        return whole.view(rows.dtype).reshape(len(home_E), *rows.shape[1:])

    def _own_rows(self, layer: HomeExperts, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows `[H, ...]` of `whole [E, ...]`, copied."""
        home_E = layer.home_E
        if whole.ndim == 0 or len(whole) != len(home_E):
            raise InputError(f"a tensor of {name!r} has shape {_shape(whole)}; this model has {len(home_E)} experts")
        return whole[torch.from_numpy(np.flatnonzero(home_E == self._topology.rank)).to(whole.device)]

    def _check_ranks_agree(self, optimizer: torch.optim.Optimizer, experts: Mapping[str, torch.nn.Parameter]) -> None:
        """Raise InputError on all ranks unless their states have the same keys, row shapes and numbers."""
        mine = {name: _describe(optimizer, parameter) for name, parameter in experts.items()}
        described: list[dict[str, dict[str, object]]] = [{}] * self._topology.num_ranks
        dist.all_gather_object(described, mine, group=self._topology.experts)
        for rank, other in enumerate(described):
            for name, of_first in described[0].items():
                if other[name] != of_first:
                    raise InputError(
                        f"{type(optimizer).__name__}: the state of {name!r} is {other[name]} on rank {rank} and "
                        f"{of_first} on rank 0; it should be alike"
                    )


def rows_of_state(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """The part of an expert tensor's optimizer state that belongs to single experts. Not a collective.

    Single numbers, such as a step count, belong to all experts alike and are left out.

    Args:
        parameter: this rank's experts, `[H, ...]`.

    Returns:
        Tensors `[H, ...]` by key, the optimizer's own. Empty before its first step.

    Raises:
        InputError: for state that is neither one row for each expert nor a single number.
    """
    rows = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == len(parameter):
            rows[key] = value
        elif not isinstance(value, int | float) and not (isinstance(value, torch.Tensor) and value.ndim == 0):
            found = f"shape {_shape(value)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
            raise InputError(
                f"{type(optimizer).__name__} keeps {key!r} of {found} for an expert tensor {_shape(parameter)}; it "
                f"should be a single number or have {len(parameter)} rows, one for each expert"
            )
    return rows


def _describe(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, object]:
    rows = rows_of_state(optimizer, parameter)
    return {
        key: (str(value.dtype), _shape(value[0])) if key in rows else float(value)
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    }


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
