"""Stages `equality`, `sanitizer`, `synchronisation` and `layer`: results, waits and times of planned micro-steps."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.calibration.random_experts import this_device
from trimtab.cluster import QWEN3_30B, ClusterSpec, ModelSpec
from trimtab.cluster.operations import OperationCosts
from trimtab.doctor.examination import describe_check
from trimtab.doctor.finding import Finding
from trimtab.doctor.gpu.transfer_stages import cluster_of
from trimtab.doctor.planned_micro_step import PATHS, PlannedMicroStep, RandomDelays, StepSizes
from trimtab.doctor.self_check import check_path
from trimtab.report.number_text import seconds
from trimtab.runtime.ranks.recorder import ACTIVITIES, WAITING
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


# Operations that read a value or a size from the device.
READING = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::_unique2")

TORCH = str(Path(torch.__file__).parent)


class WaitError(RuntimeError):
    """The host would wait for the device."""


class ForbidWaits(TorchDispatchMode):
    """Raises WaitError at an operation that would make the host wait, if its tensors were on a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in READING or (name == "aten::index" and any(_is_mask(index) for index in args[1])):
            raise WaitError(f"{name} reads a value from the device")
        return func(*args, **(kwargs or {}))


def _is_mask(index: torch.Tensor | None) -> bool:
    """Whether an index selects as many rows as it has true values."""
    return index is not None and index.dtype is torch.bool


@contextmanager
def forbidden_waits(device: torch.device) -> Iterator[None]:
    """A context in which an operation raises RuntimeError if the host would wait for the device."""
    if device.type != "cuda":
        with ForbidWaits():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def find_wait(work: Callable[[], object], device: torch.device) -> str | None:
    """The first place in `work` where the host would wait for the device, and why; None if there is none."""
    try:
        with forbidden_waits(device):
            work()
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        # Below it are this file and torch.
        above = [frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith(TORCH)]
        place = (above or frames)[-1]
        return f"{Path(place.filename).name}:{place.lineno}: {str(error).splitlines()[0]}"
    return None


