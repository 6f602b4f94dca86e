"""`HomeExperts`: the experts of one MoE layer that this rank owns.

Replica transfers, moves, checkpoints and planning work on this value. It knows neither sessions nor autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.flat_memory import Like

ExpertTensor = torch.nn.Parameter | Sequence[torch.nn.Parameter]
"""One tensor of all home experts: a stack `[E / R, ...]`, or a list of E / R Parameters `[...]` in home order."""

ReadParameters = Callable[[], Sequence[ExpertTensor]]


class Rows(Protocol):
    """A tensor of all home experts that gives one expert's `[...]` by its row."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> torch.Tensor: ...


class _DetachedRows:
    """The memory of a list of Parameters."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, row: int, /) -> torch.Tensor:
        return self._parameters[row].detach()


class HomeExperts:
    """Parameters, their copy in the dtype that is computed in, and where every expert of the layer lives.

    Each tensor of the experts is a stack or a list; see `ExpertTensor`. Row r of either belongs to the r-th of
    `home_experts`.

    Args:
        parameters: returns this rank's tensors; called whenever they are needed.
        rank: this rank's number in its expert-parallel group.
        home_E: `[E]` homes.
        compute_dtype: what is computed in; by default the parameters' own dtype.
        joins_in_backward: see the attribute.

    Attributes:
        index: the layer's number among the session's layers, 0 .. L-1.
        dtype: what is computed in.
        likes: shape `[E / R, ...]` and dtype of the tensors as they were added, stacks and lists alike.
        is_staged: whether some parameter has another dtype than is computed in.
        joins_in_backward: whether replica gradients are joined to those of the home experts before the layer's backward
            ends, because something else than `parameters` takes them; see `Session.add_layer`.
        home_E: `[E]` int16, the home rank of every expert.
        rows_E: `[E]` int64, where each expert stands among those of its home, which are in ascending order.
    """

    def __init__(
        self,
        index: int,
        parameters: ReadParameters,
        *,
        rank: int,
        home_E: Array,
        compute_dtype: torch.dtype | None = None,
        joins_in_backward: bool = False,
    ) -> None:
        self.index = index
        self._read = parameters
        self._rank = rank
        self.likes = [_like(tensor) for tensor in self.tensors]
        self.joins_in_backward = joins_in_backward
        self.dtype = compute_dtype or self.likes[0][1]
        self.is_staged = any(dtype != self.dtype for _, dtype in self.likes)
        self._staging: list[torch.Tensor | None] = [None] * len(self.likes)
        self.home_E = self.rows_E = np.empty(0, np.int64)
        self.set_homes(home_E)

    @property
    def tensors(self) -> list[ExpertTensor]:
        """This rank's home experts as they are now. Nothing keeps their memory."""
        return read_tensors(self._read)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The Parameters of all tensors, as optimizers have them: one for a stack, E / R for a list."""
        return [parameter for tensor in self.tensors for parameter in parameters_of(tensor)]

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """Those of the parameters that are not frozen."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    @property
    def are_trained(self) -> list[bool]:
        """Which of the tensors are not frozen. A list is frozen as a whole."""
        return [parameters_of(tensor)[0].requires_grad for tensor in self.tensors]

    @property
    def device(self) -> torch.device:
        """Of the parameters now."""
        return parameters_of(self.tensors[0])[0].device

    @property
    def sources(self) -> list[Rows]:
        """The same values in the dtype that is computed in: the parameters' own memory, or staging memory."""
        return [
            self.staged(t) if dtype != self.dtype else _detached(tensor)
            for t, (tensor, (_, dtype)) in enumerate(zip(self.tensors, self.likes, strict=True))
        ]

    @property
    def home_experts(self) -> Array:
        """Logical ids `[E / R]` of this rank's home experts, ascending: the order of rows in the tensors."""
        return np.flatnonzero(self.home_E == self._rank)

    @property
    def expert_shapes(self) -> list[torch.Size]:
        """Of one expert's tensors."""
        return [shape[1:] for shape, _ in self.likes]

    @property
    def expert_like(self) -> list[Like]:
        """Of one expert's tensors, as they are sent."""
        return [(shape, self.dtype) for shape in self.expert_shapes]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, as it is sent."""
        return sum(shape.numel() for shape in self.expert_shapes) * self.dtype.itemsize

    def set_homes(self, home_E: Array) -> None:
        """Take note of homes `[E]`; moving the rows there is the caller's job."""
        order = np.argsort(home_E, kind="stable")
        self.home_E = home_E
        self.rows_E = np.empty(len(home_E), np.int64)
        self.rows_E[order] = np.arange(len(home_E)) % self.likes[0][0][0]

    def stage_in(self, stacks: Sequence[torch.Tensor]) -> None:
        """Use the given tensors `[E / R, ...]` as staging memory, where there has to be any."""
        self._staging = [*stacks]

    def stage(self) -> None:
        """Bring the parameters' present values into staging memory of another dtype. The session calls it."""
        for t, (tensor, (_, dtype)) in enumerate(zip(self.tensors, self.likes, strict=True)):
            if dtype != self.dtype:
                _copy_rows(self.staged(t), _detached(tensor))

    def copy_to(self, stacks: Sequence[torch.Tensor]) -> None:
        """Bring `sources` into tensors `[E / R, ...]`, except where these are the staging memory itself."""
        for stack, source in zip(stacks, self.sources, strict=True):
            if stack.data_ptr() != source[0].data_ptr():
                _copy_rows(stack, source)

    def staged(self, t: int) -> torch.Tensor:
        """Staging memory `[E / R, ...]` of a tensor that has another dtype than is computed in."""
        staging = self._staging[t]
        if staging is None:
            staging = self._staging[t] = torch.empty(self.likes[t][0], dtype=self.dtype, device=self.device)
        return staging


