"""Stage `bandwidth`: rates of the links that replicas and rows use, beside what is expected of the GPU."""

from __future__ import annotations

import torch

from trimtab.calibration.exchange_rates import measure_exchange
from trimtab.calibration.link_rates import measure_links
from trimtab.calibration.measurement_context import MeasurementContext
from trimtab.cluster import QWEN3_30B, ClusterSpec, ModelSpec, load_cluster
from trimtab.cluster.presets import preset_like
from trimtab.doctor.finding import Finding
from trimtab.report.number_text import rate

ROUNDS = 5
GPU_TOKENS, CPU_TOKENS = 8192, 512
CPU_MODEL = ModelSpec("doctor", 16, 4, hidden_size=256, expert_width=96)
# A smaller fraction of the expected rate is a warning.
LEAST = 0.5


def check_bandwidth() -> list[Finding]:
    """Measure all links on all ranks at once."""
    on_cuda = torch.cuda.is_available()
    context = MeasurementContext.of_all_ranks(
        QWEN3_30B if on_cuda else CPU_MODEL, tokens=GPU_TOKENS if on_cuda else CPU_TOKENS, sequence_length=1,
        rounds=ROUNDS,
    )  # fmt: skip
    links = measure_links(context, host_peers=True)
    exchange = measure_exchange(context).near
    pulled = links.messages is not None
    measured: dict[str, float | None] = {
        "host path": links.host,
        "copy-engine pulls": links.near if pulled else None,
        "messages": links.messages if pulled else links.near,
        "all-to-all": None if exchange is None else exchange.rates[0],
    }
    cluster = cluster_of(torch.cuda.get_device_name(), context.topology.num_ranks) if on_cuda else None
    return [compare_rate(name, value, cluster) for name, value in measured.items() if value is not None]


def cluster_of(gpu: str, ranks: int) -> ClusterSpec | None:
    """One node of the preset for a GPU of this name; None if there is none."""
    preset = preset_like(gpu)
    if preset.removesuffix("x8").removesuffix("-nvl72") not in gpu.lower():
        return None
    return load_cluster(preset, ranks=ranks, ranks_per_node=ranks)


def expected_rates(cluster: ClusterSpec) -> dict[str, float]:
    """Bytes a second by link, each way, from a cluster's preset; docs/clusters.md has the sources."""
    return {
        "host path": cluster.host_bytes_per_s,
        "copy-engine pulls": cluster.node_bytes_per_s,
        # By the same kernels as the all-to-all.
        "messages": cluster.dispatch_node_bytes_per_s,
        "all-to-all": cluster.dispatch_node_bytes_per_s,
    }


def compare_rate(name: str, measured: float, cluster: ClusterSpec | None) -> Finding:
    """The finding about one link, in bytes per second.

    Args:
        cluster: a preset of nodes with this GPU; None if nothing is expected.
    """
    if cluster is None:
        return Finding(name, "ok", rate(measured))
    expected = expected_rates(cluster)[name]
    text = f"{rate(measured)}, where {rate(expected)} is expected of {cluster.name}"
    if measured >= LEAST * expected:
        return Finding(name, "ok", text)
    return Finding(name, "warning", f"{text}; see docs/gpu.md for what slows it")
