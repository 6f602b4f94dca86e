"""`HomeExperts`: the experts of one MoE layer that this rank owns.

Replica transfers, moves, checkpoints and planning work on this value. It knows neither sessions nor autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from trimtab.errors import InputError
from trimtab.runtime.memory import Like
from trimtab.trace.routing import Array

ReadParameters = Callable[[], Sequence[torch.nn.Parameter]]


class HomeExperts:
    """Parameters, their copy in the dtype that is computed in, and where every expert of the layer lives.

    Args:
        parameters: returns this rank's stacked tensors `[E / R, ...]`; called whenever they are needed.
        rank: this rank's number in its expert-parallel group.
        home_E: `[E]` homes.
        compute_dtype: what is computed in; by default the parameters' own dtype.
        joins_in_backward: see the attribute.

    Attributes:
        index: the layer's number among the session's layers, 0 .. L-1.
        dtype: what is computed in.
        likes: shape and dtype of the parameters as they were added.
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
        self.likes = [(parameter.shape, parameter.dtype) for parameter in self.parameters]
        self.joins_in_backward = joins_in_backward
        self.dtype = compute_dtype or self.likes[0][1]
        self.is_staged = any(dtype != self.dtype for _, dtype in self.likes)
        self._staging: list[torch.Tensor | None] = [None] * len(self.likes)
        self.home_E = self.rows_E = np.empty(0, np.int64)
        self.set_homes(home_E)

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """This rank's home experts as they are now, stacked tensors `[E / R, ...]`. Nothing keeps their memory."""
        return self._read()

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """Those of the parameters that are not frozen."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    @property
    def device(self) -> torch.device:
        """Of the parameters now."""
        return self.parameters[0].device

    @property
    def sources(self) -> list[torch.Tensor]:
        """The same values in the dtype that is computed in: the parameters' own memory, or staging memory."""
        return [
            parameter.detach() if dtype == self.dtype else self._staged(t, parameter)
            for t, (parameter, (_, dtype)) in enumerate(zip(self.parameters, self.likes, strict=True))
        ]

    @property
    def home_experts(self) -> Array:
        """Logical ids `[E / R]` of this rank's home experts, ascending: the order of rows in the stacked tensors."""
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
        for t, (parameter, (_, dtype)) in enumerate(zip(self.parameters, self.likes, strict=True)):
            if dtype != self.dtype:
                self._staged(t, parameter).copy_(parameter.detach())

    def _staged(self, tensor: int, parameter: torch.Tensor) -> torch.Tensor:
        staging = self._staging[tensor]
        if staging is None:
            staging = self._staging[tensor] = torch.empty_like(parameter, dtype=self.dtype, requires_grad=False)
        return staging


def check_parameters(
    index: int,
    parameters: Sequence[torch.nn.Parameter],
    layers: Sequence[HomeExperts],
    num_home: int,
    num_experts: int,
) -> None:
    """Look at the parameters of a layer that is to be added.

    Args:
        index: the layer's number.
        layers: those that were added before.
        num_home, num_experts: experts of a rank, and of all.

    Raises:
        InputError: if a tensor does not hold the rank's experts, has no memory, or is another layer's, too.
    """
    if not parameters:
        raise InputError(f"MoE layer {index} was added without expert tensors")
    others = [(layer.index, other) for layer in layers for other in layer.parameters]
    for tensor, parameter in enumerate(parameters):
        for number, other in others:
            if _share_memory(parameter, other):
                raise InputError(
                    f"MoE layer {index} was added with an expert tensor of MoE layer {number}; layers can't share "
                    "experts, since each places its own"
                )
        others.append((index, parameter))
        if parameter.is_meta:
            raise InputError(f"MoE layer {index}: expert tensor {tensor} has no memory; load it before it is added")
        if len(parameter) != num_home:
            raise InputError(
                f"MoE layer {index}: an expert tensor has {len(parameter)} rows; this rank is home to {num_home} of "
                f"{num_experts} experts"
            )


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Are two contiguous tensors the same, or do they overlap in memory?"""
    if one is other:
        return True
    start, other_start = one.data_ptr(), other.data_ptr()
    same_device = one.device == other.device and start != 0 and other_start != 0
    return same_device and start < other_start + other.nbytes and other_start < start + one.nbytes
