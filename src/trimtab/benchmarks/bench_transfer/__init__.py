"""`trimtab bench transfer`: what an expert's weights cost on their way, and what a plan saves of the matrix products.

All on one device, a GPU or, with smaller sizes, the CPU; the same code runs on both.

* `grouped`: the experts of a layer against tokens an expert, to see how large a share has to be;
* `host_path`: experts from the node's mirror into slots, and the experts' compute, each alone and both at once;
* `peer_path`: several processes pull experts out of each other's memory, on one GPU through symmetric memory;
* `planned_layer`: a layer with replicas on its planned path at world size 1, where nothing may wait for the GPU;
* `critical_path`: the work of every rank of a planned and of an unplanned instance, one rank after the other.

Tests run it on the CPU. That nothing waits for the device is a fact of CUDA alone; on a CPU the planned layer is only
compared with the unplanned one.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from trimtab.benchmarks.bench_transfer.path_rates import measure_grouped, measure_host_path, measure_peers
from trimtab.benchmarks.bench_transfer.replica_layer import measure_critical_path, measure_planned_layer
from trimtab.benchmarks.bench_transfer.transfer_tables import print_figures
from trimtab.calibration.random_experts import CPU, GPU, Sizes, this_device
from trimtab.calibration.timing import Clock
from trimtab.errors import RankFailedError
from trimtab.files import write_json
from trimtab.launch import launch

__all__ = ["print_figures", "run_benchmark"]

SEED = 0


def run_benchmark(rounds: int) -> dict[str, Any]:
    """Measure everything; the figures as `trimtab bench transfer --json` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        alone, peers = Path(folder) / "alone.json", Path(folder) / "peers.json"
        sizes = GPU if torch.cuda.is_available() else CPU
        launch(_measure_alone, (sizes, rounds, alone), ranks=1)
        try:
            launch(measure_peers, (sizes, rounds, peers), ranks=sizes.peers)
            peer_path = json.loads(peers.read_text())
        except RankFailedError as error:
            peer_path = {"ranks": sizes.peers, "problem": str(error)}
        return json.loads(alone.read_text()) | {"peer_path": peer_path}


def _measure_alone(sizes: Sizes, rounds: int, path: Path) -> None:
    """Everything that one process measures."""
    torch.manual_seed(SEED)
    device = this_device()
    clock = Clock(device)
    measures: dict[str, Callable[..., Any]] = {
        "grouped": measure_grouped,
        "host_path": measure_host_path,
        "planned_layer": measure_planned_layer,
        "critical_path": measure_critical_path,
    }
    figures: dict[str, Any] = {
        "schema": "trimtab-bench-transfer-1",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "rounds": rounds,
        **{name: [] for name in measures},
    }
    work = list(itertools.product(measures.items(), sizes.models))
    for (name, measure), model in track(work, "bench transfer", transient=True):
        figures[name].append({"model": model.name} | measure(sizes, model, clock, device, rounds))
    write_json(path, figures)
