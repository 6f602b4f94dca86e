"""Stage `layer`: a planned MoE layer by part, at the sizes of Qwen3-30B-A3B, beside its estimate."""

from __future__ import annotations

import statistics

import numpy as np
import torch
import torch.distributed as dist

from trimtab.calibration.random_experts import this_device
from trimtab.cluster import QWEN3_30B, ModelSpec
from trimtab.doctor.finding import Finding
from trimtab.doctor.gpu.bandwidth_stage import cluster_of
from trimtab.doctor.gpu.layer_estimate import TOGETHER, estimate_layer
from trimtab.doctor.planned_micro_step import PlannedMicroStep, StepSizes
from trimtab.report.number_text import seconds
from trimtab.runtime.ranks.recorder import ACTIVITIES, WAITING

GPU_TOKENS, CPU_TOKENS = (4096, 8192), (256, 512)
CPU_MODEL = ModelSpec("doctor", 8, 4, hidden_size=64, expert_width=32, weight_bytes=4)
LAYERS = 4
RUNS = 5
# A layer that takes longer than its estimate times this is a warning.
MOST = 2.0


def check_layer() -> list[Finding]:
    """Time forward and backward of planned layers with even routing, and one replica on each rank."""
    device, ranks = this_device(), dist.get_world_size()
    on_cuda = device.type == "cuda"
    model = QWEN3_30B if on_cuda else CPU_MODEL
    # Some numbers of GPUs do not divide the experts.
    experts_per_rank = max(model.num_experts // ranks, model.top_k // ranks + 1)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    cluster = cluster_of(torch.cuda.get_device_name(), ranks) if on_cuda else None
    findings = []
    for tokens in GPU_TOKENS if on_cuda else CPU_TOKENS:
        sizes = StepSizes(
            LAYERS, experts_per_rank, model.top_k, model.hidden_size, model.expert_width, tokens, 0.0, dtype
        )
        measured = _measure(sizes, device)
        expected = {}
        if cluster is not None:
            expected = {part.name: part.seconds for part in estimate_layer(cluster, model, tokens)}
        findings.append(describe_layer(f"{tokens:,} tokens", measured, expected))
    return findings


def describe_layer(name: str, measured: dict[str, float], expected: dict[str, float]) -> Finding:
    """The finding about one size.

    Args:
        measured: seconds of a layer by part.
        expected: estimated seconds of some of these parts; none without an estimate.
    """
    texts = [
        f"{part} {seconds(taken)}" + (f" (estimate {seconds(expected[part])})" if part in expected else "")
        for part, taken in measured.items()
    ]
    if not expected:
        return Finding(name, "ok", "; ".join(texts))
    total, estimate = sum(measured[part] for part in expected), sum(expected.values())
    texts.append(f"{TOGETHER} {seconds(total)} (estimate {seconds(estimate)})")
    return Finding(name, "ok" if total <= MOST * estimate else "warning", "; ".join(texts))


def _measure(sizes: StepSizes, device: torch.device) -> dict[str, float]:
    """Seconds of one layer by part: median over runs, mean over layers and ranks. Collective."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    shapes = ((ranks * sizes.experts_per_rank, sizes.hidden), *sizes.shapes(sizes.experts_per_rank))
    weights = [
        [torch.randn(shape, dtype=sizes.dtype, device=device) * shape[-1] ** -0.5 for shape in shapes]
        for _ in range(sizes.layers)
    ]
    step = PlannedMicroStep(sizes, "peer" if ranks > 1 else "host", weights)
    hidden, target = torch.randn(2, sizes.tokens_per_rank, sizes.hidden, device=device).to(sizes.dtype)
    runs = [_seconds_by_part(step, hidden, target) for _ in range(RUNS + 1)]
    step.session.close()
    # The first compiles kernels and connects ranks.
    taken = torch.tensor([statistics.median(column) for column in zip(*runs[1:], strict=True)], dtype=torch.float64)
    dist.all_reduce(taken, group=step.session.topology.control)
    per_layer = (taken / ranks / sizes.layers).tolist()
    return {part: taken_s for part, taken_s in zip(ACTIVITIES[: WAITING + 1], per_layer, strict=True) if taken_s > 0}


def _seconds_by_part(step: PlannedMicroStep, hidden: torch.Tensor, target: torch.Tensor) -> list[float]:
    """Seconds of each activity up to `WAITING`, of forward and backward of all layers on this rank."""
    with step.session.micro_step(0):
        dist.barrier(group=step.session.topology.control)
        with step.session.recording() as recorder:
            step.forward_backward(hidden, target)
            recording = recorder.finish()
    durations_N = recording.end_N - recording.start_N
    return np.bincount(recording.kind_N, weights=durations_N, minlength=len(ACTIVITIES))[: WAITING + 1].tolist()
