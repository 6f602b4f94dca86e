"""Check of replicas: one micro-step on each path gives the loss and gradients of a single process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.doctor.finding import Finding, first_line
from trimtab.report.number_text import plural

if TYPE_CHECKING:
    from trimtab.doctor.self_check import PathCheck


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
