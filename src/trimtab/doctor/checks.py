"""What stands in the way of a run: the installation, the machine, a model's config, and one micro-step.

Needs no torch: without it only planning is available, which is then said.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.errors import InputError
from trimtab.planner import Placement, Workload, pack_by_length, plan_step
from trimtab.trace import synthesize

Status = Literal["ok", "warning", "problem"]

# `Session`'s own default.
RING_LAYERS = 3
# Relative, in float64.
TOLERANCE = 1e-12
LITTLE_SHARED_MEMORY = 1 << 30


@dataclass(frozen=True)
class Finding:
    """What one check came to.

    Attributes:
        name: what was looked at.
        status: `ok`; `warning`, a run works but something is missing or slow; `problem`, a run would fail.
        text: one line, what was found, and unless it is ok what to do.
    """

    name: str
    status: Status
    text: str


def examine(
    *, ranks: int, local_ranks: int, slots: int, model: ModelSpec | None, num_layers: int | None
) -> list[Finding]:
    """Look at everything.

    Args:
        ranks: of the run.
        local_ranks: those on this machine.
        slots: replicas of one layer that a rank has room for.
        model: to look at as well, if any.
        num_layers: of the model, if its config says.
    """
    torch, about_torch = find_torch()
    findings = [
        Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        check_packages("planning packages", None),
        check_kernels(),
        about_torch,
    ]
    if torch is not None:
        findings += [
            check_packages("training packages", "train"),
            check_backend(torch, local_ranks),
            check_processors(local_ranks),
            check_allocator(),
            check_shared_memory(),
        ]
    if model is not None:
        findings += check_model(model, num_layers, ranks=ranks, slots=slots, trains=torch is not None)
    if torch is not None:
        findings += check_micro_step(torch, ranks, local_ranks)
    return findings


def find_torch() -> tuple[ModuleType | None, Finding]:
    """torch, if it can be imported, and what to say of it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            text = "not installed: only planning is available; to train, pip install 'trimtab[train]'"
            return None, Finding("torch", "warning", text)
        return None, Finding("torch", "problem", f"can't be imported ({_first_line(error)}); install it anew")
    except (ImportError, OSError) as error:
        return None, Finding("torch", "problem", f"can't be imported ({_first_line(error)}); install it anew")
    return torch, Finding("torch", "ok", torch.__version__)


def check_packages(name: str, extra: str | None) -> Finding:
    """Are the packages there that trimtab, or an extra of it, asks for, new enough?"""
    try:
        requirements = [text for text in importlib.metadata.requires("trimtab") or [] if _extra_of(text) == extra]
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "warning", "trimtab is not installed, so versions are not known; pip install .")
    install = "trimtab" if extra is None else f"trimtab[{extra}]"
    found, wrong = [], []
    for requirement in requirements:
        match = re.match(r"([\w.-]+?)\s*>=\s*([\d.]+)", requirement)
        package, least = (match[1], match[2]) if match else (re.split(r"[\s;<>=]", requirement)[0], "0")
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{package} is missing")
            continue
        found.append(f"{package} {version}")
        if _numbers(version) < _numbers(least):
            wrong.append(f"{package} {version} is older than {least}")
    if wrong:
        return Finding(name, "problem", f"{', '.join(wrong)}; pip install --upgrade '{install}'")
    return Finding(name, "ok", ", ".join(found))


