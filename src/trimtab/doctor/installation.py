"""Checks of the installation: torch, package versions, compiled kernels."""

from __future__ import annotations

import importlib.metadata
import re
import time
from types import ModuleType

from trimtab.cluster import ClusterSpec
from trimtab.doctor.finding import Finding, first_line
from trimtab.planner import Placement, Workload, pack_by_length, plan_step
from trimtab.trace import synthesize


def find_torch() -> tuple[ModuleType | None, Finding]:
    """torch, None if it can't be imported, and the finding about it."""
    try:
        import torch
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            text = "not installed: only planning is available; to train, pip install 'trimtab[train]'"
            return None, Finding("torch", "warning", text)
        return None, Finding("torch", "problem", f"can't be imported ({first_line(error)}); reinstall it")
    return torch, Finding("torch", "ok", torch.__version__)


def check_packages(name: str, extra: str | None) -> Finding:
    """Check that the packages required by trimtab, or by an extra of it, are installed in the required versions."""
    try:
        requirements = [text for text in importlib.metadata.requires("trimtab") or [] if _extra_of(text) == extra]
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "warning", "trimtab is not installed, so its requirements are unknown; pip install .")
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
