"""The planner's interface of kunlunl/Megatron-MoeScheduler at d5f538fb5, in our own words, and what calls a planner.

`use_contract` puts it where the fork has it, unless the fork itself is installed.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

MODULE = "megatron.core.transformer.moe.moe_scheduler"


@dataclass(frozen=True)
class SchedulerContext:
    layer_number: int | None
    num_logical_experts: int
    num_local_experts: int
    local_expert_indices: tuple[int, ...]
    ep_size: int
    ep_rank: int
    router_topk: int
    training: bool
    config: Any = None
    pg_collection: Any = None


class MoEPlacementResult:
    """What a planner keeps between its two calls."""


class MoELoadPlanner(nn.Module, ABC):
    planner_name = "abstract"

    def should_plan(
        self, probs: torch.Tensor, routing_map: torch.Tensor, context: SchedulerContext, *,
        tokens_per_expert: torch.Tensor | None = None,
    ) -> bool:  # fmt: skip
        return True

    @abstractmethod
    def update_placement(
        self, probs: torch.Tensor, routing_map: torch.Tensor, context: SchedulerContext, *,
        tokens_per_expert: torch.Tensor | None = None,
    ) -> Any: ...  # fmt: skip

    def step(self, completed_version: int | None = None) -> None:
        assert completed_version is None

    @abstractmethod
    def reroute(
        self, probs: torch.Tensor, routing_map: torch.Tensor, placement_result: Any, context: SchedulerContext
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class MoEScheduler(nn.Module):
    """Calls the planner, and checks what it returns."""

    def __init__(self, planner: Any, expert_dispatch: Any, home_expert_dispatch: Any = None) -> None:
        super().__init__()
        self.planner, self.expert_dispatch = planner, expert_dispatch
        self.home_expert_dispatch = home_expert_dispatch

    def schedule(
        self, probs: torch.Tensor, routing_map: torch.Tensor, experts: Any, context: SchedulerContext, *,
        tokens_per_expert: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        given = probs, routing_map, context
        if not self.planner.should_plan(*given, tokens_per_expert=tokens_per_expert):
            return probs, routing_map
        homes, sources, kept = self.planner.update_placement(*given, tokens_per_expert=tokens_per_expert)
        assert homes is None or self.home_expert_dispatch is not None
        physical = context.num_logical_experts
        if sources is not None:
            assert sources.ndim == 2
            assert len(sources) == context.ep_size
            assert sources.dtype in (torch.int32, torch.int64)
            assert self.expert_dispatch.supports(sources, context)
            self.expert_dispatch.dispatch(experts, sources, context)
            physical += sources.numel()
        physical_map, physical_probs = self.planner.reroute(probs, routing_map, kept, context)
        assert physical_map.dtype == torch.bool
        assert physical_map.shape == physical_probs.shape == (len(probs), physical)
        return physical_probs, physical_map


def use_contract() -> ModuleType:
    """The module of the fork, or this one in its place."""
    if MODULE not in sys.modules and find_spec(MODULE) is None:
        sys.modules[MODULE] = sys.modules[__name__]
    return sys.modules.get(MODULE) or __import__(MODULE, fromlist=["_"])
