"""`check_elementwise`: whether an optimizer updates each expert of a stack as it would without the others.

Homes decide which experts share a stack, so an optimizer that uses norms or ranks of a whole stack (Adafactor, LAMB,
Muon) gives other results after each move. It is tested by what a copy of the optimizer does to a small stack.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from trimtab.errors import InputError
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.state.optimizer_rows import name_of_tensor

# Experts and largest dimension of the small stack, and its steps.
EXPERTS, MOST, STEPS = 3, 4, 3
# Most difference of values, as a part of their largest change.
TOLERANCE = 1e-3


def check_elementwise(optimizer: torch.optim.Optimizer, layers: Sequence[HomeExperts]) -> None:
    """Check how an optimizer updates stacks of experts. Lists are updated expert by expert.

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
                    "its stack, which change when experts move; use an elementwise optimizer (AdamW, SGD, Lion), or a "
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
