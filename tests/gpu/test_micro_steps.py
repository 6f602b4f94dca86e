"""Stages `equality`, `sanitizer`, `synchronisation` and `layer`: results, waits and times of planned micro-steps."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from experiments.gpu_tables import estimate_layer
from helpers.random_pauses import random_pauses
from trimtab.calibration.measurement import this_device
from trimtab.cluster import QWEN3_30B, ModelSpec
from trimtab.doctor.finding import Finding
from trimtab.doctor.gpu_stages import SIZES, check_equality, cluster_here
from trimtab.doctor.planned_micro_step import PATHS, PlannedMicroStep, StepSizes
from trimtab.report.number_text import seconds
from trimtab.runtime.ranks.recorder import ACTIVITIES, WAITING
from trimtab.runtime.session_settings import Paths

Run = Callable[..., None]
CPU_SIZES = StepSizes(hidden=256, width=64, tokens_per_rank=64)


def test_results_are_those_of_one_process(run: Run) -> None:
    run("equality", check_with_pauses)


def test_streams_do_not_race(run: Run) -> None:
    if not torch.cuda.is_available():
        pytest.skip("the sanitizer is for CUDA")
    run("sanitizer", check_under_sanitizer)


def test_the_host_does_not_wait(run: Run) -> None:
    run("synchronisation", check_synchronisation)


def test_layers_take_what_is_estimated(run: Run) -> None:
    run("layer", check_layer)


def check_with_pauses() -> list[Finding]:
    """Compare bfloat16 and float32 on each path, with random pauses of compute and copies."""
    with random_pauses(dist.get_rank()):
        return check_equality(SIZES if torch.cuda.is_available() else CPU_SIZES)


def check_under_sanitizer() -> list[Finding]:
    """Compare bfloat16 on each path under torch's CUDA sanitizer, which raises if streams race for a tensor.

    It knows accesses of torch's operations; not those of NCCL, nor of one GPU to another's memory.
    """
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    enable_cuda_sanitizer()
    return check_equality(dtypes=(torch.bfloat16,))


def check_synchronisation() -> list[Finding]:
    """Run forward and backward of planned layers on each path, where waiting is an error."""
    sizes = StepSizes(hidden=64, width=32, dtype=torch.bfloat16)
    findings: list[Finding] = []
    for path in PATHS if dist.get_world_size() > 1 else ("host",):
        step, hidden, target = _random_step(sizes, path)
        # Communicators and memory are made in the first run.
        step.run(hidden, target)
        _react_to_waits("error")
        try:
            with step.session.micro_step(0):
                step.forward_backward(hidden, target)
        except RuntimeError as error:
            # A rank that stopped leaves others in the middle of a layer.
            text = f"the host waits in every planned layer: {_place_of(error)}"
            return [*findings, Finding(f"{path} path", "problem", text)]
        finally:
            _react_to_waits("default")
        findings.append(Finding(f"{path} path", "ok", "no wait in forward and backward"))
        step.session.close()
    return findings


def _react_to_waits(mode: str) -> None:
    """What torch does when the host waits for the device. Nothing on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)


def _place_of(error: RuntimeError) -> str:
    """The innermost line outside of torch, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    place = [frame for frame in frames if not frame.filename.startswith(str(Path(torch.__file__).parent))][-1]
    return f"{Path(place.filename).name}:{place.lineno}: {str(error).splitlines()[0]}"


def _random_step(sizes: StepSizes, path: Paths) -> tuple[PlannedMicroStep, torch.Tensor, torch.Tensor]:
    """A micro-step of random weights, and tokens and gradients `[n, hidden]` of this rank."""
    device, ranks = this_device(), dist.get_world_size()
    torch.manual_seed(0)
    shapes = ((ranks * sizes.experts_per_rank, sizes.hidden), *sizes.shapes(sizes.experts_per_rank))
    weights = [
        [torch.randn(shape, dtype=sizes.dtype, device=device) * shape[-1] ** -0.5 for shape in shapes]
        for _ in range(sizes.layers)
    ]
    hidden, target = torch.randn(2, sizes.tokens_per_rank, sizes.hidden, device=device).to(sizes.dtype)
    return PlannedMicroStep(sizes, path, weights), hidden, target


RUNS = 5
# A layer that takes longer than its estimate times this is a warning.
MOST = 2.0


def check_layer() -> list[Finding]:
    """Time forward and backward of planned layers with even routing, and one replica on each rank."""
    ranks, on_cuda = dist.get_world_size(), torch.cuda.is_available()
    model = QWEN3_30B if on_cuda else ModelSpec("doctor", 8, 4, hidden_size=64, expert_width=32, weight_bytes=4)
    # Some numbers of GPUs do not divide the experts.
    experts_per_rank = max(model.num_experts // ranks, model.top_k // ranks + 1)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    cluster = cluster_here(ranks)
    findings = []
    for tokens in (4096, 8192) if on_cuda else (256, 512):
        sizes = StepSizes(4, experts_per_rank, model.top_k, model.hidden_size, model.expert_width, tokens, 0.0, dtype)
        expected = {} if cluster is None else estimate_layer(cluster, model, tokens)
        findings.append(describe_layer(f"{tokens:,} tokens", measure_layer(sizes), expected))
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
    total, estimate = sum(measured[part] for part in expected), sum(expected.values())
    if expected:
        texts.append(f"together {seconds(total)} (estimate {seconds(estimate)})")
    return Finding(name, "ok" if total <= MOST * estimate else "warning", "; ".join(texts))


def measure_layer(sizes: StepSizes) -> dict[str, float]:
    """Seconds of one layer by part: median over runs, mean over layers and ranks. Collective."""
    ranks = dist.get_world_size()
    step, hidden, target = _random_step(sizes, "peer" if ranks > 1 else "host")
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
