"""`WholeState`: weights and optimizer state with the experts of all ranks.

A stack of experts becomes one tensor `[E, ...]` of the same name. A list becomes E tensors `[...]`, with the
expert id in place of the row in their names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from trimtab.errors import InputError
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.state.optimizer_rows import describe_state, expert_state
from trimtab.runtime.state.owners import names_of

Tensor = TypeVar("Tensor", bound=torch.Tensor)
StateValue = torch.Tensor | int | float
"""One entry of an optimizer's state for one parameter."""

# With this pattern `re.split` returns texts and numbers alternately.
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class NumberedName:
    """A name with a variable number.

    Attributes:
        head, tail: the text before and after the number.
    """

    head: str
    tail: str

    def with_number(self, number: int) -> str:
        return f"{self.head}{number}{self.tail}"


def find_number(names: Sequence[str], others: Iterable[str]) -> NumberedName:
    """Find the number in which names differ, as in `experts.0.w1.weight`, `experts.1.w1.weight`.

    A single name may have several zeros. Then a zero counts if it is one in all other names of the same form too, and
    the last of these is taken.

    Args:
        names: of a rank's experts in home order; the number counts them from 0.
        others: all names of the model.

    Raises:
        InputError: if the names do not have this form.
    """
    parts = [_NUMBER.split(name) for name in names]
    first = parts[0]
    forms = {tuple(part[::2]) for part in parts}
    places = [
        place
        for place in range(1, len(first), 2)
        if len(forms) == 1
        and [part[place] for part in parts] == [str(row) for row in range(len(parts))]
        and all(part[:place] == first[:place] and part[place + 1 :] == first[place + 1 :] for part in parts)
    ]
    if len(names) == 1:
        same_form = [part for part in map(_NUMBER.split, others) if part[::2] == first[::2]]
        places = [place for place in places if all(part[place] == "0" for part in same_form)]
    if not places:
        raise InputError(
            f"the experts of one layer are named {', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}; "
            "names of a list of experts should differ in one number, which counts the rank's experts from 0"
        )
    return NumberedName("".join(first[: places[-1]]), "".join(first[places[-1] + 1 :]))


