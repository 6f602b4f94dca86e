"""Stage `environment` of `trimtab doctor --gpu`: device, NCCL, variables, peer access, shared memory, NUMA nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trimtab.calibration.measurement import this_device
from trimtab.doctor.examination import check_shared_memory, describe_gpu_variables
from trimtab.doctor.finding import Finding
from trimtab.figures import plural
from trimtab.rank_variables import can_share_gpus
from trimtab.report.number_text import bytes_text
from trimtab.runtime.program.grouped_products import GROUPED_KERNEL_CAPABILITIES
from trimtab.runtime.transfer.peer_memory import Place, Symmetric

DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")


def check_environment() -> list[Finding]:
    """Findings about this rank's GPU and what the ranks share. Collective."""
    device, ranks = this_device(), dist.get_world_size()
    gpu: Any = torch.cuda.get_device_properties(device)
    text = f"{ranks} x {gpu.name}, {bytes_text(gpu.total_memory)}, sm_{gpu.major}{gpu.minor}"
    findings = [Finding("device", "ok", text)]
    if gpu.major not in GROUPED_KERNEL_CAPABILITIES:
        text = f"torch has no grouped product for sm_{gpu.major}{gpu.minor}; experts run one after another, slower"
        findings.append(Finding("device", "warning", text))
    if ranks == 1:
        findings.append(Finding("device", "warning", "1 GPU: transfers between GPUs were not checked"))
    findings += describe_gpu_variables(torch.cuda.nccl.version(), os.environ)
    mine = Symmetric.place(device)
    places: list[Place] = [mine] * ranks
    dist.all_gather_object(places, mine)
    seen = {uuid: Symmetric.reaches(device, index) for uuid, index in Symmetric.visible().items() if uuid != mine.uuid}
    findings.append(check_peer_access(places, dist.get_rank(), seen))
    if dist.get_rank() == 0:
        findings.append(check_shared_memory())
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    return [*findings, check_numa(DEVICES / address / "numa_node")]


def check_peer_access(places: list[Place], rank: int, reaches: dict[str, bool]) -> Finding:
    """Whether a rank's GPU reads the memory of all others.

    Args:
        places: of all ranks.
        rank: the rank.
        reaches: for each other GPU that the rank sees, by UUID, whether its GPU reads it.
    """
    name, mine = "peer access", places[rank]
    sharing = [other for other, place in enumerate(places) if place.uuid == mine.uuid and other != rank]
    if sharing:
        text = f"rank {sharing[0]} uses the same GPU, {mine.uuid}"
        if can_share_gpus():
            return Finding(name, "warning", f"{text}: results are checked, times mean nothing")
        return Finding(name, "problem", f"{text}; give every rank a GPU of its own")
    closed = [str(other) for other, place in enumerate(places) if not reaches.get(place.uuid, True)]
    if closed:
        text = f"its GPU can't read the memory of the GPUs of ranks {', '.join(closed)}; replicas are sent as messages"
        return Finding(name, "warning", text)
    hidden = sum(place.uuid not in reaches for place in places) - 1
    if hidden:
        text = f"{plural(hidden, 'GPU')} of other ranks not visible to this process; stage equality tries to read them"
        return Finding(name, "ok", text)
    return Finding(name, "ok", f"all {len(places)} GPUs read each other's memory")


def check_numa(numa_node: Path) -> Finding:
    """Whether this process may run on the cores of the NUMA node of its GPU.

    Args:
        numa_node: file with the number of the GPU's node; the system has none for some devices.
    """
    name = "NUMA"
    node = int(numa_node.read_text()) if numa_node.exists() else -1
    if node < 0:
        return Finding(name, "ok", "the system does not say on which node the GPU is")
    cores = _numbers((NODES / f"node{node}" / "cpulist").read_text())
    if cores & os.sched_getaffinity(0):
        return Finding(name, "ok", "every GPU is on a node that its process may run on")
    text = f"its GPU is on node {node}, on whose cores its process may not run; start it there"
    return Finding(name, "warning", text + " (numactl), or copies from host memory cross nodes")


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as `0-3,8`."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in parts for number in range(int(first), int(last or first) + 1)}
