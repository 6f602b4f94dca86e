"""`HomeExperts`: the experts of one MoE layer that this rank owns.

Replica transfers, renumbering, checkpoints and planning use it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from trimtab.array_type import Array
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.state.flat_memory import Like

ExpertTensor = torch.nn.Parameter | Sequence[torch.nn.Parameter]
"""One tensor of all home experts: a stack `[E / R, ...]`, or a list of E / R Parameters `[...]` in home order."""

ReadParameters = Callable[[], Sequence[ExpertTensor]]

ByExpert = Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]]
"""Tensors `[E, ...]` of a layer that every rank holds, such as its router's, or a function that returns them."""


Rows = torch.Tensor | list[torch.Tensor]
"""A tensor of all home experts, indexed by row: a stack, or a list of tensors `[...]`."""


class TrainedForm(NamedTuple):
    """The tensors of one expert that are not frozen.

    Attributes:
        numbers: of the tensors.
        shapes, sizes: their shapes and numbers of elements.
    """

    numbers: list[int]
    shapes: list[torch.Size]
    sizes: list[int]


class HomeExperts:
    """Parameters, their copy in the compute dtype, and the homes of all experts of the layer.

    Each tensor of the experts is a stack or a list; see `ExpertTensor`. Row r of either belongs to the r-th expert of
    `home_experts`.

    Args:
        parameters: returns this rank's tensors; called whenever they are needed.
        rank: this rank's number in its expert-parallel group.
        home_E: `[E]` int16, the home rank of every expert.
        compute_dtype: the compute dtype; the parameters' dtype by default.
        joins_in_backward, refresh: see the attributes.

    Attributes:
        index: the layer's number among the session's layers, 0 .. L-1.
        places: rank and row of each expert.
        num_experts: of all ranks, E.
        dtype: the compute dtype.
        likes: shape `[E / R, ...]` and dtype of the tensors as they were added, stacks and lists alike.
        gradient_dtype: the dtype in which gradients of replicas are sent and added.
        expert_shapes: of one expert's tensors.
        expert_like: shapes and dtype of one expert's tensors in transfers.
        expert_bytes: bytes of one expert in transfers.
        are_staged: for each tensor, whether it has another dtype than the compute dtype.
        is_staged: whether any tensor has.
        joins_in_backward: whether replica gradients are added to those of the home experts before the layer's backward
            ends, because they don't accumulate in `parameters`; see `weights` of `Session.add_layer`.
        refresh: brings the parameters up to date with the weights that they are copies of, with all data ranks; None if
            they are the weights themselves.
        sends_rows: whether Trimtab sends the layer's rows; else a framework's dispatcher.
        dispatch_forwards: whether the layer's dispatcher sends a token to a node once; see `ClusterSpec`.
        expert_groups: groups of experts, and to how many of them the router limits a token's; see `ModelSpec`.
        equal_tokens: the dispatcher that needs the same number of tokens on all ranks; empty if none does.
        by_expert: what every rank holds of all experts, such as router rows; None if that is not known.
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
        refresh: Callable[[], None] | None = None,
    ) -> None:
        self.index = index
        self._read, self.refresh = parameters, refresh
        self._rank = rank
        self.places, self.num_experts = ExpertPlaces.at(home_E), len(home_E)
        self.likes = [_like(tensor) for tensor in self.tensors]
        self.joins_in_backward = joins_in_backward
        self.sends_rows, self.dispatch_forwards, self.expert_groups, self.equal_tokens = True, False, (1, 1), ""
        self.by_expert: ByExpert | None = None
        self.dtype = compute_dtype or self.likes[0][1]
        self.gradient_dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
        self.expert_shapes = [shape[1:] for shape, _ in self.likes]
        self.expert_like: list[Like] = [(tuple(shape), self.dtype) for shape in self.expert_shapes]
        self.expert_bytes = sum(shape.numel() for shape in self.expert_shapes) * self.dtype.itemsize
        # Of `hold`.
        self._held: list[ExpertTensor] | None = None
        self._held_form: TrainedForm | None = None
        self.are_staged = [dtype != self.dtype for _, dtype in self.likes]
        self.is_staged = any(self.are_staged)
        self._staging: list[torch.Tensor | None] = []
        self.drop_staging()
        # Parameters that the layer had once, which optimizers may still hold.
        self._had: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary(dict.fromkeys(self.parameters))

    @property
    def tensors(self) -> list[ExpertTensor]:
        """This rank's home experts, read now. Callers must not keep them, since their memory may be replaced."""
        return read_tensors(self._read)

    def hold(self) -> None:
        """Read the tensors for the calls of the layer until this is called again, as they stay between two plans."""
        self._held, self._held_form = self.tensors, None
        self._held_trained = _are_trained(self._held)

    @property
    def current(self) -> list[ExpertTensor]:
        """This rank's home experts in a call of the layer: those of `hold`, or read now."""
        return self._held or self.tensors

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The Parameters of all tensors: one for a stack, E / R for a list."""
        return [parameter for tensor in self.tensors for parameter in parameters_of(tensor)]

    def had(self, parameter: torch.Tensor) -> bool:
        """Whether a Parameter was one of the layer's when it was added."""
        return parameter in self._had

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that are not frozen."""
        return [p for tensor in self.current for p in parameters_of(tensor) if p.requires_grad]

    @property
    def declared(self) -> list[torch.Tensor]:
        """The tensors of `by_expert`, read now."""
        return list(self.by_expert() if callable(self.by_expert) else self.by_expert or ())

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients of parameters and `declared`: in `grad`, or in `main_grad`, where Megatron sums them."""
        tensors = [*self.parameters, *self.declared]
        named = [getattr(tensor, name, None) for tensor in tensors for name in ("grad", "main_grad")]
        return [gradient for gradient in named if gradient is not None]

    @property
    def are_trained(self) -> list[bool]:
        """For each tensor, whether it is not frozen. A list is frozen as a whole."""
        return _are_trained(self.tensors) if self._held is None else self._held_trained

    @property
    def trained_form(self) -> TrainedForm:
        """What is trained of one expert."""
        if self._held is None or self._held_form is None:
            numbers = [t for t, is_trained in enumerate(self.are_trained) if is_trained]
            shapes = [self.expert_shapes[t] for t in numbers]
            self._held_form = TrainedForm(numbers, shapes, [shape.numel() for shape in shapes])
        return self._held_form

    @property
    def device(self) -> torch.device:
        """The device of the parameters now."""
        return parameters_of(self.tensors[0])[0].device

    @property
    def sources(self) -> list[Rows]:
        """The values in the compute dtype: the parameters' own memory, or staging memory."""
        return [self.staged(t) if self.are_staged[t] else _detached(tensor) for t, tensor in enumerate(self.current)]

    def source(self, row: int) -> list[torch.Tensor]:
        """The tensors of one row of `sources`."""
        staged = self.are_staged
        return [self.staged(t)[row] if staged[t] else tensor[row].detach() for t, tensor in enumerate(self.current)]

    @property
    def home_experts(self) -> Array:
        """Ids `[E / R]` of this rank's home experts, in the order of rows in the tensors."""
        experts_H: Array = self.places.experts_RH[self._rank]
        return experts_H

    def stage_in(self, stacks: Sequence[torch.Tensor]) -> None:
        """Use the given tensors `[E / R, ...]` as staging memory, if the layer is staged."""
        self._staging, self._is_staging_given = [*stacks], True

    def stage(self) -> None:
        """Bring the parameters up to date, and copy them to staging memory."""
        if self.refresh is not None:
            self.refresh()
        for t, tensor in enumerate(self.tensors):
            if self.are_staged[t]:
                _copy_rows(self.staged(t), _detached(tensor))

    @property
    def staging_bytes(self) -> int:
        """Bytes of copies of its own: staging memory that `stage_in` was not given, or parameters that are copies."""
        if self.refresh is not None:
            return sum(parameter.nbytes for parameter in self.parameters)
        return 0 if self._is_staging_given else sum(t.nbytes for t in self._staging if t is not None)

    def drop_staging(self) -> None:
        """Free the staging memory, until it is used again."""
        self._staging, self._is_staging_given, self._held = [None] * len(self.likes), False, None

    def copy_to(self, stacks: Sequence[torch.Tensor]) -> None:
        """Copy `sources` to tensors `[E / R, ...]`, except to those that are the staging memory."""
        for stack, source in zip(stacks, self.sources, strict=True):
            if stack.data_ptr() != source[0].data_ptr():
                _copy_rows(stack, source)

    def staged(self, t: int) -> torch.Tensor:
        """Staging memory `[E / R, ...]` of a tensor that has another dtype than the compute dtype."""
        staging = self._staging[t]
        if staging is None:
            staging = self._staging[t] = torch.empty(self.likes[t][0], dtype=self.dtype, device=self.device)
        return staging


