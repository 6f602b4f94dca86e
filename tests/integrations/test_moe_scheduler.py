"""`foresight` keeps the contract of kunlunl/Megatron-MoeScheduler, and sends every token where its plan says."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

from helpers.framework_signatures import STORED, parameters_in, stored
from helpers.moe_scheduler_contract import use_contract
from helpers.random_plans import random_placement, random_plan, random_schedule, random_trace
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.planner import StepPlan, Workload
from trimtab.runtime.rows.physical_experts import InstanceReplicas, PhysicalExperts, PlannedRows
from trimtab.trace import RoutingTrace

RANKS, LAYERS, EXPERTS, SLOTS, MICRO_STEPS, TOP_K = 4, 3, 8, 3, 2, 2
HOMES = EXPERTS // RANKS
# Of all ranks, one after the other.
HOME_IDS = np.array([rank * (HOMES + SLOTS) + home for rank in range(RANKS) for home in range(HOMES)])
contract: Any = use_contract()


class Dispatch(nn.Module):
    """Keeps the sources of replicas, and refuses tables that the fork would refuse."""

    sources: torch.Tensor

    def supports(self, sources: torch.Tensor, context: Any) -> bool:
        return sources.shape == (context.ep_size, SLOTS) and sources.is_contiguous()

    def dispatch(self, _experts: Any, sources: torch.Tensor, _context: Any) -> None:
        self.sources = sources


def context_of(rank: int, layer: int) -> Any:
    return contract.SchedulerContext(
        layer_number=2 * layer + 1, num_logical_experts=EXPERTS, num_local_experts=HOMES,
        local_expert_indices=tuple(range(rank * HOMES, (rank + 1) * HOMES)), ep_size=RANKS, ep_rank=rank,
        router_topk=TOP_K, training=True,
    )  # fmt: skip


def schedulers() -> tuple[Any, list[Any]]:
    """One rank's layers."""
    from trimtab.integrations.moe_scheduler import Foresight, ForesightPlanner

    planners = [ForesightPlanner(layer, EXPERTS, RANKS, SLOTS) for layer in range(LAYERS)]
    return Foresight(planners, LAYERS), [contract.MoEScheduler(planner, Dispatch()) for planner in planners]


def step_of(seed: int) -> tuple[RoutingTrace, StepPlan, Workload]:
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, num_sequences=12, max_length=9, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    schedule = random_schedule(rng, 12, num_ranks=RANKS, num_micro_steps=MICRO_STEPS)
    workload = Workload.from_trace(trace, schedule)
    return trace, random_plan(rng, workload, schedule, slots=SLOTS), workload


def ids_of(trace: RoutingTrace, plan: StepPlan, micro_step: int, rank: int, layer: int) -> Any:
    """`[n, K]` recorded experts of a rank's tokens in a micro-step."""
    sequences = np.flatnonzero((plan.micro_step == micro_step) & (plan.rank == rank))
    starts = np.concatenate([[0], np.cumsum(trace.sequence_lengths)])
    parts = [trace.expert_ids[starts[s] : starts[s + 1], layer] for s in sequences]
    return np.concatenate([np.zeros((0, TOP_K), np.int64), *parts]).astype(np.int64)


