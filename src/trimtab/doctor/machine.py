"""Checks of the machine: communication backend and its variables, processors, memory allocator, shared memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from trimtab.cores import usable_cores
from trimtab.doctor.finding import Finding, first_line
from trimtab.rank_variables import torchrun_ranks
from trimtab.report.number_text import bytes_text

# Less free shared memory than this is a warning, in bytes.
LITTLE_SHARED_MEMORY = 1 << 30


def check_backend(torch: Any, local_ranks: int) -> Finding:
    """Check that torch has the backends that the ranks on this machine need."""
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
    """Check that every rank on this machine has a core."""
    cores = usable_cores()
    if cores < local_ranks:
        text = f"{local_ranks} local ranks share {cores} cores and delay one another; use fewer ranks or more cores"
        return Finding("processors", "warning", text)
    return Finding("processors", "ok", f"{cores} cores for {local_ranks} local ranks")


def check_allocator() -> Finding:
    """Check that the allocator keeps freed memory. Ranks that trimtab starts do; torchrun needs the variable."""
    from trimtab.launch.launcher import ALLOCATOR

    if torchrun_ranks() is None:
        return Finding("allocator", "ok", "trimtab sets it for the ranks that it starts")
    for name, settings in ALLOCATOR.items():
        if not set(settings.split(":")) <= set(os.environ.get(name, "").split(":")):
            text = f"freed memory is returned to the system, which is slow; with torchrun, set {name}={settings}"
            return Finding("allocator", "warning", text)
    return Finding("allocator", "ok", "set for these ranks")


def check_gpu_variables(torch: Any) -> list[Finding]:
    """Check NCCL's version and the variables that transfers need on GPUs; no finding without CUDA."""
    from trimtab.launch.launcher import LAUNCH_ORDER

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return []
    # Ranks that trimtab starts have these.
    set_here = {} if torchrun_ranks() else LAUNCH_ORDER
    return describe_gpu_variables(torch.cuda.nccl.version(), set_here | os.environ)


def describe_gpu_variables(nccl: tuple[int, ...], variables: Mapping[str, str]) -> list[Finding]:
    """Findings about the environment of a process with GPUs: one for each mistake, or one if there is none.

    Args:
        nccl: version of NCCL.
    """
    from trimtab.runtime.ranks.process_groups import wrong_variables

    name = "GPU variables"
    wrong = wrong_variables(nccl, variables)
    if not wrong:
        return [Finding(name, "ok", f"NCCL {'.'.join(map(str, nccl))} orders its communicators")]
    # Only this one costs time; with the others a run may hang.
    slow = "CUDA_DEVICE_MAX_CONNECTIONS"
    return [Finding(name, "warning" if text.startswith(slow) else "problem", text) for text in wrong]


def check_shared_memory() -> Finding:
    """Check that processes see each other's writes to shared memory, and that it has room."""
    from trimtab.shared_files import SHARED_MEMORY, free_shared_memory

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
            name, "problem", f"{SHARED_MEMORY} can't be used ({first_line(error)}); check its rights and room"
        )
    if not shared:
        return Finding(
            name, "problem", f"processes don't see each other's writes to {SHARED_MEMORY}; use a tmpfs there"
        )
    free = free_shared_memory()
    if free < LITTLE_SHARED_MEMORY:
        text = f"{SHARED_MEMORY} has {bytes_text(free)} free for mirrors; enlarge it (--shm-size), or set mirror_bytes"
        return Finding(name, "warning", text)
    return Finding(name, "ok", f"{SHARED_MEMORY} works, {bytes_text(free)} free")


def versions() -> dict[str, str]:
    """The GPU, and the versions of what runs on it; what is missing is left out."""
    import torch

    found = {"torch": str(torch.__version__)}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for package in ("megatron-core", "transformer-engine", "deep-ep"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