def _extra_of(requirement: str) -> str | None:
    """The extra that a line such as `torch>=2.10; extra == 'train'` belongs to."""
    match = re.search(r"""extra == ["'](\w+)""", requirement)
    return match[1] if match else None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: (2, 10, 0) of `2.10.0+cpu`."""
    parts = re.split(r"[^\d.]", version)[0].split(".")
    return tuple(int(part) for part in parts if part)


def check_kernels() -> Finding:
    """Do the compiled kernels compile, and plan something?"""
    start = time.perf_counter()
    try:
        trace = synthesize(num_sequences=8, sequence_length=64, num_layers=2, num_experts=16, top_k=2, zipf=1.0)
        schedule = pack_by_length(trace.sequence_lengths, num_ranks=4, token_budget=128)
        workload = Workload.from_trace(trace, schedule)
        plan = plan_step(workload, schedule, Placement.contiguous(2, 16, 4), ClusterSpec(4, 4))
        plan.check(workload)
    except Exception as error:
        return Finding("planning kernels", "problem", f"{_first_line(error)}; install numba anew, or another version")
    return Finding("planning kernels", "ok", f"compiled and ran in {time.perf_counter() - start:.1f} s")


def check_backend(torch: Any, local_ranks: int) -> Finding:
    """Can ranks talk to one another, on the devices that there are?"""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("backend", "problem", "this torch has no gloo, which every run needs; install another build")
    if not torch.cuda.is_available():
        return Finding("backend", "ok", "gloo; no CUDA device, so ranks compute on the CPU")
    devices = torch.cuda.device_count()
    if not dist.is_nccl_available():
        return Finding("backend", "problem", "this torch has CUDA but no NCCL; install another build")
    if devices < local_ranks:
        text = f"{local_ranks} local ranks need a CUDA device each, and there are {devices}; use --ranks {devices}, or "
        return Finding("backend", "problem", text + "set CUDA_VISIBLE_DEVICES= to compute on the CPU")
    return Finding("backend", "ok", f"NCCL and gloo; {devices} x {torch.cuda.get_device_name(0)}")


def check_processors(local_ranks: int) -> Finding:
    """Is there a core for every rank?"""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < local_ranks:
        text = f"{local_ranks} local ranks share {cores} cores and wait for one another; use fewer ranks or more cores"
        return Finding("processors", "warning", text)
    return Finding("processors", "ok", f"{cores} cores for {local_ranks} local ranks")


def check_allocator() -> Finding:
    """Do freed tensors stay with the process? Ranks that trimtab starts see to it; torchrun has to be told."""
    from trimtab.launch.launcher import ALLOCATOR, torchrun_ranks

    if torchrun_ranks() is None:
        return Finding("allocator", "ok", "trimtab sets it for the ranks that it starts")
    for name, settings in ALLOCATOR.items():
        if not set(settings.split(":")) <= set(os.environ.get(name, "").split(":")):
            text = f"freed memory goes back to the system and is faulted in anew; torchrun wants {name}={settings}"
            return Finding("allocator", "warning", text)
    return Finding("allocator", "ok", "set for these ranks")


def check_shared_memory() -> Finding:
    """Do processes see each other's writes to shared memory, and has it room?"""
    from trimtab.runtime.transfer.mirror import SHARED_MEMORY

    name = "shared memory"
    if not SHARED_MEMORY.is_dir():
        return Finding(name, "problem", f"there is no {SHARED_MEMORY}; mount a tmpfs there, or use Linux")
    program = "import sys; file = open(sys.argv[1], 'r+b'); file.write(b'trimtab'); file.close()"
    try:
        with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix="trimtab-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
                subprocess.run([sys.executable, "-c", program, file.name], check=True, capture_output=True)
                shared = memory[:7] == b"trimtab"
    except (OSError, subprocess.CalledProcessError) as error:
        return Finding(
            name, "problem", f"{SHARED_MEMORY} can't be used ({_first_line(error)}); check its rights and room"
        )
    if not shared:
        return Finding(
            name, "problem", f"processes don't see each other's writes to {SHARED_MEMORY}; use a tmpfs there"
        )
    free = _free_shared_memory()
    if free < LITTLE_SHARED_MEMORY:
        text = f"{SHARED_MEMORY} has {_size(free)} free to mirror experts; enlarge it (--shm-size), or set mirror_bytes"
        return Finding(name, "warning", text)
    return Finding(name, "ok", f"{SHARED_MEMORY} works, {_size(free)} free")


def _free_shared_memory() -> int:
    from trimtab.runtime.transfer.mirror import SHARED_MEMORY

    state = os.statvfs(SHARED_MEMORY)
    return state.f_bavail * state.f_frsize


def check_model(model: ModelSpec, num_layers: int | None, *, ranks: int, slots: int, trains: bool) -> list[Finding]:
    """Can this model be trained on so many ranks, and what memory do replicas take?"""
    findings = []
    if trains:
        from trimtab.integrations.transformers import SUPPORTED_MODEL_TYPES

        if model.name in SUPPORTED_MODEL_TYPES:
            findings.append(Finding("model family", "ok", f"{model.name} is supported"))
        else:
            text = (
                f"{model.name!r} is not among {', '.join(SUPPORTED_MODEL_TYPES)}; add its layers to a Session yourself"
            )
            findings.append(Finding("model family", "problem", text))
    try:
        Placement.contiguous(1, model.num_experts, ranks)
    except InputError as error:
        return [*findings, Finding("experts", "problem", str(error))]
    here = f"{model.num_experts // ranks} of {model.num_experts} experts a rank"
    size = f"{_size(model.expert_bytes)} each at {model.weight_bytes} bytes a weight"
    findings.append(Finding("experts", "ok", f"{here}, {size}"))
    pool = RING_LAYERS * slots * model.expert_bytes
    text = f"{_size(pool)} a rank for {slots} slots in {RING_LAYERS} layers"
    if num_layers is None:
        return [*findings, Finding("replica memory", "ok", text)]
    mirror = num_layers * model.num_experts * model.expert_bytes
    text += f"; mirror at most {_size(mirror)} of a node, if every expert takes the host path"
    if trains and (free := _free_shared_memory()) < mirror:
        text += f", and shared memory has {_size(free)} free: set mirror_bytes below that, or enlarge it"
        return [*findings, Finding("replica memory", "warning", text)]
    return [*findings, Finding("replica memory", "ok", text)]


def check_micro_step(torch: Any, ranks: int, local_ranks: int) -> list[Finding]:
    """Does one micro-step with replicas give the loss and the gradients of a single process?"""
    from trimtab.doctor.self_check import check_micro_step

    name = "micro-step"
    if torch.cuda.is_available() and torch.cuda.device_count() < local_ranks:
        return [Finding(name, "warning", "not run, for want of CUDA devices; see backend")]
    try:
        checks = check_micro_step(ranks)
    except Exception as error:
        return [Finding(name, "problem", f"{_first_line(error)}; a run on {ranks} ranks would fail alike")]
    findings = []
    for check in checks:
        text = f"{check.replicas} replicas over the {check.path} path on {ranks} ranks: loss and gradients "
        if check.error < TOLERANCE:
            findings.append(Finding(name, "ok", text + f"equal a single process to {check.error:.0e}"))
        else:
            text += f"are off by {check.error:.0e}, where {TOLERANCE:.0e} is allowed; do not train on this machine"
            findings.append(Finding(name, "problem", text))
    return findings


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
