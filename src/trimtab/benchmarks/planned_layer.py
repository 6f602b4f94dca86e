"""A layer with replicas on one device: whether it waits for the GPU, and whether its results are right."""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.benchmarks.transfer_sizes import TransferSizes
from trimtab.calibration.random_experts import add_random_layer, random_inputs
from trimtab.calibration.timing import Clock
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.planner import Placement, StepPlan, Workload, pack_by_length
from trimtab.planner.replicas.paths import HOST
from trimtab.runtime import Session
from trimtab.trace import RoutingTrace, synthesize

SLOTS = 2
SEED = 0


class OneRankPlan(StepPlan):
    """A plan whose replicas are on the home rank, which `StepPlan.check` would refuse."""

    def check(self, workload: Workload) -> None:
        pass


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
    sizes: TransferSizes, model: ModelSpec, clock: Clock, device: torch.device, rounds: int
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