@dataclass(frozen=True)
class _Entry:
    """An entry of the model's state.

    Attributes:
        name: its name in the model.
        layer: the layer whose experts it has; None for other tensors.
        row: the row of its expert on the rank; None for a stack, and for other tensors.
        numbered: the name with a variable expert id; None for a stack, and for other tensors.
    """

    name: str
    layer: HomeExperts | None = None
    row: int | None = None
    numbered: NumberedName | None = None

    @property
    def is_stack(self) -> bool:
        return self.layer is not None and self.row is None

    @property
    def whole_names(self) -> list[str]:
        """The names in the whole state: of the experts in this row of each rank, in order, else one."""
        if self.layer is None or self.row is None or self.numbered is None:
            return [self.name]
        num_rows = len(self.layer.home_experts)
        return [self.numbered.with_number(e) for e in range(self.row, self.layer.num_experts, num_rows)]

    @property
    def own_name(self) -> str:
        """The name of this rank's tensor in the whole state."""
        if self.layer is None or self.row is None or self.numbered is None:
            return self.name
        return self.numbered.with_number(int(self.layer.home_experts[self.row]))

    def whole(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The rows of the whole state by name, from the rows `[n, b]` of each rank: H of a stack, else one."""
        if not self.is_stack:
            return dict(zip(self.whole_names, parts, strict=True))
        return {self.name: torch.cat([*parts])}

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the whole state: its rows `[H, ...]` of a stack, else all of it. Raises
        InputError if a stack has another number of experts."""
        if self.layer is None or not self.is_stack:
            return whole
        num_experts = self.layer.num_experts
        if whole.ndim == 0 or len(whole) != num_experts:
            raise InputError(
                f"a tensor of {self.name!r} has shape {_shape(whole)}; this model has {num_experts} experts"
            )
        return whole[torch.from_numpy(self.layer.home_experts).to(whole.device)]

    def own_value(self, value: StateValue) -> StateValue:
        """A copy of this rank's part of a value of optimizer state; single numbers are shared by all experts."""
        if not isinstance(value, torch.Tensor):
            return value
        return (self.own(value) if value.ndim else value).clone()


class WholeState:
    """A model's weights and optimizer state, with the experts of all ranks.

    Methods are collective over the ranks of an expert-parallel group, unless they say otherwise.

    Args:
        layers: this rank's home experts of all layers.
        group: the ranks of an expert-parallel group, in the order of their experts.
        changed: called when weights were loaded.
    """

    def __init__(
        self,
        layers: Sequence[HomeExperts],
        group: dist.ProcessGroup,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._layers, self._group, self._changed = layers, group, changed

    def weights(self, model: torch.nn.Module, *, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's state, name by name, with the experts of all ranks.

        Every rank must iterate to the end. At a time, one gathered stack, or one expert of each rank, is in memory.

        Args:
            everywhere: yield on every rank; else only on the group's rank 0.

        Yields:
            Names and tensors that may share memory with the model.

        Raises:
            InputError: if the names of a list's Parameters have no expert number; see `find_number`.
        """
        for entry, value in self._entries(model, model.state_dict()):
            for name, whole in self._gather(entry, value, everywhere=everywhere).items():
                yield name, whole if everywhere else whole.cpu()

    def checkpoint(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's state for `torch.distributed.checkpoint`; see `Session.dcp_state_dict`. Not a collective."""
        # torch's modules take two seconds.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        state = {}
        for entry, value in self._entries(model, model.state_dict()):
            rows = state[entry.own_name] = value.detach()
            if entry.layer is not None and entry.is_stack:
                mesh = DeviceMesh.from_group(self._group, rows.device.type)
                shape = torch.Size([entry.layer.num_experts, *rows.shape[1:]])
                state[entry.name] = DTensor.from_local(
                    rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=rows.stride()
                )
        return state

    def load_weights(self, model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's rows of whole tensors. Not a collective.

        Args:
            state: as `weights` yields it, from a run with any number of ranks; the same on every rank.

        Raises:
            InputError: naming a tensor that is missing, unknown, or of another shape; as `weights`.
        """
        entries = self._entries(model, model.state_dict())
        expected = {name for entry, _ in entries for name in entry.whole_names}
        if missing := sorted(expected - state.keys()):
            raise InputError(f"tensor {missing[0]!r} is missing; this model needs it")
        if unknown := sorted(state.keys() - expected):
            raise InputError(f"there is a tensor {unknown[0]!r}; this model has none of that name")
        # Before anything is written, since it may raise.
        self._changed()
        for entry, target in entries:
            name = entry.own_name
            value = entry.own(state[name])
            if value.shape != target.shape:
                raise InputError(f"tensor {name!r} has shape {_shape(value)}; this model has {_shape(target)}")
            target.copy_(value)
        self._changed()

    def optimizer_state(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[str, dict[str, StateValue]]]:
        """The optimizer's state, parameter by parameter, with the experts of all ranks.

        Every rank must iterate to the end; only the group's rank 0 yields.

        Yields:
            Parameter names, and their state by key: tensors on the host, which may share memory with the optimizer, and
            numbers. Parameters without state are left out.

        Raises:
            InputError: as `expert_state` and `weights`; if the ranks' states differ in structure, or a parameter is not
                in the model.
        """
        parameters = dict(model.named_parameters())
        entries, named = self._entries(model, parameters), set(parameters.values())
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter not in named:
                raise InputError(
                    f"{type(optimizer).__name__} trains a tensor {_shape(parameter)} that is not in the model"
                )
        self._check_ranks_agree(optimizer, [(entry, parameter) for entry, parameter in entries if entry.layer])
        for entry, parameter in entries:
            values = optimizer.state.get(parameter, {})
            if not values:
                continue
            whole: dict[str, dict[str, StateValue]] = {name: dict(values) for name in entry.whole_names}
            if entry.layer is not None:
                rows = expert_state(optimizer, parameter, is_stack=entry.is_stack)
                for key in sorted(rows):
                    for name, value in self._gather(entry, rows[key]).items():
                        whole[name][key] = value
            if self._group.rank() == 0:
                for name, of_name in whole.items():
                    yield (
                        name,
                        {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in of_name.items()},
                    )

    def load_optimizer_state(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Mapping[str, StateValue]],
    ) -> None:
        """Replace the optimizer's state by this rank's rows of whole state. Not a collective.

        Learning rates and other settings of the optimizer do not change.

        Args:
            state: as `optimizer_state` yields it, from a run with any number of ranks; the same on every rank.

        Raises:
            InputError: naming a parameter that the model does not have, or state that does not fit it.
        """
        entries = self._entries(model, dict(model.named_parameters()))
        known = {name for entry, _ in entries for name in entry.whole_names}
        for name in state:
            if name not in known:
                raise InputError(f"there is optimizer state of {name!r}; this model has no such parameter")
        mine = {
            parameter: {key: entry.own_value(value) for key, value in state[name].items()}
            for entry, parameter in entries
            if (name := entry.own_name) in state
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

    def _entries(self, model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[_Entry, Tensor]]:
        """Entries for tensors of the model by name, in the same order."""
        names = names_of(model)
        every_name = [name for some in names.values() for name in some]
        entries: list[_Entry] = []
        for layer in self._layers:
            for tensor in layer.tensors:
                if isinstance(tensor, torch.Tensor):
                    entries += [_Entry(name, layer) for name in names.get(id(tensor), [])]
                    continue
                names_of_rows = [names.get(id(parameter), []) for parameter in tensor]
                if len({len(some) for some in names_of_rows}) > 1:
                    raise InputError(
                        f"MoE layer {layer.index}: the model has only some of a list of experts, "
                        f"{', '.join(map(repr, itertools.chain(*names_of_rows)))}"
                    )
                for of_rows in zip(*names_of_rows, strict=True):
                    numbered = find_number(of_rows, every_name)
                    entries += [_Entry(name, layer, row, numbered) for row, name in enumerate(of_rows)]
        of_experts = {entry.name: entry for entry in entries}
        return [(of_experts.get(name, _Entry(name)), tensor) for name, tensor in tensors.items()]

    def _gather(self, entry: _Entry, value: torch.Tensor, *, everywhere: bool = False) -> dict[str, torch.Tensor]:
        """The tensors of all ranks in one entry, by name; empty on ranks other than 0 unless `everywhere`."""
        if entry.layer is None:
            return {entry.name: value} if everywhere or self._group.rank() == 0 else {}
        rows = value if entry.is_stack else value[None]
        parts = self._exchange(rows, everywhere=everywhere)
        if parts is None:
            return {}
        shape = (entry.layer.num_experts, *value.shape[1:]) if entry.is_stack else value.shape
        return {name: whole.view(value.dtype).reshape(shape) for name, whole in entry.whole(parts).items()}

    def _exchange(self, rows: torch.Tensor, *, everywhere: bool) -> list[torch.Tensor] | None:
        """All ranks' `rows [n, ...]` as bytes `[n, b]`, everywhere or on rank 0."""
        # As bytes, since backends do not support all dtypes of optimizer state.
        data = rows.detach().reshape(len(rows), -1).contiguous().view(torch.uint8)
        is_here = everywhere or self._group.rank() == 0
        parts = [torch.empty_like(data) for _ in range(self._group.size())] if is_here else None
        if everywhere:
            dist.all_gather(parts, data, group=self._group)
        else:
            dist.gather(data, parts, group=self._group, group_dst=0)
        return parts

    def _check_ranks_agree(
        self, optimizer: torch.optim.Optimizer, experts: Sequence[tuple[_Entry, torch.nn.Parameter]]
    ) -> None:
        """Raise InputError on all ranks unless their states have the same keys, row shapes and numbers."""
        mine = {
            entry.name: describe_state(optimizer, parameter, is_stack=entry.is_stack) for entry, parameter in experts
        }
        described: list[dict[str, dict[str, object]]] = [{}] * self._group.size()
        dist.all_gather_object(described, mine, group=self._group)
        for rank, other in enumerate(described):
            for name, of_first in described[0].items():
                if other[name] != of_first:
                    raise InputError(
                        f"{type(optimizer).__name__}: the state of {name!r} is {other[name]} on rank {rank} and "
                        f"{of_first} on rank 0; it should be equal"
                    )


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
