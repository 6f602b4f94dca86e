"""`OptimizerWatch`: tells a session of all optimizer steps in the process, since any of them may change its weights.

An optimizer may hold other tensors that it copies to the parameters: masters of another precision, flat buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Step = Callable[[bool], None]


class OptimizerWatch:
    """Calls `before` and `after` around every optimizer step, until this value is garbage-collected.

    Args:
        experts: reads the session's expert parameters.
        before, after: told whether the optimizer holds experts of the session.

    Attributes:
        registered: optimizers that train the experts, whatever tensors they hold.
    """

    def __init__(self, experts: Callable[[], Sequence[torch.nn.Parameter]], before: Step, after: Step) -> None:
        self.registered: list[torch.optim.Optimizer] = []
        self._experts = experts
        self._before, self._after = before, after
        watch_ref = weakref.ref(self)

        def call_before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            watch = watch_ref()
            if watch is not None:
                watch._before(watch._holds_experts(optimizer))

        def call_after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            watch = watch_ref()
            if watch is not None:
                watch._after(watch._holds_experts(optimizer))

        for handle in (register_optimizer_step_pre_hook(call_before), register_optimizer_step_post_hook(call_after)):
            weakref.finalize(self, handle.remove)

    def _holds_experts(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer in self.registered:
            return True
        experts = {id(parameter) for parameter in self._experts()}
        return any(id(parameter) in experts for group in optimizer.param_groups for parameter in group["params"])
