"""`KnownPlaces`: the places of a layer's experts, which belong to its Parameters and not to a session.

All sessions of a process that get the same Parameters share them: a session that is created after experts have moved
starts from their present places, and a move in one session is known in all others. Tensors that a user keeps under the
names of the model's parameters, such as averages of weights, are known here too, and move with the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trimtab.errors import InputError
from trimtab.runtime.state.expert_places import ExpertPlaces

OnMove = Callable[[int, ExpertPlaces, ExpertPlaces], None]
"""Called with the number of a layer whose experts have moved, and their places before and after."""

Names = str | list[str] | None
"""The name of a stack, those of a list, or None for a tensor that is not kept."""

ReadState = Callable[[], Mapping[str, torch.Tensor]]

_last_move = 0


@dataclass(eq=False)
class KeptState:
    """Tensors that a user keeps of a layer's experts.

    Attributes:
        read: reads them by name, as they are now.
        names_T: names of the layer's tensors in them.
        shapes: `[H, ...]` of the layer's tensors.
    """

    read: ReadState
    names_T: list[Names]
    shapes: Sequence[torch.Size]

    def tensors(self) -> list[torch.Tensor | list[torch.Tensor] | None]:
        """For each of the layer's tensors a stack `[H, ...]`, a list of H tensors `[...]`, or None if it is not kept.

        Raises:
            InputError: if one is missing now, or has another shape than the Parameter of its name.
        """
        state = self.read()
        return [_tensors_of(state, names, shape) for names, shape in zip(self.names_T, self.shapes, strict=True)]

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of them."""
        state = self.read()
        every = [name for names in self.names_T for name in ([names] if isinstance(names, str) else names or ())]
        return any(name in state and state[name].data_ptr() == tensor.data_ptr() for name in every)


@dataclass(eq=False)
class KnownPlaces:
    """The places of the experts of one layer.

    Attributes:
        first, now: at the start, and at present.
        rank: this rank's number in its expert-parallel group.
        ranks: the ranks of this group in the whole job.
        moved_at: the number of the layer's last move among all moves of this process; 0 if there was none.
        noted: sampled elements of this rank's experts, as the trained model has them; None if that is not known.
        returns_to: within `Session.first_homes`, the places of the trained model's experts; None outside.
        states: tensors that users keep of the experts.
        on_move: called after each move.
        is_replaced: whether a later session has the Parameters for other ranks.
    """

    first: ExpertPlaces
    rank: int
    ranks: tuple[int, ...] = ()
    moved_at: int = 0
    noted: torch.Tensor | None = None
    returns_to: ExpertPlaces | None = None
    states: list[KeptState] = field(default_factory=list)
    on_move: list[OnMove] = field(default_factory=list)
    is_replaced: bool = False

    def __post_init__(self) -> None:
        self.now = self.first

    @property
    def are_first(self) -> bool:
        """Whether all experts are at their first places."""
        return self.now is self.first

    def set(self, places: ExpertPlaces) -> None:
        """Store the places after a move: `first` itself if all experts are there again."""
        global _last_move
        _last_move += 1
        self.now, self.moved_at = places, _last_move

    @contextmanager
    def at_first(self) -> Iterator[None]:
        """A context in which the Parameters have the weights of another model, with experts at their first places."""
        self.returns_to, self.now = self.now, self.first
        try:
            yield
        finally:
            self.now, self.returns_to = self.returns_to, None

    def keep(self, state: KeptState) -> Callable[[], None]:
        """Let tensors move with the experts from now on, until the returned function is called. Raises InputError as
        `KeptState.tensors`."""
        if not any(state.names_T):
            return lambda: None
        tensors = state.tensors()
        self.states.append(state)
        if all(isinstance(tensor, nn.Parameter) for tensor in _flat(tensors)):
            know(self, [tensor if tensor is not None else () for tensor in tensors], state=True)
        return lambda: self.states.remove(state) if state in self.states else None


def moves_so_far() -> int:
    """Number of moves of layers in this process."""
    return _last_move


Row = tuple[KnownPlaces, int, int | None]
"""Of a Parameter: the places of its experts, its tensor's number in the layer, and its row; None for a stack."""

_parameters = WeakIdKeyDictionary()
# The same of registered state that is a module.
_registered = WeakIdKeyDictionary()


