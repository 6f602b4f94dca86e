"""`trimtab bench transfer`: cost of weight transfers, and expert compute saved by a plan, on one device.

The device is a GPU or, with smaller sizes, the CPU; the same code runs on both.

* `grouped`: time of a layer's experts by tokens per expert, which shows how large a share should be;
* `host_path`: experts copied from the node's mirror into slots, and the experts' compute, alone and at the same time;
* `peer_path`: processes copy experts from each other's memory, on one GPU through symmetric memory;
* `planned_layer`: a layer with replicas at world size 1, where no operation may wait for the GPU;
* `critical_path`: the compute of every rank of a planned and of an unplanned instance, one rank after the other.

Tests run it on the CPU, where waiting for the device can't be detected: there the planned layer is only compared with
the unplanned one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track

from trimtab.benchmarks.critical_path import measure_critical_path
from trimtab.benchmarks.planned_layer import measure_planned_layer
from trimtab.benchmarks.transfer_rates import measure_grouped, measure_host_path, measure_peers
from trimtab.benchmarks.transfer_sizes import CPU, GPU, TransferSizes
from trimtab.benchmarks.transfer_tables import print_figures
from trimtab.calibration.random_experts import this_device
from trimtab.calibration.rank_figures import measure_on_ranks
from trimtab.calibration.timing import Clock
from trimtab.errors import RankFailedError

__all__ = ["print_figures", "run_benchmark"]

SEED = 0


def run_benchmark(rounds: int) -> dict[str, Any]:
    """All figures, as `trimtab bench transfer --json` writes them."""
    sizes = GPU if torch.cuda.is_available() else CPU
    figures = measure_on_ranks(_measure_alone, (sizes, rounds), ranks=1)
    try:
        peer_path = measure_on_ranks(measure_peers, (sizes, rounds), ranks=sizes.peers)
    except RankFailedError as error:
        peer_path = {"ranks": sizes.peers, "problem": str(error)}
    return figures | {"peer_path": peer_path}


def _measure_alone(sizes: TransferSizes, rounds: int) -> dict[str, Any]:
    """All figures of one process."""
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
    return figures
