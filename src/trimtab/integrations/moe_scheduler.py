"""`foresight`, a planner for kunlunl/Megatron-MoeScheduler: replicas and split of a `StepPlan` on its transports.

The fork's schedulers ask a planner in every forward of a MoE layer, after its router, and move weights and gradients of
replicas by themselves. Its own planners know the routes of this layer alone; a `StepPlan` was made from the recorded
routes of the whole step. Experts stay at their homes.

Written for commit d5f538fb5, and tested on CPU against its interface; it has not run with the fork's transports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_scheduler import MoELoadPlanner, MoEPlacementResult
from torch import nn

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.integrations.megatron.layer_numbers import moe_layers, number_layers
from trimtab.planner import Placement, StepPlan
from trimtab.runtime.rows.physical_experts import InstanceReplicas


def use_foresight(model_chunks: nn.Module | Sequence[nn.Module]) -> Foresight:
    """Replace the planners of a model's MoE layers. Collective over the pipeline.

    Layers for multi-token prediction keep the fork's planner, since their routes are not recorded.

    Args:
        model_chunks: of this rank, built with `moe_enable_scheduler`, any `moe_scheduler_planner_type` and
            `moe_scheduler_num_idle_experts`, which are the slots of all ranks.

    Returns:
        What plans are given to. Without one, all tokens go to the homes of their experts.

    Raises:
        InputError: on all stages of the pipeline, if a layer has no scheduler, or schedulers move homes.
    """
    layers = moe_layers([model_chunks] if isinstance(model_chunks, nn.Module) else model_chunks)
    schedulers = [next(_schedulers_of(layer), None) for layer in layers]
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    numbers = number_layers(layers, _problem_of(layers, schedulers), pipeline)
    planners = []
    for layer, scheduler in zip(layers, schedulers, strict=True):
        config = layer.config
        ranks = config.expert_model_parallel_size
        shape = config.num_moe_experts, ranks, config.moe_scheduler_num_idle_experts // ranks
        planners.append(ForesightPlanner(numbers.index(layer.layer_number - 1), *shape))
        scheduler.planner = planners[-1]  # type: ignore[union-attr]
    return Foresight(planners, len(numbers))


def _schedulers_of(layer: nn.Module) -> Iterator[Any]:
    """Modules in a MoE layer that have one of the fork's planners."""
    return (each for each in layer.modules() if isinstance(getattr(each, "planner", None), MoELoadPlanner))


def _problem_of(layers: Sequence[Any], schedulers: Sequence[Any]) -> str:
    """Why these layers can't have the planner; "" if they can."""
    for layer, scheduler in zip(layers, schedulers, strict=True):
        if scheduler is None:
            return f"MoE layer {layer.layer_number} has no scheduler; set moe_enable_scheduler"
        if scheduler.home_expert_dispatch is not None:
            return "foresight keeps experts at their homes; leave out moe_scheduler_home_update_interval"
    return ""


class Foresight:
    """The planners of this rank's layers.

    Args:
        num_layers: MoE layers of the whole model.
    """

    def __init__(self, planners: Sequence[ForesightPlanner], num_layers: int) -> None:
        self._planners, self._num_layers = planners, num_layers

    def use(self, plan: StepPlan | None) -> None:
        """Let the next forwards follow a plan: the first one of each layer its micro-step 0, and so on. Not a
        collective. Call it before every pass over the micro-steps of a step, with the same plan on all ranks of the
        expert-parallel group.

        Tokens are right whatever their routes are; the ranks are as even as planned if routers replay the recorded
        ones (`moe_enable_routing_replay`).

        Args:
            plan: with all MoE layers of the model, and experts at their first homes; None for no replicas.

        Raises:
            InputError: if the plan is for another model, other ranks, more slots, or moves experts.
        """
        for planner in self._planners:
            if plan is not None and (problem := planner.problem_of(plan, self._num_layers)):
                raise InputError(problem)
        for planner in self._planners:
            planner.use(plan)


@dataclass(frozen=True, eq=False)
class _Copies(MoEPlacementResult):  # type: ignore[misc]
    """The copies of each expert in one layer call, for this rank's tokens.

    Attributes:
        ends_CE: `[C, E]` int64, for each replica of an expert the first of this rank's tokens of the expert, in token
            order, that does not go to it or to replicas before it; ascending along C.
        physical_EC: `[E, C + 1]` int64, the physical experts of the replicas, and last of the home.
    """

    ends_CE: torch.Tensor
    physical_EC: torch.Tensor