def row_of(parameter: torch.Tensor) -> Row | None:
    """What is known of a Parameter of experts, or of registered state; None if it is neither."""
    row: Row | None = _parameters.get(parameter) or _registered.get(parameter)
    return row


def know(known: KnownPlaces, tensors: Sequence[torch.Tensor | Sequence[torch.Tensor]], *, state: bool = False) -> None:
    """Store that Parameters have the rows of a layer's experts, as stacks or lists.

    Args:
        state: they are registered state.
    """
    table = _registered if state else _parameters
    for t, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor):
            table[tensor] = known, t, None
        else:
            for row, parameter in enumerate(tensor):
                table[parameter] = known, t, row


def follow_parameter(before: torch.Tensor, now: torch.Tensor) -> None:
    """Store that a Parameter has replaced another one in a module, with the same rows."""
    for table in _parameters, _registered:
        if before in table and now.shape == before.shape and row_of(now) is None:
            table[now] = table[before]


def known_places(
    index: int, parameters: Sequence[torch.Tensor], first: ExpertPlaces, rank: int, ranks: tuple[int, ...]
) -> KnownPlaces:
    """The places of a new layer's experts: those that are known, or the first ones.

    Args:
        index: the layer's number.
        first: the places at the start in the new session.
        rank, ranks: see `KnownPlaces`.

    Raises:
        InputError: if experts are away from their first places and the session has other ranks, or only some of the
            layer's Parameters are known; if a Parameter is registered state.
    """
    if any(parameter in _registered for parameter in parameters):
        raise InputError(
            f"MoE layer {index} was added with state that moves with the experts of another layer (register_state); "
            "copy its values to the parameters of the model to run them"
        )
    rows = [_parameters.get(parameter) for parameter in parameters]
    found = list({id(row[0]): row[0] for row in rows if row is not None}.values())
    if len(found) == 1 and None not in rows:
        known: KnownPlaces = found[0]
        if (known.rank, known.ranks) == (rank, ranks) and np.array_equal(known.first.home_E, first.home_E):
            return known
    for known in found:
        if not known.are_first:
            raise InputError(
                f"the experts of MoE layer {index} have moved in an earlier session, with experts on ranks "
                f"{list(known.ranks)}; a session with experts on ranks {list(ranks)} can't have "
                + ("them" if None not in rows else "some of them and new ones")
                + ", move them back first with its session.move()"
            )
        known.is_replaced = True
    return KnownPlaces(first, rank, ranks)


def read_state(state: nn.Module | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The tensors of registered state by name, as they are now."""
    return dict(state.named_parameters(remove_duplicate=False)) if isinstance(state, nn.Module) else state


def names_in(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    names: Mapping[int, Sequence[str]],
    state: Mapping[str, torch.Tensor],
    where: str,
) -> Names:
    """The names of a tensor of experts in registered state.

    Args:
        names: of the model's Parameters, by `id`.
        where: the layer, in errors.

    Raises:
        InputError: if the state has only some Parameters of a list.
    """
    parameters = [tensor] if isinstance(tensor, torch.Tensor) else tensor
    found = [[name for name in names.get(id(parameter), ()) if name in state] for parameter in parameters]
    if not any(found):
        return None
    if not all(found):
        raise InputError(f"{where}: register_state() was given only some of its experts, such as {max(found)[0]!r}")
    return found[0][0] if isinstance(tensor, torch.Tensor) else [some[0] for some in found]


def _flat(tensors: Sequence[torch.Tensor | Sequence[torch.Tensor] | None]) -> list[torch.Tensor]:
    return [each for some in tensors for each in ([some] if isinstance(some, torch.Tensor) else some or ())]


def _tensors_of(
    state: Mapping[str, torch.Tensor], names: Names, shape: torch.Size
) -> torch.Tensor | list[torch.Tensor] | None:
    """Registered tensors: a stack of this shape `[H, ...]`, a list of H tensors, or None."""
    if names is None:
        return None
    for name in [names] if isinstance(names, str) else names:
        wanted, value = shape if isinstance(names, str) else shape[1:], state.get(name)
        if value is None or value.shape != wanted:
            found = "is missing" if value is None else f"has shape {list(value.shape)}"
            raise InputError(
                f"state that moves with the experts (register_state): {name!r} {found}; the parameter has shape "
                f"{list(wanted)}"
            )
    return state[names] if isinstance(names, str) else [state[name] for name in names]
