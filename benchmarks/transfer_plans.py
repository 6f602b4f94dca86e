"""A plan on one device: waits and results of a layer with replicas, and compute of the slowest rank of an instance."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.transfer_clock import TransferClock
from trimtab.array_type import Array
from trimtab.calibration.measurement import add_random_layer, random_experts, random_inputs, run_experts
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.doctor.planned_micro_step import OneRankPlan
from trimtab.planner import Placement, StepPlan, Workload, pack_by_length, plan_step
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.replicas.paths import HOST
from trimtab.runtime import RowGroups, Session
from trimtab.runtime.program.physical_experts import InstanceReplicas
from trimtab.trace import PRESETS, RoutingTrace, synthesize, synthesize_preset

if TYPE_CHECKING:
    from benchmarks.transfer import TransferSizes

PRESET = "qwen3-30b-math"
LAYERS = 4
SLOTS = 2
SEED = 0


def one_rank_plan(trace: RoutingTrace, slots: int) -> StepPlan:
    """A plan of one micro-step of one layer on one rank, whose busiest experts have replicas.

    A planner never places a replica on the expert's home, and there is no other rank. The experts with most tokens, as
    many as `slots`, have a replica on their own rank, fetched by the host path, that computes half of their tokens.
    """
    schedule = pack_by_length(trace.sequence_lengths, num_ranks=1, token_budget=trace.num_tokens)
    workload = Workload.from_trace(trace, schedule)
    counts_E = workload.token_counts_MLRE[0, 0, 0].astype(np.int64)
    hot = np.argsort(-counts_E, kind="stable")[:slots]
    plan = OneRankPlan.from_instances(
        schedule, Placement.contiguous(1, trace.num_experts, 1),
        [np.stack([hot, np.zeros_like(hot)], axis=1)], [counts_E[hot, None] // 2],
        mixed_ML=workload.mixed_ML, cluster=ClusterSpec(1, 1, slots),
    )  # fmt: skip
    return replace(plan, replica_paths=np.full(slots, HOST, np.uint8))


def measure_planned_layer(
    sizes: TransferSizes, model: ModelSpec, clock: TransferClock, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Forward and backward of a planned micro-step at world size 1, where nothing may wait for the GPU.

    The plan is that of `one_rank_plan`.
    """
    experts = model.num_experts // sizes.ranks
    trace = synthesize(
        num_sequences=4, sequence_length=sizes.tokens_per_rank // 4, num_layers=1, num_experts=experts,
        top_k=min(model.top_k, experts // 2), zipf=1.0, seed=SEED,
    )  # fmt: skip
    plan = one_rank_plan(trace, SLOTS)
    session = Session(num_experts=experts, slots_per_rank=SLOTS)
    layer = add_random_layer(session, model, sizes.dtype, device)
    hidden, live_ids, weights, gradient = random_inputs(trace, model, sizes.dtype, device)
    leaves = [hidden, *layer.parameters]

    def run() -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        with session.micro_step(0):
            output = layer(hidden, layer.route(live_ids), weights)
            output.backward(gradient)
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

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
        float((actual - wanted).float().norm() / wanted.float().norm())
        for actual, wanted in zip(run(), expected, strict=True)
    ]
    seconds = clock.medians({"planned": run}, rounds)["planned"]
    session.close()
    return {
        "ran": "forward and backward at world size 1; the hottest experts have replicas on their own rank",
        "replicas": plan.num_replicas,
        "waits_for_device": waits,
        "relative_error": max(errors),
        "right": all(error < sizes.tolerance for error in errors),
        "ms": seconds * 1e3,
    }


def measure_critical_path(
    sizes: TransferSizes, model: ModelSpec, clock: TransferClock, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Expert compute, forward and backward, of every rank of one instance: static, planned, and with even routing.

    It is the instance of a synthetic step that has the median imbalance.
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
    micro_step, layer = divmod(int(middle), LAYERS)
    replicas = InstanceReplicas.of(plan, micro_step, layer)
    counts_E = workload.token_counts_MLRE[micro_step, layer].sum(axis=0, dtype=np.int64)
    quotas_P = replicas.quotas_PR.sum(axis=1)
    at_home_E = counts_E.copy()
    np.subtract.at(at_home_E, replicas.experts, quotas_P)

    def home_rows(rank: int, rows_E: Array) -> list[int]:
        return rows_E[placement.home[layer] == rank].tolist()

    # Rows of each home expert, and of each replica, that a rank computes.
    loads: dict[str, tuple[list[int], list[int]]] = {"even 0": ([int(counts_E.sum()) // experts] * per_rank, [])}
    for rank in range(ranks):
        loads[f"static {rank}"] = (home_rows(rank, counts_E), [])
        loads[f"planned {rank}"] = (home_rows(rank, at_home_E), quotas_P[replicas.ranks == rank].tolist())
    homes, slots = (random_experts(model, count, sizes.dtype, device) for count in (per_rank, SLOTS))
    most = max(sum(part) for load in loads.values() for part in load)
    rows = torch.randn(most, model.hidden_size, dtype=sizes.dtype, device=device)

    def compute(load: tuple[list[int], list[int]]) -> Callable[[], None]:
        """A function that runs forward and backward of home experts and replicas."""
        parts = [
            (stacks, RowGroups.of(part, device)) for stacks, part in zip((homes, slots), load, strict=True) if part
        ]

        def run() -> None:
            for stacks, groups in parts:
                weights = [stack[: len(groups.counts)].detach().requires_grad_() for stack in stacks]
                output = run_experts(weights, rows[: sum(groups.counts)].detach().requires_grad_(), groups)
                output.backward(torch.ones_like(output))

        return run

    taken_s = clock.medians({name: compute(load) for name, load in loads.items()}, rounds)
    slowest_ms = {
        kind: max(seconds * 1e3 for name, seconds in taken_s.items() if name.startswith(kind))
        for kind in ("static", "planned", "even")
    }
    return {
        "preset": PRESET,
        "ranks": ranks,
        "rows_per_rank": int(counts_E.sum()) // ranks,
        "replicas": replicas.count,
        "max_over_mean_static": float(before_ML[micro_step, layer]),
        "max_over_mean_planned": float(after_ML[micro_step, layer]),
        **{f"{kind}_ms": ms for kind, ms in slowest_ms.items()},
        "speedup": slowest_ms["static"] / slowest_ms["planned"],
        "fraction_of_even": slowest_ms["even"] / slowest_ms["planned"],
    }
