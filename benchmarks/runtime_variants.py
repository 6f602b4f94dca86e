"""The variants of a micro-step that `python -m benchmarks.runtime` compares, and the time of their MoE blocks.

* `static`, `trimtab`: skewed routing, without and with replicas;
* `balanced`: the same number of tokens with even routing, planned by Trimtab, which finds nothing to move;
* `native`: even routing through transformers' `AllToAllEP` on the same model, with the same experts per rank;
* `node-blind`, on several nodes: as `trimtab`, with a plan that ignores node boundaries.

Each seed has skewed routing of its own. Even routing is the same for all seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.expert_parallel import AllToAllEP

from trimtab.integrations.transformers import distribute_experts, moe_blocks
from trimtab.integrations.transformers.families import choose_experts
from trimtab.planner import Workload
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime import Session
from trimtab.runtime.gradients import sum_gradients
from trimtab.runtime.session_settings import Mode, Paths
from trimtab.runtime.step_planner import LOCAL_CPU, SessionPlanner
from trimtab.trace import RoutingTrace

if TYPE_CHECKING:
    from benchmarks.runtime import RuntimeBenchmark

PATHS: tuple[Paths, ...] = ("both", "peer", "host")


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to run the micro-step.

    Attributes:
        prepare: plans the step and clears gradients; not timed.
        step: forward, backward, complete gradients; timed.
        blocks: the model's MoE blocks.
    """

    prepare: Callable[[], None]
    step: Callable[[], None]
    blocks: list[nn.Module]


@dataclass(frozen=True, eq=False)
class RuntimeVariants:
    """All variants of a benchmark on this rank.

    Attributes:
        session: of all variants but `native`.
        compared: by seed and name.
        by_paths: by seed and by one of `PATHS`: `trimtab` with these paths for replica weights.
        static_max_over_mean: `[seeds, layers]`, of the rank loads at home.
    """

    session: Session
    compared: dict[tuple[int, str], Variant]
    by_paths: dict[tuple[int, str], Variant]
    static_max_over_mean: list[list[float]]


