"""`examine`: all checks of `trimtab doctor`: installation, machine, model, and one micro-step with replicas."""

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
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.cluster.specs import RING_LAYERS
from trimtab.cores import usable_cores
from trimtab.doctor.finding import Finding, first_line
from trimtab.errors import InputError, install
from trimtab.figures import plural
from trimtab.planner import Placement, Workload, pack_by_length, plan_step
from trimtab.rank_variables import torchrun_ranks
from trimtab.report.number_text import bytes_text
from trimtab.trace import synthesize

if TYPE_CHECKING:
    from trimtab.doctor.self_check import PathCheck


def find_torch() -> tuple[ModuleType | None, Finding]:
    """torch, None if it can't be imported, and the finding about it."""
    try:
        import torch
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            text = "not installed: only planning is available; to train, " + install("train")
            return None, Finding("torch", "warning", text)
        return None, Finding("torch", "problem", f"can't be imported ({first_line(error)}); reinstall it")
    return torch, Finding("torch", "ok", torch.__version__)


def check_packages(name: str, extra: str | None) -> Finding:
    """Check that the packages required by trimtab, or by an extra of it, are installed in the required versions."""
    try:
        requirements = [text for text in importlib.metadata.requires("trimtab") or [] if _extra_of(text) == extra]
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "warning", "trimtab is not installed, so its requirements are unknown; " + install(None))
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
        return Finding(name, "problem", f"{', '.join(wrong)}; {install(extra)}")
    return Finding(name, "ok", ", ".join(found))


def _extra_of(requirement: str) -> str | None:
    """The extra that a line such as `torch>=2.10; extra == 'train'` belongs to."""
    match = re.search(r"""extra == ["'](\w+)""", requirement)
    return match[1] if match else None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 10, 0) for `2.10.0+cpu`."""
    parts = re.split(r"[^\d.]", version)[0].split(".")
    return tuple(int(part) for part in parts if part)


def check_kernels() -> Finding:
    """Check that the compiled kernels compile, by planning one step."""
    start = time.perf_counter()
    try:
        trace = synthesize(num_sequences=8, sequence_length=64, num_layers=2, num_experts=16, top_k=2, zipf=1.0)
        schedule = pack_by_length(trace.sequence_lengths, num_ranks=4, token_budget=128)
        workload = Workload.from_trace(trace, schedule)
        plan = plan_step(workload, schedule, Placement.contiguous(2, 16, 4), ClusterSpec(4, 4))
        plan.check(workload)
    except Exception as error:
        return Finding("planning kernels", "problem", f"{first_line(error)}; reinstall numba, or use another version")
    return Finding("planning kernels", "ok", f"compiled and ran in {time.perf_counter() - start:.1f} s")


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


def check_model(model: ModelSpec, num_layers: int | None, *, ranks: int, slots: int, trains: bool) -> list[Finding]:
    """Check that a model can be trained on this number of ranks, and report the memory of replicas; see `examine`.

    Args:
        trains: torch is installed; without it the model's family and shared memory are not checked.
    """
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
    size = f"{bytes_text(model.expert_bytes)} each at {model.weight_bytes} bytes a weight"
    findings.append(Finding("experts", "ok", f"{here}, {size}"))
    pool = RING_LAYERS * slots * model.expert_bytes
    text = f"{bytes_text(pool)} a rank for {slots} slots in {RING_LAYERS} layers"
    if num_layers is None:
        return [*findings, Finding("replica memory", "ok", text)]
    mirror = num_layers * model.num_experts * model.expert_bytes
    text += f"; mirror at most {bytes_text(mirror)} per node, if every expert uses the host path"
    if trains:
        from trimtab.shared_files import free_shared_memory

        if (free := free_shared_memory()) < mirror:
            text += f", and shared memory has {bytes_text(free)} free: set mirror_bytes below that, or enlarge it"
            return [*findings, Finding("replica memory", "warning", text)]
    return [*findings, Finding("replica memory", "ok", text)]


def check_replicas(torch: Any, ranks: int, local_ranks: int) -> list[Finding]:
    """Check one micro-step with replicas on every path; see `self_check.py`."""
    from trimtab.doctor.self_check import check_paths

    name = "micro-step"
    if torch.cuda.is_available() and torch.cuda.device_count() < local_ranks:
        return [Finding(name, "warning", "not run, too few CUDA devices; see backend")]
    try:
        checks = check_paths(ranks)
    except Exception as error:
        return [Finding(name, "problem", f"{first_line(error)}; a run on {ranks} ranks would fail too")]
    return [describe_check(name, check, ranks) for check in checks]


def describe_check(name: str, check: PathCheck, ranks: int) -> Finding:
    """The finding about a micro-step that was compared with a single process."""
    where = f"over the {check.path} path on {plural(ranks, 'rank')}"
    text = f"{check.replicas} replicas {where}, {check.dtype}: loss and gradients "
    if check.is_equal:
        return Finding(name, "ok", text + f"equal a single process to {check.error:.0e}")
    text += f"are off by {check.error:.0e}, where {check.allowed:.0e} is allowed; do not train on this machine"
    return Finding(name, "problem", text)


def examine(
    *, ranks: int, local_ranks: int, slots: int, model: ModelSpec | None, num_layers: int | None
) -> list[Finding]:
    """Run all checks that the installation allows.

    Args:
        ranks: ranks of the run.
        local_ranks: ranks of the run on this machine.
        slots: replicas of one layer that a rank has room for.
        model: sizes of the model to check; None for no model.
        num_layers: MoE layers of the model; None if its config does not say.
    """
    torch, torch_finding = find_torch()
    findings = [
        Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        check_packages("planning packages", None),
        check_kernels(),
        torch_finding,
    ]
    if torch is not None:
        findings += [
            check_packages("training packages", "train"),
            check_backend(torch, local_ranks),
            *check_gpu_variables(torch),
            check_processors(local_ranks),
            check_allocator(),
            check_shared_memory(),
        ]
    if model is not None:
        findings += check_model(model, num_layers, ranks=ranks, slots=slots, trains=torch is not None)
    if torch is not None:
        findings += check_replicas(torch, ranks, local_ranks)
    return findings
