"""Stage `environment`: the device, NCCL, variables, peer access, shared memory, NUMA nodes, the path of replicas."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trimtab.calibration.measurement import this_device
from trimtab.doctor.examination import check_shared_memory, describe_gpu_variables
from trimtab.doctor.finding import Finding
from trimtab.doctor.planned_micro_step import StepSizes
from trimtab.doctor.self_check import check_path
from trimtab.figures import plural
from trimtab.rank_variables import can_share_gpus
from trimtab.report.number_text import bytes_text
from trimtab.runtime.rows.grouped_products import GROUPED_KERNEL_CAPABILITIES
from trimtab.runtime.transfer.peer_memory import Place, Symmetric

DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")
NO_GPU = "no GPU: only the code paths were checked, on the CPU"


def check_environment() -> list[Finding]:
    """Findings about this rank's device and what the ranks share."""
    device = this_device()
    findings = _check_gpu(device) if device.type == "cuda" else [Finding("device", "warning", NO_GPU)]
    if dist.get_rank() == 0:
        findings.append(check_shared_memory())
    findings.append(check_numa(device))
    return [*findings, *_check_kernels(device)]


def _check_gpu(device: torch.device) -> list[Finding]:
    found = torch.cuda.get_device_properties(device)
    text = f"{dist.get_world_size()} x {found.name}, {bytes_text(found.total_memory)}, sm_{found.major}{found.minor}"
    findings = [Finding("device", "ok", text)]
    if found.major not in GROUPED_KERNEL_CAPABILITIES:
        text = f"torch has no grouped product for sm_{found.major}{found.minor}; experts run one after another, slower"
        findings.append(Finding("device", "warning", text))
    if dist.get_world_size() == 1:
        text = "1 GPU: transfers between GPUs were not checked"
        findings.append(Finding("device", "warning", text))
    findings += describe_gpu_variables(torch.cuda.nccl.version(), os.environ)
    mine = Symmetric.place(device)
    places: list[Place] = [mine] * dist.get_world_size()
    dist.all_gather_object(places, mine)
    seen = {uuid: Symmetric.reaches(device, index) for uuid, index in Symmetric.visible().items() if uuid != mine.uuid}
    return [*findings, check_peer_access(places, dist.get_rank(), seen)]


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
        text = (
            f"{plural(hidden, 'GPU')} of other ranks not visible to this process; whether it reads them is tried below"
        )
        return Finding(name, "ok", text)
    return Finding(name, "ok", f"all {len(places)} GPUs read each other's memory")


def check_numa(device: torch.device) -> Finding:
    """Whether this process may run on the cores of the NUMA node of its GPU."""
    name = "NUMA"
    mine = os.sched_getaffinity(0)
    cores = {
        int(path.name.removeprefix("node")): _numbers((path / "cpulist").read_text())
        for path in NODES.glob("node[0-9]*")
    }
    allowed = sorted(node for node, numbers in cores.items() if numbers & mine)
    if device.type != "cuda":
        return Finding(name, "ok", f"processes may run on {len(allowed)} of {len(cores)} nodes")
    node = _node_of(torch.cuda.get_device_properties(device))
    if node is None:
        return Finding(name, "ok", "the system does not say on which node the GPU is")
    if node not in allowed:
        text = f"its GPU is on node {node}, and its process may run on nodes {allowed} only; start it on node {node}"
        return Finding(name, "warning", text + " (numactl), or copies from host memory cross nodes")
    return Finding(name, "ok", f"every GPU is on a node that its process may run on, of {len(cores)}")


def _node_of(properties: Any) -> int | None:
    """NUMA node of a GPU; None if unknown."""
    if not hasattr(properties, "pci_bus_id"):
        return None
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    path = DEVICES / address / "numa_node"
    node = int(path.read_text()) if path.exists() else -1
    return None if node < 0 else node


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as `0-3,8`."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in parts for number in range(int(first), int(last or first) + 1)}


def _check_kernels(device: torch.device) -> list[Finding]:
    """Compile the host's kernels in a small micro-step, which also shows which path replicas take."""
    start = time.perf_counter()
    ranks = dist.get_world_size()
    sizes = StepSizes(hidden=64, width=32, dtype=torch.float32)
    check = check_path("peer" if ranks > 1 else "host", sizes)
    findings = [Finding("kernels", "ok", f"compiled and ran in {time.perf_counter() - start:.1f} s")]
    if device.type == "cuda" and ranks > 1:
        if check.reads_peers:
            text = "replicas inside a node are read from the memory of the GPU that is their home"
            findings.append(Finding("path", "ok", text))
        else:
            text = "replicas inside a node are sent as messages, which is slower; the log line below has the reason"
            findings.append(Finding("path", "warning", text))
    elif device.type != "cuda":
        findings.append(Finding("path", "ok", "replicas come from the mirror in shared memory, or as messages"))
    return findings
