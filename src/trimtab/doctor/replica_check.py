"""Check of replicas: one micro-step on each path gives the loss and gradients of a single process."""

from __future__ import annotations

from typing import Any

from trimtab.doctor.finding import Finding, first_line

# Largest relative error of loss and gradients, in float64.
TOLERANCE = 1e-12


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
    findings = []
    for check in checks:
        text = f"{check.replicas} replicas over the {check.path} path on {ranks} ranks: loss and gradients "
        if check.error < TOLERANCE:
            findings.append(Finding(name, "ok", text + f"equal a single process to {check.error:.0e}"))
        else:
            text += f"are off by {check.error:.0e}, where {TOLERANCE:.0e} is allowed; do not train on this machine"
            findings.append(Finding(name, "problem", text))
    return findings
