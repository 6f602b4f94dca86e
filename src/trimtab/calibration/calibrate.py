"""`calibrate`: measure how fast this machine runs a training step, as a `ClusterSpec`.

Rates are those that the runtime reaches at the sizes of a model, on all ranks at once: ranks share cores, memory and
links as in training. Each `*_rates.py` measures one part of the step; `fits.py` computes rates and fixed costs from
timings.

Tests run it on the CPU. On CUDA the same code has other sizes, tiles of grouped kernels, and copies from the memory of
other ranks.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress

from trimtab.calibration.calibration_result import (
    CalibrationResult,
    Figure,
    fitted_cost,
    fitted_rate,
)
from trimtab.calibration.calibration_settings import CalibrationSettings
from trimtab.calibration.compute_rates import measure_dense, measure_experts
from trimtab.calibration.measurement import MeasurementContext
from trimtab.calibration.transfer_rates import measure_exchange, measure_links, measure_memory
from trimtab.cluster import load_cluster
from trimtab.cluster.presets import preset_like
from trimtab.files import write_json
from trimtab.launch import launch

SEED = 0


def calibrate(settings: CalibrationSettings) -> CalibrationResult | None:
    """Measure this machine. Under torchrun all ranks but the first get None.

    Raises:
        InputError: as a rank raised it.
        RankFailedError: naming a rank that failed.
    """
    taken = measure_on_ranks(_measure, (settings,), ranks=settings.ranks)
    if not taken:
        return None
    figures = {name: Figure(**figure) for name, figure in taken["figures"].items() if figure}
    preset = load_cluster(taken["preset"], ranks=taken["ranks"], ranks_per_node=taken["ranks_per_node"])
    return CalibrationResult.of(figures, taken["checks"], name=settings.name, preset=preset, machine=taken["machine"])


def _measure(settings: CalibrationSettings) -> dict[str, Any]:
    """Figures and facts of this machine. Collective."""
    torch.manual_seed(SEED)
    torch.set_flush_denormal(True)
    context = MeasurementContext.of_all_ranks(
        settings.model, tokens=settings.tokens, sequence_length=settings.sequence_length, rounds=settings.rounds
    )
    device, topology = context.device, context.topology
    ranks, per_node, on_cuda = topology.num_ranks, topology.ranks_per_node, device.type == "cuda"
    with Progress(transient=True, disable=topology.rank != 0) as progress:
        task = progress.add_task("calibrate: memory", total=5)
        memory, optimizer = measure_memory(context)
        progress.update(task, advance=1, description="calibrate: links")
        links = measure_links(context)
        progress.update(task, advance=1, description="calibrate: all-to-all")
        exchange = measure_exchange(context)
        progress.update(task, advance=1, description="calibrate: experts")
        experts = measure_experts(context, memory)
        progress.update(task, advance=1, description="calibrate: dense parts")
        dense = measure_dense(context, settings.config, memory)
    widest = exchange.far or exchange.near
    figures = {
        "expert_flops": fitted_rate(experts.fit),
        "tile_rows": _measured(experts.tile_rows),
        "copy_s": fitted_cost(experts.fit),
        "expert_backward": Figure(experts.backward, error=experts.backward_error),
        "dense_flops": fitted_rate(dense.fit),
        "attention_flops": fitted_rate(dense.fit, 1),
        # Small operations of both the dense and the expert part.
        "layer_s": replace(
            fitted_cost(dense.fit),
            value=dense.fit.fixed_s[0] + experts.fit.fixed_s[1],
            error=max(dense.fit.error, experts.fit.error),
        ),
        "dense_backward": Figure(dense.backward, error=dense.backward_error),
        "memory_bytes_per_s": Figure(memory),
        "host_bytes_per_s": Figure(links.host),
        "node_bytes_per_s": _measured(links.near),
        "network_bytes_per_s": _measured(links.far),
        "dispatch_node_bytes_per_s": exchange.near and fitted_rate(exchange.near),
        "dispatch_network_bytes_per_s": exchange.far and fitted_rate(exchange.far),
        "dispatch_s": widest and fitted_cost(widest),
        "transfer_tax": Figure(links.tax),
        "device_bytes": Figure(_device_bytes(device, per_node), "a rank's memory, as the system reports it"),
        "planning_threads": Figure(max(1, (os.cpu_count() or 1) // per_node), "a rank's share of the system's cores"),
    }
    processor = _processor(device)
    return {
        "figures": {name: figure and asdict(figure) for name, figure in figures.items()},
        "checks": {"optimizer_bytes_per_s": optimizer},
        "machine": f"{processor}, {ranks} ranks, torch {torch.__version__}",
        "preset": preset_like(processor) if on_cuda else "local-cpu",
        "ranks": ranks,
        "ranks_per_node": per_node,
    }


def _measured(value: float | None) -> Figure | None:
    return None if value is None else Figure(value)


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _device_bytes(device: torch.device, per_node: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / per_node


def measure_on_ranks(measure: Callable[..., dict[str, Any]], args: tuple[Any, ...], *, ranks: int) -> dict[str, Any]:
    """Call `measure(*args)` on every rank, and return what rank 0 returns. Its content must fit JSON.

    Under torchrun this process is one of the ranks; ranks other than 0 get an empty dictionary.

    Raises:
        InputError: as a rank raised it.
        RankFailedError: naming a rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        launch(_write_figures, (measure, args, path), ranks=ranks)
        figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return figures


def _write_figures(measure: Callable[..., dict[str, Any]], args: tuple[Any, ...], path: Path) -> None:
    figures = measure(*args)
    if dist.get_rank() == 0:
        write_json(path, figures)
