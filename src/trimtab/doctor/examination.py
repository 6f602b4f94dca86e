"""`examine`: all checks of `trimtab doctor`, in the order in which they are reported."""

from __future__ import annotations

import platform

from trimtab.cluster import ModelSpec
from trimtab.doctor.finding import Finding
from trimtab.doctor.installation import check_kernels, check_packages, find_torch
from trimtab.doctor.machine import (
    check_allocator,
    check_backend,
    check_gpu_variables,
    check_processors,
    check_shared_memory,
)
from trimtab.doctor.model_check import check_model
from trimtab.doctor.replica_check import check_replicas


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