def routes_of(ids: Any, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A router's weights and map `[T, E]`."""
    routing_map = torch.zeros(len(ids), EXPERTS, dtype=torch.bool).scatter_(1, torch.from_numpy(ids), value=True)
    probs = torch.from_numpy(rng.uniform(0.1, 1.0, routing_map.shape)) * routing_map
    return probs.requires_grad_(), routing_map


@pytest.mark.parametrize("seed", range(4))
def test_tokens_go_where_sessions_send_them_and_layers_compute_what_they_would_alone(seed: int) -> None:
    trace, plan, workload = step_of(seed)
    assert plan.num_replicas > 0
    rng = np.random.default_rng(seed)
    weights_E = torch.from_numpy(rng.normal(size=EXPERTS))
    loads_MLR = plan.rank_loads(workload)
    found_MLR = np.zeros_like(loads_MLR)
    for rank in range(RANKS):
        foresight, layers = schedulers()
        foresight.use(plan)
        for micro_step in range(MICRO_STEPS):
            for layer, scheduler in enumerate(layers):
                ids = ids_of(trace, plan, micro_step, rank, layer)
                probs, routing_map = routes_of(ids, rng)
                physical_probs, physical_map = scheduler.schedule(probs, routing_map, None, context_of(rank, layer))

                replicas = InstanceReplicas.of(plan, micro_step, layer)
                experts = PhysicalExperts(rank, RANKS, HOMES, SLOTS, HOME_IDS)
                counts_E = np.bincount(ids.ravel(), minlength=EXPERTS)
                arriving_RH = workload.token_counts_MLRE[micro_step, layer][:, rank * HOMES : (rank + 1) * HOMES]
                rows = PlannedRows.of(ids, counts_E, arriving_RH, experts, replicas)
                expected = torch.zeros_like(physical_map).scatter_(
                    1, torch.from_numpy(rows.physical_NK.astype(np.int64)), value=True
                )
                assert torch.equal(physical_map, expected)
                found_MLR[micro_step, layer] += physical_map.view(-1, RANKS, HOMES + SLOTS).sum((0, 2)).numpy()

                # Replicas have the weights of their sources, homes those of their experts.
                sources = scheduler.expert_dispatch.sources.to(torch.int64)
                assert scheduler.expert_dispatch.sources.dtype == torch.int32
                slots_RS = torch.where(sources >= 0, weights_E[sources.clamp(min=0)], torch.nan)
                physical_weights = torch.cat([weights_E.view(RANKS, HOMES), slots_RS], dim=1).view(-1)
                used = physical_weights.nan_to_num() * physical_probs
                assert not physical_map[:, physical_weights.isnan()].any()
                assert torch.allclose(used.sum(1), probs @ weights_E)
                (gradient,) = torch.autograd.grad(used.sum(), probs)
                assert torch.allclose(gradient, weights_E * routing_map)
    assert np.array_equal(found_MLR, loads_MLR)


def test_routes_that_were_not_recorded_are_computed_and_passes_start_with_a_plan() -> None:
    _, plan, _ = step_of(7)
    rng = np.random.default_rng(7)
    foresight, (scheduler, *_) = schedulers()
    weights_E = torch.from_numpy(rng.normal(size=EXPERTS))

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        ids = np.argsort(rng.random((11, EXPERTS)), axis=1)[:, :TOP_K]
        probs, routing_map = routes_of(ids, rng)
        physical_probs, physical_map = scheduler.schedule(probs, routing_map, None, context_of(1, 0))
        sources = scheduler.expert_dispatch.sources.to(torch.int64)
        of_slots = torch.cat([torch.arange(EXPERTS).view(RANKS, HOMES), sources], dim=1).view(-1)
        assert torch.allclose((physical_probs * weights_E[of_slots]).sum(1), probs @ weights_E)
        assert physical_map.sum() == routing_map.sum()
        return sources, physical_map

    # Without a plan.
    sources, physical_map = call()
    assert (sources == -1).all()
    assert not physical_map.view(-1, RANKS, HOMES + SLOTS)[:, :, HOMES:].any()
    for _ in range(2):
        foresight.use(plan)
        for _ in range(MICRO_STEPS):
            call()
        with pytest.raises(RuntimeError, match=f"MoE layer 0 has run the {MICRO_STEPS} micro-steps of its plan"):
            call()
    foresight.use(None)
    assert (call()[0] == -1).all()


def test_plans_that_do_not_fit_are_refused_and_change_nothing() -> None:
    trace, plan, workload = step_of(3)
    foresight, (scheduler, *_) = schedulers()
    foresight.use(plan)
    rng = np.random.default_rng(3)
    moved = random_plan(
        rng, workload, plan.schedule, slots=SLOTS, placement=random_placement(rng, LAYERS, EXPERTS, RANKS)
    )
    more = random_plan(rng, workload, plan.schedule, slots=SLOTS + 1)
    half = Workload.from_trace(trace, plan.schedule).select(np.arange(MICRO_STEPS), np.arange(1))
    other = random_plan(rng, half, plan.schedule, slots=SLOTS)
    for wrong, message in (
        (moved, "the plan moves experts to other homes"), (more, "the plan is for 4 slots a rank"),
        (other, r"the plan is for \[layers, experts, ranks\]"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            foresight.use(wrong)
    ids = ids_of(trace, plan, 0, 2, 0)
    scheduler.schedule(*routes_of(ids, rng), None, context_of(2, 0))
    assert (scheduler.expert_dispatch.sources >= 0).sum() == len(plan.replicas_of(0, 0))


@runs_on_ranks(1, "megatron")
def test_planners_of_recorded_layers_are_replaced() -> None:
    from helpers.megatron_runs import Layout, MegatronCase, Model, use_layout
    from trimtab.integrations.moe_scheduler import ForesightPlanner, use_foresight

    class Other(contract.MoELoadPlanner):  # type: ignore[misc]
        update_placement = reroute = lambda *_args, **_options: None

    use_layout(Layout(1, 1))
    model = Model(Layout(1, 1), MegatronCase(recipe="GLM-4.5"))
    layers = [*model.moe_layers()]
    with pytest.raises(InputError, match=r"MoE layer \d+ has no scheduler; set moe_enable_scheduler"):
        use_foresight(model.chunks)
    every = [module for chunk in model.chunks for module in chunk.modules() if type(module) is type(layers[0])]
    assert len(every) > len(layers)
    model.config.moe_scheduler_num_idle_experts = 3
    for layer in every:
        layer.scheduler = contract.MoEScheduler(Other(), Dispatch())
    layers[0].scheduler.home_expert_dispatch = nn.Identity()
    with pytest.raises(InputError, match="leave out moe_scheduler_home_update_interval"):
        use_foresight(model.chunks)
    layers[0].scheduler.home_expert_dispatch = None
    use_foresight(model.chunks)
    for layer in every:
        expected = ForesightPlanner if any(layer is each for each in layers) else Other
        assert type(layer.scheduler.planner) is expected
    assert all(layer.scheduler.planner.planner_name == "foresight" for layer in layers)


def test_signatures_are_those_of_the_fork() -> None:
    from trimtab.integrations import moe_scheduler

    assert STORED["moe_scheduler"][0].split()[1] in str(moe_scheduler.__doc__)
    for name, parameters in stored("moe_scheduler").items():
        *_, owner, method = name.replace(":", ".").split(".")
        if parameters is not None:
            found = getattr(getattr(contract, owner), method)
            assert [*inspect.signature(found).parameters] == parameters
        if parameters is not None and owner == "MoELoadPlanner":
            assert [*inspect.signature(getattr(moe_scheduler.ForesightPlanner, method)).parameters] == parameters
    assert issubclass(moe_scheduler.ForesightPlanner, contract.MoELoadPlanner)


def test_stored_signatures_are_those_of_the_source() -> None:
    folder = os.environ.get("MOE_SCHEDULER", "")
    if not folder:
        pytest.skip(f"needs the source of {STORED['moe_scheduler'][0]}: MOE_SCHEDULER=folder")
    assert {name: parameters_in(folder, name) for name in stored("moe_scheduler")} == stored("moe_scheduler")
