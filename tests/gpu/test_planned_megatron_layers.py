"""Stage `megatron`: Megatron-core's MoE layers beside the same layers with a plan, in turns in one process.

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

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("megatron.core", reason="it needs megatron-core, and Transformer Engine on a GPU")

from megatron.core.transformer.moe.moe_layer import MoELayer

from benchmarks.megatron_layers import LayerCase, MegatronLayers
from benchmarks.replayed_megatron import replayed, start_megatron
from trimtab.calibration.alternating_rounds import alternate
from trimtab.calibration.measurement import Clock, this_device
from trimtab.cluster import ModelSpec, load_model
from trimtab.doctor.finding import Finding
from trimtab.integrations.megatron import balance
from trimtab.integrations.megatron.experts import experts_of
from trimtab.report.number_text import seconds

Run = Callable[..., None]
# Spread of weights, so that outputs are neither lost nor infinite.
SPREAD = 0.02


def test_layers_of_megatron(run: Run) -> None:
    run("megatron", check_megatron, 600)


def time_products(case: LayerCase, replicas: int, rounds: int) -> Finding:
    """Time forward and backward of the experts of a rank with even rows: homes and replicas in one module, and as a
    planned layer does it, the module of the homes and then replicas whose gradients are turned to float32."""
    ranks, device = dist.get_world_size(), this_device()
    clock = Clock(device)
    homes = case.model.num_experts // ranks
    one, two = _Experts(case, homes + replicas), _Experts(case, homes)
    dtype = next(two.module.parameters()).dtype
    rows_of, total = _split(case.tokens * case.model.top_k, homes + replicas), case.tokens * case.model.top_k
    at_home = sum(rows_of[:homes])
    rows = torch.randn(total, case.model.hidden_size, device=device, dtype=dtype).requires_grad_()
    probs = torch.rand(total, device=device).requires_grad_()
    gradient = torch.randn_like(rows)
    experts = experts_of(two.module)
    assert experts is not None
    weights = [
        (torch.randn(replicas, *tensors[0].shape, device=device) * SPREAD).to(dtype).requires_grad_()
        for tensors in experts.tensors()
    ]

    def together() -> None:
        one.module(rows, torch.tensor(rows_of), probs)[0].backward(gradient)

    def apart() -> None:
        of_homes, of_replicas = rows.split([at_home, total - at_home])
        home_probs, replica_probs = probs.split([at_home, total - at_home])
        output = two.module(of_homes, torch.tensor(rows_of[:homes]), home_probs)[0]
        more = experts.compute(of_replicas, rows_of[homes:], replica_probs, [weight.unbind() for weight in weights])
        torch.cat([output, more]).backward(gradient)
        for weight in weights:
            assert weight.grad is not None
            weight.grad.float()

    def timed(run: Callable[[], None]) -> tuple[float, float]:
        for tensor in (rows, probs, *weights):
            tensor.grad = None
        return _time_product(clock, run)

    times = alternate({"one": lambda: timed(together), "two": lambda: timed(apart)}, rounds)
    figures: dict[str, Any] = {
        "model": case.model.name, "tokens": case.tokens, "homes": homes, "replicas": replicas, "engine": one.engine,
    }  # fmt: skip
    for name, samples in times.items():
        figures[f"{name}_s"], figures[f"{name}_host_s"] = map(statistics.median, zip(*samples, strict=True))
    text = (
        f"{one.engine}: {homes} homes and {replicas} replicas take {seconds(figures['one_s'])} in one product, and "
        f"{seconds(figures['two_s'])} one after the other"
    )
    return Finding(f"products, {case.model.name}, {case.tokens:,} tokens", "ok", text, figures)


class _Experts:
    """The experts of one layer on this rank.

    Attributes:
        layers: keeps them.
        module: Megatron's.
        engine: what computes them.
    """

    def __init__(self, case: LayerCase, experts: int) -> None:
        model = replace(case.model, num_experts=experts * dist.get_world_size())
        self.layers = MegatronLayers(replace(case, model=model, tokens=1, layers=1, micro_batches=1))
        self.engine = self.layers.engine
        layer = next(module for module in self.layers.ddp.modules() if isinstance(module, MoELayer))
        self.module: nn.Module = layer.experts


def _split(total: int, parts: int) -> list[int]:
    """Whole numbers with a sum, which differ by at most one."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _time_product(clock: Clock, run: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the device, and until the call has returned."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin, start = clock.now(), time.perf_counter()
    run()
    host_s = time.perf_counter() - start
    return clock.seconds(begin, clock.now()), host_s


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
    on_cuda = this_device().type == "cuda"
    if not on_cuda:
        torch.compiler.set_stance("force_eager")
    start_megatron()
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
    mine = case.routing(dist.get_world_size(), seed=0)[dist.get_rank()]
    plain, planned = MegatronLayers(case), MegatronLayers(case)
    session = balance(planned.ddp, slots_per_rank=SLOTS)
    steps: dict[str, Callable[[], None]] = {
        "plain": partial(plain.step_with_replay, replayed(mine)),
        "planned": partial(planned.step, mine, session),
    }
    for layers, step in zip((plain, planned), steps.values(), strict=True):
        layers.zero()
        step()
    difference = planned.difference(plain)
    times = alternate({name: partial(_time_step, step, (plain, planned)) for name, step in steps.items()}, rounds)
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


def _time_step(step: Callable[[], None], models: tuple[MegatronLayers, ...]) -> tuple[float, float]:
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
