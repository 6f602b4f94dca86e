"""`OptimizerWatch`: hooks before and after all optimizer steps of the process, since any of them may change weights.

An optimizer may hold tensors that it copies to the parameters later: masters of another precision, flat buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

Step = Callable[[bool], None]


_watches: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def _watch(watch: OptimizerWatch) -> None:
    """Call the watch at all optimizer steps until it is garbage-collected.

    The hooks are registered once and never removed: removal by garbage collection in the middle of an optimizer step
    would change torch's dictionary of hooks while torch iterates over it.
    """
    _watches.add(watch)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_call_before))
        _handles.append(register_optimizer_step_post_hook(_call_after))


def _call_before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watches):
        watch.before(optimizer)


def _call_after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watches):
        watch.after(optimizer)


class OptimizerWatch:
    """Calls `before` and `after` around every optimizer step, until this value is garbage-collected.

    Args:
        experts: reads the session's expert parameters.
        before, after: called with whether the optimizer holds experts of the session.

    Attributes:
        registered: optimizers that train the experts; they may hold other tensors than the parameters.
    """

    def __init__(self, experts: Callable[[], Sequence[torch.nn.Parameter]], before: Step, after: Step) -> None:
        self.registered: list[torch.optim.Optimizer] = []
        self._experts = experts
        self._before, self._after = before, after
        _watch(self)

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer step."""
        self._before(self._holds_experts(optimizer))

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer step."""
        self._after(self._holds_experts(optimizer))

    def _holds_experts(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer in self.registered:
            return True
        experts = {id(parameter) for parameter in self._experts()}
        return any(id(parameter) in experts for group in optimizer.param_groups for parameter in group["params"])
