"""`time_products`: what it costs that replicas are multiplied after home experts, and not together with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from trimtab.calibration.alternating_rounds import alternate
from trimtab.calibration.random_experts import this_device
from trimtab.doctor.finding import Finding
from trimtab.doctor.gpu.megatron_layers import LayerCase, MegatronLayers
from trimtab.integrations.megatron.experts import experts_of
from trimtab.report.number_text import seconds

# Spread of weights, so that outputs are neither lost nor infinite.
SPREAD = 0.02


def time_products(case: LayerCase, replicas: int, rounds: int) -> Finding:
    """Time forward and backward of the experts of a rank with even rows: homes and replicas in one module, and as a
    planned layer does it, the module of the homes and then replicas whose gradients are turned to float32."""
    ranks, device = dist.get_world_size(), this_device()
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
        return _time(run)

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


def _time(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the device, and until the call has returned."""
    start = time.perf_counter()
    if not torch.cuda.is_available():
        run()
        return time.perf_counter() - start, time.perf_counter() - start
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start = time.perf_counter()
    begin.record()
    run()
    end.record()
    host_s = time.perf_counter() - start
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, host_s