def build_variants(settings: RuntimeBenchmark) -> RuntimeVariants:
    """Models, session and variants. Collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    config = AutoConfig.for_model(**settings.model_config)
    native, ours = (AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2))
    ours.load_state_dict(native.state_dict())
    per_node = settings.ranks_per_node
    rates = LOCAL_CPU
    if settings.link_mbit is not None:
        rates = replace(rates, network_bytes_per_s=settings.link_mbit * 1e6 / 8)
    session = Session(num_experts=settings.experts, slots_per_rank=settings.slots, ranks_per_node=per_node, rates=rates)
    distribute_experts(ours, session)
    replicated = session.replicated_parameters(ours)
    # All sequences have the same length, so every seed has the same schedule.
    _, even, schedule = settings.draw(num_ranks)
    mine = schedule.sequences_of(rank)
    even_ids = even.select(mine).expert_ids.transpose(1, 0, 2).astype(np.int64)
    native_replicated = use_native_experts(native, session, torch.from_numpy(even_ids))
    tokens = torch.randint(0, config.vocab_size, (len(mine), settings.sequence_length + 1))

    def loss(model: Any) -> torch.Tensor:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        total = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return total / (settings.tokens * num_ranks)

    def prepare(trace: RoutingTrace, mode: Mode, paths: Paths = "both") -> None:
        ours.zero_grad()
        session.mode, session.paths = mode, paths
        session.plan(trace.select(mine), schedule)
        # Replicas are planned before the clock.
        _ = session.step_plan

    def prepare_node_blind(skewed: RoutingTrace) -> None:
        ours.zero_grad()
        session.mode, session.paths = "plan", "both"
        one_node = replace(session.topology, ranks_per_node=num_ranks)
        # Rates of links between nodes do not count on one node.
        planner = SessionPlanner.of(
            one_node, session.homes, replace(session.settings, rates=None), session.settings.slot_numbers,
            top_k=settings.top_k,
        )  # fmt: skip
        trace = skewed.select(mine)
        planned, _ = planner.for_schedule(trace, schedule)
        session.apply_plan(replace(planned, plans=(replace(planned.plan, ranks_per_node=per_node),)), trace)

    def step() -> None:
        with session.micro_step(0):
            loss(ours).backward()
        session.finish_gradients(replicated)

    def step_native() -> None:
        loss(native).backward()
        sum_gradients(native_replicated, session.topology.data)

    blocks = list(moe_blocks(ours).values())
    balanced = Variant(partial(prepare, even, "plan"), step, blocks)
    of_native = Variant(native.zero_grad, step_native, list(moe_blocks(native).values()))
    compared, by_paths, skew = {}, {}, []
    for seed in range(settings.seeds):
        skewed, _, _ = settings.draw(num_ranks, seed)
        compared[seed, "static"] = Variant(partial(prepare, skewed, "static"), step, blocks)
        compared[seed, "trimtab"] = Variant(partial(prepare, skewed, "plan"), step, blocks)
        compared[seed, "balanced"] = balanced
        compared[seed, "native"] = of_native
        if per_node != num_ranks:
            compared[seed, "node-blind"] = Variant(partial(prepare_node_blind, skewed), step, blocks)
        for paths in PATHS:
            by_paths[seed, str(paths)] = Variant(partial(prepare, skewed, "plan", paths), step, blocks)
        home_loads = Workload.from_trace(skewed, schedule).home_loads(session.placement.home)
        skew.append(max_over_mean(home_loads).mean(axis=0).tolist())
    return RuntimeVariants(session, compared, by_paths, skew)


def use_native_experts(model: Any, session: Session, ids_LNK: torch.Tensor) -> list[nn.Parameter]:
    """Run a whole model's experts through transformers' own expert parallelism, `AllToAllEP`, on given routing.

    Args:
        model: a whole model of the session's sizes.
        session: whose home experts this rank keeps.
        ids_LNK: `[L, n, K]` int64, the experts of this rank's tokens.

    Returns:
        The replicated parameters: all but those of experts.
    """
    mesh = init_device_mesh("cpu", (session.num_ranks, 1), mesh_dim_names=("ep", "tp"))
    home = torch.from_numpy(session.home_experts)
    of_experts: set[nn.Parameter] = set()
    for layer, block in enumerate(moe_blocks(model).values()):
        experts: Any = block.experts
        experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[home].clone())
        experts.down_proj = nn.Parameter(experts.down_proj.detach()[home].clone())
        # As after transformers' own sharding of parameters: only local experts are left.
        experts.num_experts = len(home)
        experts._is_expert_parallel = True
        experts.forward = AllToAllEP(experts, mesh["ep"], mesh["tp"])
        choose_experts(block.gate, model.config, partial(_given, ids_LNK[layer]))
        of_experts.update(experts.parameters())
    return [parameter for parameter in model.parameters() if parameter not in of_experts]


def _given(ids_NK: torch.Tensor, _live_ids: torch.Tensor) -> torch.Tensor:
    return ids_NK


class MoeTimer:
    """Host seconds spent in MoE blocks, filled by hooks.

    Attributes:
        seconds: spent in the blocks so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def begin(self, *_: Any) -> None:
        """Hook before a block's forward or backward."""
        self._start = time.perf_counter()

    def end(self, *_: Any) -> None:
        """Hook after a block's forward or backward."""
        self.seconds += time.perf_counter() - self._start


@contextmanager
def time_blocks(blocks: list[nn.Module]) -> Iterator[MoeTimer]:
    """Time the forward and backward of MoE blocks inside the context."""
    timer = MoeTimer()
    handles = []
    for block in blocks:
        handles += [
            block.register_forward_pre_hook(timer.begin),
            block.register_forward_hook(timer.end),
            block.register_full_backward_pre_hook(timer.begin),
            block.register_full_backward_hook(timer.end),
        ]
    try:
        yield timer
    finally:
        for handle in handles:
            handle.remove()