class ForesightPlanner(MoELoadPlanner):  # type: ignore[misc]
    """The planner of one layer.

    Args:
        layer: its number in plans.
        num_experts, num_ranks, num_slots: experts of the layer, ranks of the expert-parallel group, slots of a rank.
    """

    planner_name = "foresight"

    def __init__(self, layer: int, num_experts: int, num_ranks: int, num_slots: int) -> None:
        super().__init__()
        self._layer, self._num_ranks, self._num_slots = layer, num_ranks, num_slots
        self._home_E = Placement.contiguous(1, num_experts, num_ranks).home[0].astype(np.int64)
        self._plan: StepPlan | None = None
        self._micro_step = 0

    def use(self, plan: StepPlan | None) -> None:
        """See `Foresight.use`."""
        self._plan, self._micro_step = plan, 0

    def problem_of(self, plan: StepPlan, num_layers: int) -> str:
        """Why the layer can't follow a plan; "" if it can."""
        mine = num_layers, len(self._home_E), self._num_ranks
        its = plan.num_layers, plan.home.shape[1], plan.num_ranks
        if its != mine:
            return f"the plan is for [layers, experts, ranks] {list(its)}; the model has {list(mine)}"
        if plan.slots_per_rank > self._num_slots:
            return (
                f"the plan is for {plan.slots_per_rank} slots a rank; moe_scheduler_num_idle_experts gives a rank "
                f"{self._num_slots}"
            )
        if not np.array_equal(plan.home[self._layer], self._home_E):
            return "the plan moves experts to other homes; plan with may_move=False"
        return ""

    def update_placement(
        self,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        context: Any,
        *,
        tokens_per_expert: torch.Tensor | None = None,
    ) -> tuple[None, torch.Tensor, _Copies]:
        """The sources `[R, S]` int32 of replicas in all slots, -1 in those that are not used, and the copies.

        Raises:
            RuntimeError: if the layer has run all micro-steps of its plan.
        """
        del probs, tokens_per_expert
        replicas = self._replicas()
        self._micro_step += 1
        sources_RS = np.full((self._num_ranks, self._num_slots), -1, np.int32)
        # The homes of all ranks are in the order of experts.
        sources_RS[replicas.ranks, replicas.slots] = replicas.experts
        arrays = sources_RS, *self._copies(replicas, context.ep_rank)
        sources, *copies = (torch.from_numpy(each).to(routing_map.device) for each in arrays)
        return None, sources, _Copies(*copies)

    def reroute(
        self, probs: torch.Tensor, routing_map: torch.Tensor, placement_result: Any, context: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route `[T, E]` bool and weights of experts to `[T, R * (H + S)]` of physical experts."""
        assert isinstance(placement_result, _Copies)
        order_TE = routing_map.to(torch.int64).cumsum(dim=0) - 1
        copy_TE = torch.zeros_like(order_TE)
        for ends_E in placement_result.ends_CE:
            copy_TE += order_TE >= ends_E
        physical_TE = placement_result.physical_EC.gather(1, copy_TE.T).T
        shape = len(routing_map), len(self._home_E) + self._num_ranks * self._num_slots
        physical_map = routing_map.new_zeros(shape).scatter(1, physical_TE, routing_map)
        return physical_map, probs.new_zeros(shape).scatter(1, physical_TE, probs.where(routing_map, 0))

    def _replicas(self) -> InstanceReplicas:
        """The replicas of this call."""
        plan = self._plan
        if plan is None:
            return InstanceReplicas.none(self._num_ranks)
        if self._micro_step >= plan.num_micro_steps:
            raise RuntimeError(
                f"MoE layer {self._layer} has run the {plan.num_micro_steps} micro-steps of its plan; call use() "
                "before the next pass"
            )
        return InstanceReplicas.of(plan, self._micro_step, self._layer)

    def _copies(self, replicas: InstanceReplicas, rank: int) -> tuple[Array, Array]:
        """The attributes of `_Copies`."""
        experts_E, homes = np.arange(len(self._home_E)), len(self._home_E) // self._num_ranks
        of_rank = homes + self._num_slots
        most = int(np.bincount(replicas.experts, minlength=1).max())
        # An expert with fewer replicas has further ends without tokens, which lead to its home.
        ends_CE = np.zeros((most, len(experts_E)), np.int64)
        physical_EC = np.repeat((self._home_E * of_rank + experts_E % homes)[:, None], most + 1, axis=1)
        filled_E = np.zeros(len(experts_E), np.int64)
        physical_P = replicas.ranks * of_rank + homes + replicas.slots
        for expert, physical, quota in zip(replicas.experts, physical_P, replicas.quotas_PR[:, rank], strict=True):
            ends_CE[filled_E[expert] :, expert] += quota
            physical_EC[expert, filled_E[expert]] = physical
            filled_E[expert] += 1
        return ends_CE, physical_EC
