"""Stages `equality` and `sanitizer`: a micro-step with replicas on each path equals one process with all experts."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from trimtab.calibration.random_experts import this_device
from trimtab.doctor.finding import Finding
from trimtab.doctor.planned_micro_step import PATHS, StepSizes
from trimtab.doctor.random_delays import RandomDelays
from trimtab.doctor.replica_check import describe_check
from trimtab.doctor.self_check import check_path
from trimtab.runtime.ranks.topology import Topology

# Width of Qwen3-30B-A3B's tokens and experts.
GPU = StepSizes(hidden=2048, width=768, tokens_per_rank=512)
CPU = StepSizes(hidden=256, width=64, tokens_per_rank=64)
REPETITIONS = 3


def check_equality() -> list[Finding]:
    """Compare bfloat16 and float32 on each path, with random pauses of compute and copies."""
    return _compare((torch.bfloat16, torch.float32), delays=RandomDelays(dist.get_rank()))


def check_under_sanitizer() -> list[Finding]:
    """Compare bfloat16 on each path under torch's CUDA sanitizer, which raises if streams race for a tensor.

    It knows accesses of torch's operations; not those of NCCL, nor of one GPU to another's memory.
    """
    if not torch.cuda.is_available():
        return [Finding("sanitizer", "ok", "skipped: it needs a GPU")]
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    enable_cuda_sanitizer()
    return _compare((torch.bfloat16,), delays=None)


def _compare(dtypes: tuple[torch.dtype, ...], *, delays: RandomDelays | None) -> list[Finding]:
    ranks = dist.get_world_size()
    sizes = GPU if this_device().type == "cuda" else CPU
    findings = []
    # Kept, since the sessions share its groups, which take seconds to connect.
    topology = Topology.build(None, 1, None)
    for dtype in dtypes:
        of_dtype = replace(sizes, dtype=dtype)
        # With one rank there is no other to get replicas from.
        for path in PATHS if ranks > 1 else ("host",):
            check = check_path(path, of_dtype, delays=delays, repetitions=REPETITIONS)
            name = f"{path} path"
            findings.append(describe_check(name, check, ranks))
            if path == "peer" and not check.reads_peers:
                text = "replicas were sent as messages: the ranks can't read each other's memory"
                findings.append(Finding(name, "warning", text))
    dist.barrier(group=topology.control)
    return findings
