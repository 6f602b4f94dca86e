"""Stages `bandwidth` and `equality` of `trimtab doctor --gpu`: rates of links, and results of a planned micro-step.

By default they have sizes for GPUs. Tests run them on a CPU in smaller ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from trimtab.calibration.measurement import MeasurementContext
from trimtab.calibration.transfer_rates import measure_exchange, measure_links
from trimtab.cluster import QWEN3_30B, ClusterSpec, ModelSpec, load_cluster
from trimtab.cluster.presets import preset_like
from trimtab.doctor.examination import describe_check
from trimtab.doctor.finding import Finding
from trimtab.doctor.planned_micro_step import PATHS, StepSizes
from trimtab.doctor.self_check import check_path
from trimtab.report.number_text import rate
from trimtab.runtime.ranks.topology import Topology

ROUNDS = 5
# A smaller fraction of the expected rate is a warning.
LEAST = 0.5
# Width of Qwen3-30B-A3B's tokens and experts.
SIZES = StepSizes(hidden=2048, width=768, tokens_per_rank=512)
REPETITIONS = 3


def check_bandwidth(model: ModelSpec = QWEN3_30B, tokens: int = 8192) -> list[Finding]:
    """Measure all links on all ranks at once. Collective.

    Args:
        model: sizes of experts and rows.
        tokens: of each rank.
    """
    context = MeasurementContext.of_all_ranks(model, tokens=tokens, sequence_length=1, rounds=ROUNDS)
    links = measure_links(context)
    exchange = measure_exchange(context).near
    pulled = links.messages is not None
    measured: dict[str, float | None] = {
        "host path": links.host,
        "copy-engine pulls": links.near if pulled else None,
        "messages": links.messages if pulled else links.near,
        "all-to-all": None if exchange is None else exchange.rates[0],
    }
    cluster = cluster_here(context.topology.num_ranks)
    return [compare_rate(name, value, cluster) for name, value in measured.items() if value is not None]


def cluster_here(ranks: int) -> ClusterSpec | None:
    """One node of the preset for this machine's GPUs; None without a preset for them."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    preset = preset_like(gpu)
    if preset.removesuffix("x8").removesuffix("-nvl72") not in gpu.lower():
        return None
    return load_cluster(preset, ranks=ranks, ranks_per_node=ranks)


def compare_rate(name: str, measured: float, cluster: ClusterSpec | None) -> Finding:
    """The finding about one link, in bytes per second.

    Args:
        cluster: a preset of nodes with this GPU, docs/clusters.md has its sources; None if nothing is expected.
    """
    if cluster is None:
        return Finding(name, "ok", rate(measured))
    # Messages are sent by the same kernels as the all-to-all.
    links = {"host path": cluster.host_bytes_per_s, "copy-engine pulls": cluster.node_bytes_per_s}
    expected = links.get(name, cluster.dispatch_node_bytes_per_s)
    text = f"{rate(measured)}, where {rate(expected)} is expected of {cluster.name}"
    if measured >= LEAST * expected:
        return Finding(name, "ok", text)
    return Finding(name, "warning", f"{text}; see docs/gpu.md for what slows it")


def check_equality(
    sizes: StepSizes = SIZES, dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
) -> list[Finding]:
    """Compare a planned micro-step with one process, on each path in each dtype. Collective."""
    ranks = dist.get_world_size()
    findings = []
    # Kept, since the sessions share its groups, which take seconds to connect.
    topology = Topology.build(None, 1, None)
    for dtype in dtypes:
        # With one rank there is no other to get replicas from.
        for path in PATHS if ranks > 1 else ("host",):
            check = check_path(path, replace(sizes, dtype=dtype), repetitions=REPETITIONS)
            name = f"{path} path"
            findings.append(describe_check(name, check, ranks))
            if path == "peer" and not check.reads_peers:
                text = "replicas were sent as messages: the ranks can't read each other's memory"
                findings.append(Finding(name, "warning", text))
    dist.barrier(group=topology.control)
    return findings