def read_tensors(read: ReadParameters) -> list[ExpertTensor]:
    """Read the tensors; sequences of Parameters become lists."""
    return [tensor if isinstance(tensor, torch.Tensor) else list(tensor) for tensor in read()]


def parameters_of(tensor: ExpertTensor) -> Sequence[torch.nn.Parameter]:
    """The Parameters of one tensor of the experts."""
    return [tensor] if isinstance(tensor, torch.Tensor) else tensor


def _are_trained(tensors: Sequence[ExpertTensor]) -> list[bool]:
    return [parameters_of(tensor)[0].requires_grad for tensor in tensors]


def _like(tensor: ExpertTensor) -> tuple[torch.Size, torch.dtype]:
    if isinstance(tensor, torch.Tensor):
        return tensor.shape, tensor.dtype
    return torch.Size([len(tensor), *tensor[0].shape]), tensor[0].dtype


def _detached(tensor: ExpertTensor) -> Rows:
    return tensor.detach() if isinstance(tensor, torch.Tensor) else [each.detach() for each in tensor]


def _copy_rows(stack: torch.Tensor, source: Rows) -> None:
    if isinstance(source, torch.Tensor):
        stack.copy_(source)
    else:
        for row, value in zip(stack, source, strict=True):
            row.copy_(value)
