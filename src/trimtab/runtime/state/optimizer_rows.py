"""Optimizer state of single experts, which is renumbered and saved with them: `ExpertState`.

`check_elementwise` tests whether an optimizer updates each expert of a stack as it would without the others.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.home_experts import ExpertTensor, HomeExperts, parameters_of

StateRows = torch.Tensor | list[torch.Tensor]
"""A tensor of all home experts: a stack `[H, ...]`, or H tensors `[...]`."""


@dataclass(frozen=True, eq=False)
class RowParts:
    """A tensor of all home experts of which the ranks with the same homes hold different parts.

    The elements of a row, one expert's, are numbered in memory order. All parts together have each element once.

    Attributes:
        parts: for each row this rank's part, one-dimensional, which may be empty.
        ranges_GH2: int64, for each expert-parallel group and row the first element of the part and the one after its
            last; the same on all ranks of a group.
    """

    parts: StateRows
    ranges_GH2: Array


class ExpertState:
    """What is renumbered with the experts of a session: state of torch optimizers. Frameworks extend it.

    Args:
        optimizers: which update the experts.
        held: what the optimizers hold of a layer's tensor number t: the experts' Parameters, or copies of them.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        held: Callable[[HomeExperts, int], ExpertTensor] = lambda layer, t: layer.tensors[t],
    ) -> None:
        self._optimizers, self._held = optimizers, held

    def gradients_wait(self, layer: HomeExperts) -> bool:
        """Whether this rank's experts have gradients that no optimizer has used, which would be lost."""
        return any_nonzero(layer.gradients)

    def form(self, layer: HomeExperts, t: int) -> object:
        """What has to be equal on all ranks before experts are exchanged: the form of the state for tensor number t.

        Raises:
            InputError: if the state can't be exchanged.
        """
        tensor = self._held(layer, t)
        is_stack, first = isinstance(tensor, torch.Tensor), parameters_of(tensor)[0]
        return [
            (describe_state(each, first, is_stack=is_stack), settings_of(each, [first])) for each in self._optimizers
        ]

    def check_elementwise(self, layers: Sequence[HomeExperts]) -> None:
        """Check each optimizer with its settings now. Raises InputError as `check_elementwise`."""
        for optimizer in self._optimizers:
            check_elementwise(optimizer, layers)

    def rows(self, layer: HomeExperts) -> list[StateRows]:
        """State of which this rank has whole rows, in the same order on all ranks. Raises InputError as `form`."""
        return [
            rows
            for t in range(len(layer.likes))
            for optimizer in self._optimizers
            for rows in state_by_row(optimizer, self._held(layer, t), name_of_tensor(layer, t), layer.home_experts)
        ]

    def part_bytes(self, layer: HomeExperts) -> int:
        """Bytes of `row_parts` that a rank sends for one expert, about."""
        return 0

    def permute_others(self, layers: Sequence[HomeExperts], order_LE: Array) -> None:
        """Permute state of the layers' `declared` tensors of which this rank has parts. A collective over all data
        ranks."""

    def row_parts(self, layers: Sequence[HomeExperts]) -> list[list[RowParts]]:
        """For each layer the state of which this rank has parts of rows, in the same order on all ranks. A collective
        over all data ranks."""
        return [[] for _ in layers]


