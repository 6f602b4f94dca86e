"""Stage `megatron` of `--full`: Megatron-core's MoE layers beside the same layers with a plan, in turns in one process.

Both run the same routing through Megatron's own schedule and all-to-all: Megatron by its RouterReplay. Planning is part
of a planned step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trimtab.calibration.alternating_rounds import alternate
from trimtab.calibration.random_experts import this_device
from trimtab.cluster import ModelSpec, load_model
from trimtab.doctor.finding import Finding
from trimtab.doctor.gpu.megatron_layers import LayerCase, MegatronLayers, start_megatron
from trimtab.doctor.gpu.product_times import time_products
from trimtab.report.number_text import seconds

# Experts of a rank, tokens and imbalance are those of a node of 8 GPUs.
MODELS, RANKS_OF_MODEL = ("qwen3-30b-a3b", "qwen3-235b-a22b"), 8
GPU_TOKENS, CPU_TOKENS = (4096, 8192), (256,)
# What a micro-batch costs once, such as agreeing on it, is divided by the layers of a model. Models have 48 and 94.
GPU_LAYERS, CPU_LAYERS = 8, 2
GPU_RATIOS, CPU_RATIOS = (1.0, 1.25, 1.5, 2.0), (1.0, 1.5)
CPU_MODEL = ModelSpec("doctor", 32, 4, hidden_size=64, expert_width=32)
SLOTS = 2
REPLICAS = (2, 4)
GPU_ROUNDS, CPU_ROUNDS = 7, 2
# Norm of the difference of a gradient over its norm. Rows of an expert are added in another order.
MOST_DIFFERENT = {"cuda": 2e-2, "cpu": 1e-5}


def check_megatron() -> list[Finding]:
    """Compare all cases on this rank's GPU. Collective."""
    start_megatron()
    on_cuda = this_device().type == "cuda"
    rounds = GPU_ROUNDS if on_cuda else CPU_ROUNDS
    found = cases(dist.get_world_size(), on_cuda)
    even = [case for case in found if case.max_over_mean == 1]
    return [
        *(compare_case(case, rounds) for case in found),
        *(time_products(case, replicas, rounds) for case in even for replicas in REPLICAS),
    ]


def cases(ranks: int, on_cuda: bool) -> list[LayerCase]:
    """The cases: with one rank there is no imbalance, only what a planned layer costs."""
    models = [load_model(name) for name in MODELS] if on_cuda else [CPU_MODEL]
    ratios = (GPU_RATIOS if on_cuda else CPU_RATIOS) if ranks > 1 else (1.0,)
    return [
        LayerCase(of_ranks(model, ranks), tokens, ratio, layers=GPU_LAYERS if on_cuda else CPU_LAYERS)
        for model in models
        for tokens in (GPU_TOKENS if on_cuda else CPU_TOKENS)
        for ratio in ratios
    ]


def of_ranks(model: ModelSpec, ranks: int) -> ModelSpec:
    """A model with as many experts on each of these ranks as on each GPU of a node."""
    return replace(model, num_experts=max(model.num_experts // RANKS_OF_MODEL, model.top_k) * ranks)


def compare_case(case: LayerCase, rounds: int) -> Finding:
    """Check that gradients are equal, and time both in some rounds. Collective."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), this_device()
    mine = case.routing(ranks, seed=0)[rank]
    ids = [torch.from_numpy(np.ascontiguousarray(each.transpose(1, 0, 2), np.int64)).to(device) for each in mine]
    plain, planned = MegatronLayers(case), MegatronLayers(case)
    session = planned.balance(SLOTS)
    steps: dict[str, Callable[[], None]] = {
        "plain": partial(plain.step_with_replay, ids),
        "planned": partial(planned.planned_step, session, mine),
    }
    difference = _difference(plain, planned, steps)
    times = alternate({name: partial(_time, step, (plain, planned)) for name, step in steps.items()}, rounds)
    figures = _figures(case, times, difference, plain.engine)
    report = session.report
    assert report is not None
    figures |= {
        "max_over_mean_before": report.max_vio_before + 1,
        "max_over_mean_after": report.max_vio_after + 1,
        "replicas": report.replicas,
    }
    session.remove()
    return describe_case(case, figures)


def describe_case(case: LayerCase, figures: dict[str, Any]) -> Finding:
    """The finding about one case, with its figures."""
    name = f"{case.model.name}, {case.tokens:,} tokens, max/mean {figures['max_over_mean_before']:.2f}"
    text = (
        f"{figures['engine']}: a layer takes {seconds(figures['plain_s'])} in Megatron and "
        f"{seconds(figures['planned_s'])} planned, {figures['ratio']:.3f}x; the host is busy for "
        f"{seconds(figures['plain_host_s'])} and {seconds(figures['planned_host_s'])}; {figures['replicas']} replicas; "
        f"gradients differ by {figures['difference']:.0e}"
    )
    most = MOST_DIFFERENT[this_device().type]
    # Not a number, too.
    is_equal = figures["difference"] <= most
    return Finding(
        name, "ok" if is_equal else "problem", text if is_equal else f"{text}, allowed is {most:.0e}", figures
    )


def _difference(plain: MegatronLayers, planned: MegatronLayers, steps: dict[str, Callable[[], None]]) -> float:
    """The worst relative difference of a gradient on any rank, after one step of each. Collective."""
    for layers, step in zip((plain, planned), steps.values(), strict=True):
        layers.zero()
        step()
    errors = [
        (actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-12)
        for expected, actual in zip(plain.gradients(), planned.gradients(), strict=True)
    ]
    worst = torch.stack(errors).max()
    # NaN is not larger than others.
    worst = torch.where(worst.isfinite(), worst, torch.full_like(worst, torch.inf))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _time(step: Callable[[], None], models: tuple[MegatronLayers, ...]) -> tuple[float, float]:
    """Seconds of a step until all ranks have ended it, and until its call has returned. Collective."""
    for layers in models:
        layers.zero()
    _wait()
    start = time.perf_counter()
    step()
    host_s = time.perf_counter() - start
    _wait()
    return time.perf_counter() - start, host_s


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _figures(
    case: LayerCase, times: dict[str, list[tuple[float, float]]], difference: float, engine: str
) -> dict[str, Any]:
    """Medians of a layer's forward and backward, and all samples."""
    passes = case.layers * case.micro_batches
    figures: dict[str, Any] = {
        "case": asdict(case), "ranks": dist.get_world_size(), "engine": engine, "difference": difference,
        "samples_s": {name: [step_s / passes for step_s, _ in rounds] for name, rounds in times.items()},
        "samples_host_s": {name: [host_s / passes for _, host_s in rounds] for name, rounds in times.items()},
    }  # fmt: skip
    for name in times:
        figures[f"{name}_s"] = statistics.median(figures["samples_s"][name])
        figures[f"{name}_host_s"] = statistics.median(figures["samples_host_s"][name])
    pairs = zip(figures["samples_s"]["planned"], figures["samples_s"]["plain"], strict=True)
    return figures | {"ratio": statistics.median(planned / plain for planned, plain in pairs)}