def read_tensors(read: ReadParameters) -> list[ExpertTensor]:
    """The tensors as they are now, any sequences of Parameters as lists."""
    return [tensor if isinstance(tensor, torch.Tensor) else list(tensor) for tensor in read()]


def parameters_of(tensor: ExpertTensor) -> Sequence[torch.nn.Parameter]:
    """The Parameters of one tensor of the experts."""
    return [tensor] if isinstance(tensor, torch.Tensor) else tensor


def _like(tensor: ExpertTensor) -> tuple[torch.Size, torch.dtype]:
    if isinstance(tensor, torch.Tensor):
        return tensor.shape, tensor.dtype
    return torch.Size([len(tensor), *tensor[0].shape]), tensor[0].dtype


def _detached(tensor: ExpertTensor) -> Rows:
    return tensor.detach() if isinstance(tensor, torch.Tensor) else _DetachedRows(tensor)


def _copy_rows(stack: torch.Tensor, source: Rows) -> None:
    if isinstance(source, torch.Tensor):
        stack.copy_(source)
    else:
        for row in range(len(source)):
            stack[row].copy_(source[row])


def check_parameters(index: int, tensors: Sequence[ExpertTensor], layers: Sequence[HomeExperts], home: Array) -> None:
    """Check the tensors of a layer that is to be added.

    Args:
        index: the layer's number.
        layers: those that were added before.
        home: logical ids `[E / R]` of this rank's experts.

    Raises:
        InputError: if a tensor does not hold the rank's experts, has no memory, or shares memory with another one; if
            the Parameters of a list differ in shape, dtype or whether they are trained.
    """
    if not tensors:
        raise InputError(f"MoE layer {index} was added without expert tensors")
    for t, tensor in enumerate(tensors):
        if len(tensor) != len(home):
            kind, unit = ("tensor", "rows") if isinstance(tensor, torch.Tensor) else ("list", "tensors")
            raise InputError(
                f"MoE layer {index}: expert {kind} {t} has {len(tensor)} {unit}; this rank is home to {len(home)} "
                "experts"
            )
        for parameter, name in zip(parameters_of(tensor), names_of(t, tensor, home), strict=True):
            if not isinstance(parameter, torch.Tensor):
                raise InputError(f"MoE layer {index}: {name} is of type {type(parameter).__name__}, not a Parameter")
            if parameter.is_meta:
                raise InputError(f"MoE layer {index}: {name} has no memory; load it before it is added")
        if not isinstance(tensor, torch.Tensor):
            check_alike(index, t, tensor, home)
    _check_memory(index, tensors, layers, home)


def names_of(t: int, tensor: ExpertTensor, home: Array) -> list[str]:
    """What errors call the Parameters of one tensor."""
    if isinstance(tensor, torch.Tensor):
        return [f"expert tensor {t}"]
    return [f"expert tensor {t} of expert {expert}" for expert in home]


def check_alike(index: int, t: int, tensors: Sequence[torch.nn.Parameter], home: Array) -> None:
    """Raises InputError if the Parameters of a list differ in shape, dtype or whether they are trained."""
    first, *others = (f"{list(p.shape)} {p.dtype}, {'trained' if p.requires_grad else 'frozen'}" for p in tensors)
    for expert, other in zip(home[1:], others, strict=True):
        if other != first:
            raise InputError(
                f"MoE layer {index}: expert tensor {t} of expert {expert} is {other}, and {first} of expert {home[0]}; "
                "the tensors of a list should be alike"
            )


def _check_memory(index: int, tensors: Sequence[ExpertTensor], layers: Sequence[HomeExperts], home: Array) -> None:
    """Raises InputError if tensors of a new layer are the same as others, or overlap with others in memory."""
    spans = [(*_span(parameter), layer.index, "") for layer in layers for parameter in layer.parameters]
    for t, tensor in enumerate(tensors):
        for parameter, name in zip(parameters_of(tensor), names_of(t, tensor, home), strict=True):
            spans.append((*_span(parameter), index, name))
    spans.sort()
    # If any overlap, then some that are neighbours here.
    for (place, _, end, one, name), (other_place, start, _, other, other_name) in itertools.pairwise(spans):
        if place != other_place or start >= end or index not in (one, other):
            continue
        if one != other:
            raise InputError(
                f"MoE layer {index} was added with an expert tensor of MoE layer {min(one, other)}; layers can't share "
                "experts, since each places its own"
            )
        raise InputError(f"MoE layer {index}: {name} and {other_name} share memory; every expert needs its own")


def _span(parameter: torch.Tensor) -> tuple[str, int, int]:
    """Device, start and end of a contiguous tensor in memory. One without memory has a span of its own."""
    start = parameter.data_ptr()
    if start == 0:
        return "none", id(parameter), id(parameter) + 1
    return str(parameter.device), start, start + parameter.nbytes