def check_synchronisation() -> list[Finding]:
    """Run forward and backward of planned layers on each path, where waiting is an error."""
    device, ranks = this_device(), dist.get_world_size()
    sizes = StepSizes(hidden=64, width=32, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    torch.manual_seed(0)
    weights = [
        [torch.randn(shape, dtype=sizes.dtype, device=device) / 8 for shape in _shapes(sizes, ranks)]
        for _ in range(sizes.layers)
    ]
    hidden, target = torch.randn(2, sizes.tokens_per_rank, sizes.hidden, device=device).to(sizes.dtype)
    findings = []
    for path in PATHS if ranks > 1 else ("host",):
        step = PlannedMicroStep(sizes, path, weights)
        # Communicators and memory are made in the first run.
        step.run(hidden, target)
        with step.session.micro_step(0):
            found = find_wait(partial(step.forward_backward, hidden, target), device)
        name = f"{path} path"
        if found is None:
            findings.append(Finding(name, "ok", "no wait in forward and backward"))
        else:
            # A rank that stopped leaves others in the middle of a layer.
            return [*findings, Finding(name, "problem", f"the host waits in every planned layer: {found}")]
        step.session.close()
    return findings


def _shapes(sizes: StepSizes, ranks: int) -> tuple[tuple[int, ...], ...]:
    return (ranks * sizes.experts_per_rank, sizes.hidden), *sizes.shapes(sizes.experts_per_rank)


GPU_TOKENS, CPU_TOKENS = (4096, 8192), (256, 512)
CPU_MODEL = ModelSpec("doctor", 8, 4, hidden_size=64, expert_width=32, weight_bytes=4)
LAYERS = 4
RUNS = 5
# A layer that takes longer than its estimate times this is a warning.
MOST = 2.0


def check_layer() -> list[Finding]:
    """Time forward and backward of planned layers with even routing, and one replica on each rank."""
    device, ranks = this_device(), dist.get_world_size()
    on_cuda = device.type == "cuda"
    model = QWEN3_30B if on_cuda else CPU_MODEL
    # Some numbers of GPUs do not divide the experts.
    experts_per_rank = max(model.num_experts // ranks, model.top_k // ranks + 1)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    cluster = cluster_of(torch.cuda.get_device_name(), ranks) if on_cuda else None
    findings = []
    for tokens in GPU_TOKENS if on_cuda else CPU_TOKENS:
        sizes = StepSizes(
            LAYERS, experts_per_rank, model.top_k, model.hidden_size, model.expert_width, tokens, 0.0, dtype
        )
        measured = _measure(sizes, device)
        expected = {} if cluster is None else estimate_layer(cluster, model, tokens)
        findings.append(describe_layer(f"{tokens:,} tokens", measured, expected))
    return findings


def describe_layer(name: str, measured: dict[str, float], expected: dict[str, float]) -> Finding:
    """The finding about one size.

    Args:
        measured: seconds of a layer by part.
        expected: estimated seconds of some of these parts; none without an estimate.
    """
    texts = [
        f"{part} {seconds(taken)}" + (f" (estimate {seconds(expected[part])})" if part in expected else "")
        for part, taken in measured.items()
    ]
    if not expected:
        return Finding(name, "ok", "; ".join(texts))
    total, estimate = sum(measured[part] for part in expected), sum(expected.values())
    texts.append(f"together {seconds(total)} (estimate {seconds(estimate)})")
    return Finding(name, "ok" if total <= MOST * estimate else "warning", "; ".join(texts))


def estimate_layer(cluster: ClusterSpec, model: ModelSpec, tokens: int) -> dict[str, float]:
    """Seconds of forward and backward of one MoE layer by part, in their order, from published rates of the hardware.

    The routing is even, so nothing waits for a busier rank. Attention, router and norms are not in it.

    Args:
        cluster: one node. Rows are sent once for each expert of a token, as the session's own dispatcher does.
        tokens: of each rank.
    """
    costs = OperationCosts.of(replace(cluster, dispatch_forwards=False), model)
    rows, here = tokens * model.top_k, model.num_experts / cluster.ranks
    exchange_s = costs.dispatch_s + rows * (cluster.ranks - 1) / cluster.ranks * costs.near_row_s
    experts_s = here * float(costs.copy_seconds(np.array(rows / here)))
    return {
        "dispatch": exchange_s, "experts": experts_s, "combine": exchange_s, "combine, backward": exchange_s,
        "experts, backward": costs.expert_backward * experts_s, "dispatch, backward": exchange_s,
    }  # fmt: skip


def _measure(sizes: StepSizes, device: torch.device) -> dict[str, float]:
    """Seconds of one layer by part: median over runs, mean over layers and ranks. Collective."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    shapes = ((ranks * sizes.experts_per_rank, sizes.hidden), *sizes.shapes(sizes.experts_per_rank))
    weights = [
        [torch.randn(shape, dtype=sizes.dtype, device=device) * shape[-1] ** -0.5 for shape in shapes]
        for _ in range(sizes.layers)
    ]
    step = PlannedMicroStep(sizes, "peer" if ranks > 1 else "host", weights)
    hidden, target = torch.randn(2, sizes.tokens_per_rank, sizes.hidden, device=device).to(sizes.dtype)
    runs = [_seconds_by_part(step, hidden, target) for _ in range(RUNS + 1)]
    step.session.close()
    # The first compiles kernels and connects ranks.
    taken = torch.tensor([statistics.median(column) for column in zip(*runs[1:], strict=True)], dtype=torch.float64)
    dist.all_reduce(taken, group=step.session.topology.control)
    per_layer = (taken / ranks / sizes.layers).tolist()
    return {part: taken_s for part, taken_s in zip(ACTIVITIES[: WAITING + 1], per_layer, strict=True) if taken_s > 0}


def _seconds_by_part(step: PlannedMicroStep, hidden: torch.Tensor, target: torch.Tensor) -> list[float]:
    """Seconds of each activity up to `WAITING`, of forward and backward of all layers on this rank."""
    with step.session.micro_step(0):
        dist.barrier(group=step.session.topology.control)
        with step.session.recording() as recorder:
            step.forward_backward(hidden, target)
            recording = recorder.finish()
    durations_N = recording.end_N - recording.start_N
    return np.bincount(recording.kind_N, weights=durations_N, minlength=len(ACTIVITIES))[: WAITING + 1].tolist()
