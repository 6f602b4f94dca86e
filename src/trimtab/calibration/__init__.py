"""`trimtab calibrate`: how fast is this machine, as a training step on it is? The answer is a `ClusterSpec`.

Rates are those that the real runtime reaches at the sizes of a model, on all ranks at once: they share cores, memory
and links as in training. One file a question:

* `experts`: the runtime's expert layer, forward and backward;
* `dense`: a transformers model's other parts;
* `exchange`: the all-to-all of dispatch and combine;
* `copies`: memory, and the ways of replicas' weights;
* `site`: what they are measured with; `work`: how much work is in an operation; `fits`: rates and fixed costs from
  timings; `settings`: what is measured; `figures`: the outcome, and `tables` for people.

Tests run it on the CPU. On CUDA the same code has other sizes, the tiles of grouped kernels, and pulls from peers'
memory.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import Progress

from trimtab.calibration.calibration_settings import Calibration, settings_for
from trimtab.calibration.copy_rates import measure_links, measure_memory
from trimtab.calibration.dense_rates import measure_dense
from trimtab.calibration.exchange_rates import measure_exchange
from trimtab.calibration.expert_rates import measure_experts
from trimtab.calibration.figures import Calibrated, Figure, fitted_cost, fitted_rate, of_links
from trimtab.calibration.random_experts import this_device
from trimtab.calibration.site import Site
from trimtab.calibration.timing import Clock
from trimtab.cluster import load_cluster
from trimtab.files import write_json
from trimtab.launch import launch
from trimtab.runtime.ranks.topology import Topology

__all__ = ["Calibrated", "Calibration", "calibrate", "settings_for"]

SEED = 0
STAGES = ("links", "all-to-all", "experts", "dense parts", "done")


def calibrate(settings: Calibration) -> Calibrated | None:
    """Measure this machine. Under torchrun all ranks but the first get None.

    Raises:
        InputError: as a rank raised it.
        RankFailedError: naming a rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        launch(_measure, (settings, path), ranks=settings.ranks)
        if not path.exists():
            return None
        taken = json.loads(path.read_text())
    figures = {name: Figure(**figure) for name, figure in taken["figures"].items()}
    guess = load_cluster(taken["preset"], ranks=taken["ranks"], ranks_per_node=taken["ranks_per_node"])
    return Calibrated.of(figures, taken["checks"], name=settings.name, guess=guess, machine=taken["machine"])


def _measure(settings: Calibration, path: Path) -> None:
    """Everything, on one of the ranks; the first writes it down."""
    torch.manual_seed(SEED)
    torch.set_flush_denormal(True)
    device, rank, ranks = this_device(), dist.get_rank(), dist.get_world_size()
    on_cuda = device.type == "cuda"
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    dtype = torch.bfloat16 if on_cuda else torch.float32
    alone = [dist.new_group([one]) for one in range(ranks)][rank]
    assert alone is not None
    site = Site(
        topology=Topology.build(None, 1, per_node),
        alone=alone,
        device=device,
        clock=Clock(device),
        model=replace(settings.model, weight_bytes=dtype.itemsize),
        dtype=dtype,
        tokens=settings.tokens,
        sequence_length=settings.sequence_length,
        rounds=settings.rounds,
    )
    with _stages(shown=rank == 0) as next_stage:
        memory, optimizer = measure_memory(site)
        next_stage()
        links = measure_links(site)
        next_stage()
        exchange = measure_exchange(site)
        next_stage()
        experts = measure_experts(site, memory)
        next_stage()
        dense = measure_dense(site, settings.config, memory)
        next_stage()
    if rank:
        return
    preset = "h100x8" if on_cuda else "local-cpu"
    guess = load_cluster(preset, ranks=ranks, ranks_per_node=per_node)
    near, far = (None if rate is None else Figure(rate) for rate in (links.near, links.far))
    near_rows, far_rows = (None if fit is None else fitted_rate(fit) for fit in (exchange.near, exchange.far))
    widest = exchange.far or exchange.near
    figures = {
        "expert_flops": fitted_rate(experts.fit),
        "tile_rows": Figure(experts.tile_rows),
        "copy_s": fitted_cost(experts.fit),
        "expert_backward": Figure(experts.backward),
        "dense_flops": fitted_rate(dense.fit),
        "attention_flops": fitted_rate(dense.fit, 1),
        # A layer's own small operations, in both halves.
        "layer_s": replace(fitted_cost(dense.fit), value=dense.fit.fixed_s[0] + experts.fit.fixed_s[1]),
        "dense_backward": Figure(dense.backward),
        "memory_bytes_per_s": Figure(memory),
        "host_bytes_per_s": Figure(links.host),
        **of_links(("node_bytes_per_s", "network_bytes_per_s"), near, far, guess),
        **of_links(("dispatch_node_bytes_per_s", "dispatch_network_bytes_per_s"), near_rows, far_rows, guess),
        "dispatch_s": (
            fitted_cost(widest) if widest else Figure(guess.dispatch_s, "there was one rank", measured=False)
        ),
        "device_bytes": Figure(_device_bytes(device, per_node)),
        "planning_threads": Figure(max(1, (os.cpu_count() or 1) // per_node)),
    }
    content = {
        "figures": {name: asdict(figure) for name, figure in figures.items()},
        "checks": {"optimizer_bytes_per_s": optimizer},
        "machine": f"{_processor(device)}, {ranks} ranks, torch {torch.__version__}",
        "preset": preset,
        "ranks": ranks,
        "ranks_per_node": per_node,
    }
    write_json(path, content)


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


@contextmanager
def _stages(*, shown: bool) -> Iterator[Callable[[], None]]:
    """Shows what is measured now; call it for the next."""
    with Progress(transient=True, disable=not shown) as progress:
        task = progress.add_task("calibrate: memory", total=len(STAGES))
        names = iter(STAGES)
        yield lambda: progress.update(task, advance=1, description=f"calibrate: {next(names)}")
