"""A layer on its planned path on one device: what it waits for, and what a plan saves of the matrix products."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.calibration.random_experts import Sizes, random_experts, run_experts
from trimtab.calibration.timing import Clock, medians
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.planner import Placement, StepPlan, Workload, pack_by_length, plan_step
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.replicas.paths import HOST
from trimtab.runtime import RowGroups, Session, gated_experts
from trimtab.runtime.rows.instance_replicas import InstanceReplicas
from trimtab.trace import PRESETS, synthesize, synthesize_preset

PRESET = "rl-math"
LAYERS = 4
SLOTS = 2
SEED = 0


class _PlanOfOneRank(StepPlan):
    """Has replicas on their home rank, which is the only one."""

    def check(self, workload: Workload) -> None:
        pass


def measure_planned_layer(
    sizes: Sizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Forward and backward of a planned micro-step at world size 1, where the GPU must not be waited for.

    A plan has no replicas on an expert's own home, and there is no other rank. So this one is made by hand: the two
    experts with most tokens have a replica on their own rank, by the host path, that computes half of their tokens.
    """
    experts = model.num_experts // sizes.ranks
    trace = synthesize(
        num_sequences=4, sequence_length=sizes.tokens_per_rank // 4, num_layers=1, num_experts=experts,
        top_k=min(model.top_k, experts // 2), zipf=1.0, seed=SEED,
    )  # fmt: skip
    schedule = pack_by_length(trace.sequence_lengths, num_ranks=1, token_budget=trace.num_tokens)
    workload = Workload.from_trace(trace, schedule)
    counts_E = workload.token_counts_MLRE[0, 0, 0].astype(np.int64)
    hot = np.argsort(-counts_E, kind="stable")[:SLOTS]
    plan = _PlanOfOneRank.from_instances(
        schedule, Placement.contiguous(1, experts, 1),
        [np.stack([hot, np.zeros_like(hot)], axis=1)], [counts_E[hot, None] // 2],
        mixed_ML=workload.mixed_ML, cluster=ClusterSpec(1, 1, SLOTS),
    )  # fmt: skip
    plan = replace(plan, replica_paths=np.full(SLOTS, HOST, np.uint8))

    session = Session(num_experts=experts, slots_per_rank=SLOTS)
    parameters = [torch.nn.Parameter(stack) for stack in random_experts(model, experts, sizes.dtype, device)]
    layer = session.add_layer(parameters, gated_experts())
    hidden = torch.randn(trace.num_tokens, model.hidden_size, dtype=sizes.dtype, device=device, requires_grad=True)
    live_ids = torch.zeros(trace.num_tokens, trace.top_k, dtype=torch.int64, device=device)
    weights = torch.rand(live_ids.shape, dtype=sizes.dtype, device=device).softmax(dim=-1)
    gradient = torch.randn_like(hidden)

    def run() -> list[torch.Tensor]:
        for leaf in (hidden, *parameters):
            leaf.grad = torch.zeros_like(leaf)
        with session.micro_step(0):
            output = layer(hidden, layer.route(live_ids), weights)
            output.backward(gradient)
        return [output.detach(), *(leaf.grad for leaf in (hidden, *parameters) if leaf.grad is not None)]

    session.apply_step_plan(plan.without_replicas(), trace)
    expected = run()
    session.apply_step_plan(plan, trace)
    run()
    waits = "not a GPU"
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
            waits = "none"
        except RuntimeError as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            waits = f"{Path(place.filename).name}:{place.lineno}: {str(error).splitlines()[0]}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    errors = [
        float((one - other).float().norm() / other.float().norm()) for one, other in zip(run(), expected, strict=True)
    ]
    planned_s = medians({"planned": lambda: {"s": clock.time(run)}}, rounds)["planned"]["s"]
    session.close()
    return {
        "ran": "forward and backward at world size 1; the hottest experts have replicas on their own rank",
        "replicas": plan.num_replicas,
        "waits_for_device": waits,
        "relative_error": max(errors),
        "right": all(error < sizes.tolerance for error in errors),
        "ms": planned_s * 1e3,
    }


def measure_critical_path(
    sizes: Sizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Expert compute, forward and backward, of every rank of one instance: at home, planned, and perfectly even.

    Of a synthetic step's instances it is the one whose imbalance is the median.
    """
    ranks, experts = sizes.ranks, model.num_experts
    per_rank = experts // ranks
    trace = synthesize_preset(
        PRESETS[PRESET], num_sequences=16 * ranks, mean_length=sizes.tokens_per_rank // 16,
        max_length=sizes.tokens_per_rank // 4, num_layers=LAYERS, num_experts=experts, top_k=model.top_k, seed=SEED,
    )  # fmt: skip
    budget = -(-trace.num_tokens // ranks) + sizes.tokens_per_rank // 4
    schedule = pack_by_length(trace.sequence_lengths, num_ranks=ranks, token_budget=budget)
    workload = Workload.from_trace(trace, schedule)
    placement = Placement.contiguous(LAYERS, experts, ranks)
    plan = plan_step(workload, schedule, placement, ClusterSpec(ranks, ranks, SLOTS))
    before_ML, after_ML = (max_over_mean(x) for x in (workload.home_loads(placement.home), plan.rank_loads(workload)))
    middle = np.argsort(before_ML.reshape(-1), kind="stable")[before_ML.size // 2]
    micro_step, at = divmod(int(middle), LAYERS)
    replicas = InstanceReplicas.of(plan, micro_step, at)
    counts_E = workload.token_counts_MLRE[micro_step, at].sum(axis=0, dtype=np.int64)
    quotas_P = replicas.quotas_PR.sum(axis=1)
    at_home_E = counts_E.copy()
    np.subtract.at(at_home_E, replicas.experts, quotas_P)

    def split(rank: int, home_E: np.ndarray[Any, Any], copies: bool) -> list[list[int]]:
        """Rows of the rank's home experts, and of its replicas if it has any."""
        halves = [home_E[placement.home[at] == rank].tolist()]
        here = quotas_P[replicas.ranks == rank].tolist() if copies else []
        return [*halves, here] if here else halves

    mean = int(counts_E.sum()) // (ranks * per_rank)
    work = {f"static {rank}": split(rank, counts_E, False) for rank in range(ranks)}
    work |= {f"planned {rank}": split(rank, at_home_E, True) for rank in range(ranks)}
    work["even 0"] = [[mean] * per_rank]
    homes = random_experts(model, per_rank, sizes.dtype, device)
    slots = random_experts(model, SLOTS, sizes.dtype, device)
    most = max(sum(half) for halves in work.values() for half in halves)
    rows = torch.randn(most, model.hidden_size, dtype=sizes.dtype, device=device)

    def variant(halves: list[list[int]]) -> Callable[[], dict[str, float]]:
        grouped = [RowGroups.of(half, device) for half in halves]

        def run() -> None:
            for stacks, groups in zip((homes, slots), grouped, strict=False):
                chosen = [stack[: len(groups.counts)].detach().requires_grad_() for stack in stacks]
                given = rows[: sum(groups.counts)].detach().requires_grad_()
                output = run_experts(chosen, given, groups)
                output.backward(torch.ones_like(output))

        return lambda: {"ms": clock.time(run) * 1e3}

    taken = medians({name: variant(halves) for name, halves in work.items()}, rounds)
    slowest = {
        kind: max(figures["ms"] for name, figures in taken.items() if name.startswith(kind))
        for kind in ("static", "planned", "even")
    }
    return {
        "preset": PRESET,
        "ranks": ranks,
        "rows_per_rank": int(counts_E.sum()) // ranks,
        "replicas": replicas.count,
        "max_over_mean_static": float(before_ML[micro_step, at]),
        "max_over_mean_planned": float(after_ML[micro_step, at]),
        **{f"{kind}_ms": ms for kind, ms in slowest.items()},
        "speedup": slowest["static"] / slowest["planned"],
        "fraction_of_even": slowest["even"] / slowest["planned"],
    }