def any_nonzero(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any element of any tensor is not 0. The host waits for the device once."""
    counts = [tensor.count_nonzero() for tensor in tensors]
    return bool(counts) and bool(torch.stack(counts).any())


def name_of_tensor(layer: HomeExperts, t: int) -> str:
    """A tensor of the experts, in errors."""
    return f"MoE layer {layer.index}, expert tensor {t}"


def expert_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, *, is_stack: bool
) -> dict[str, torch.Tensor]:
    """The tensors of a Parameter's optimizer state that belong to single experts. Not a collective.

    Single numbers, such as a step count, are shared by all experts and left out.

    Args:
        parameter: a stack of this rank's experts `[H, ...]`, or one expert's Parameter of a list `[...]`.

    Returns:
        The optimizer's tensors by key: `[H, ...]` for a stack, of any shape for a list. Empty before its first step.

    Raises:
        InputError: for state that is not a single number, and for a stack not one row for each expert, for a list not a
            tensor.
    """
    tensors = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        has_dimension = isinstance(value, torch.Tensor) and value.ndim > 0
        if has_dimension and (not is_stack or len(value) == len(parameter)):
            tensors[key] = value
        elif has_dimension or not isinstance(value, int | float | torch.Tensor):
            kind = f"shape {list(value.shape)}" if has_dimension else f"type {type(value).__name__}"
            wanted = f"have {len(parameter)} rows, one for each expert" if is_stack else "a tensor"
            raise InputError(
                f"{type(optimizer).__name__} keeps {key!r} of {kind} for an expert tensor {list(parameter.shape)}; it "
                f"should be a single number or {wanted}"
            )
    return tensors


def state_by_row(
    optimizer: torch.optim.Optimizer, tensor: ExpertTensor, where: str, home: Array
) -> list[torch.Tensor | list[torch.Tensor]]:
    """The optimizer state of single experts for one of their tensors, ordered by key as on all ranks.

    Args:
        where: the tensor's name in errors.
        home: ids `[H]` of its experts.

    Returns:
        Stacks `[H, ...]`, or lists of H tensors.

    Raises:
        InputError: as `expert_state`; if the states of a list's Parameters differ in keys, shapes, dtypes or numbers,
            or the settings of their parameter groups differ.
    """
    if isinstance(tensor, torch.Tensor):
        rows = expert_state(optimizer, tensor, is_stack=True)
        return [rows[key] for key in sorted(rows)]
    states = [expert_state(optimizer, parameter, is_stack=False) for parameter in tensor]
    kinds: dict[str, list[Any]] = {
        "state": [describe_state(optimizer, parameter, is_stack=False) for parameter in tensor],
        "parameter group": settings_of(optimizer, tensor),
    }
    for kind, (first, *others) in kinds.items():
        for expert, other in zip(home[1:], others, strict=True):
            if other != first:
                raise InputError(
                    f"{type(optimizer).__name__}: the {kind} of {where} is {other or 'empty'} for expert {expert} and "
                    f"{first or 'empty'} for expert {home[0]}; it should be equal"
                )
    return [[state[key] for state in states] for key in sorted(states[0])]


def settings_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> list[dict[str, str]]:
    """For each Parameter the settings of its group as text, without tensors; empty if the optimizer has no such one."""
    place = {id(parameter): place for place, parameter in enumerate(parameters)}
    settings: list[dict[str, str]] = [{} for _ in parameters]
    for group in optimizer.param_groups:
        texts = {key: str(value) for key, value in sorted(group.items()) if key not in ("params", "param_names")}
        for parameter in group["params"]:
            if id(parameter) in place:
                settings[place[id(parameter)]] = texts
    return settings


def describe_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, *, is_stack: bool
) -> dict[str, object]:
    """The state that must be equal for all experts, by key: dtype and shape of an expert's tensors, single numbers.

    Args:
        parameter: a stack `[H, ...]`, or one of a list `[...]`.
    """
    tensors = expert_state(optimizer, parameter, is_stack=is_stack)
    return {
        key: (str(value.dtype), list(value.shape[is_stack:])) if key in tensors else float(value)
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    }


# Experts and largest dimension of the small stack, and its steps.
EXPERTS, MOST, STEPS = 3, 4, 3
# Most difference of values, as a part of their largest change.
TOLERANCE = 1e-3


def check_elementwise(optimizer: torch.optim.Optimizer, layers: Sequence[HomeExperts]) -> None:
    """Check how an optimizer updates stacks of experts. Lists are updated expert by expert.

    Ids decide which experts share a stack, so an optimizer that uses norms or ranks of a whole stack (Adafactor,
    LAMB, Muon) gives other results after a renumbering. It is tested by what a copy of the optimizer does to a small
    stack.

    An optimizer of which no copy can be made is not checked here.

    Raises:
        InputError: naming the tensor, if an expert's update depends on the others of its stack.
    """
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    checked: set[tuple[int, int]] = set()
    for layer in layers:
        for t, tensor in enumerate(layer.tensors):
            group = settings.get(id(tensor))
            if group is None or not isinstance(tensor, torch.Tensor) or (id(group), tensor.ndim) in checked:
                continue
            checked.add((id(group), tensor.ndim))
            try:
                is_elementwise = _updates_rows_alone(optimizer, group, tensor)
            except Exception:  # Of any optimizer's own code.
                continue
            if not is_elementwise:
                raise InputError(
                    f"{name_of_tensor(layer, t)}: {type(optimizer).__name__} updates an expert by the other experts of "
                    "its stack, which a renumbering changes; use an elementwise optimizer (AdamW, SGD, Lion), or a "
                    "list of Parameters instead of the stack"
                )


def _updates_rows_alone(optimizer: torch.optim.Optimizer, group: dict[str, Any], like: torch.Tensor) -> bool:
    """Whether a stack `[EXPERTS, ...]` and its rows alone have the same values after some steps."""
    random = torch.Generator().manual_seed(0)
    shape = EXPERTS, *(min(size, MOST) for size in like.shape[1:])
    # Experts of different norms.
    scale = torch.tensor([1.0, 10.0, 0.1]).view(-1, *[1] * (len(shape) - 1))
    values, *gradients = (torch.randn(shape, generator=random) * scale for _ in range(1 + STEPS))
    with torch.inference_mode(False), torch.random.fork_rng([]):
        whole = _after_steps(optimizer, group, values.to(like.device), gradients)
        rows = [
            _after_steps(optimizer, group, values[row : row + 1].to(like.device), [g[row : row + 1] for g in gradients])
            for row in range(EXPERTS)
        ]
    alone = torch.cat(rows)
    largest = (alone - values.to(like.device)).abs().amax()
    return bool(((whole - alone).abs() <= TOLERANCE * largest).all())


def _after_steps(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], values: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The values after steps of a copy of the optimizer with these gradients."""
    parameter = torch.nn.Parameter(values.clone())
    settings = group | {"params": [parameter]}
    if "lr" in group and not group["lr"]:  # As at the start of a warm-up.
        settings["lr"] = torch.ones_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 1.0
    copied = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    # Neither state nor hooks of the user.
    hooks = {name: OrderedDict[int, Any]() for name in vars(optimizer) if name.endswith("_hooks")}
    vars(copied).update(hooks, state=defaultdict(dict), param_groups=[settings])
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # Without the hooks of all optimizers.
    for gradient in gradients:
        parameter.grad = gradient.to(values)
        step(copied)
    return parameter.detach()
