"""`examine_gpus`: all stages of `trimtab doctor --gpu`, one after another, and `verdict` on what they found."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import track

from trimtab.doctor.finding import Finding
from trimtab.doctor.gpu.environment_stage import check_environment
from trimtab.doctor.gpu.micro_step_stages import (
    check_equality,
    check_layer,
    check_synchronisation,
    check_under_sanitizer,
)
from trimtab.doctor.gpu.stage_process import Stage, StageResult, run_stage
from trimtab.doctor.gpu.transfer_stages import check_bandwidth, check_mirror, check_rewriting, check_soak
from trimtab.errors import InputError
from trimtab.rank_variables import SHARE_GPUS, can_share_gpus

GO, NO_GO, WITH_LIMITS = 0, 1, 3


def verdict(results: Sequence[StageResult]) -> tuple[str, int]:
    """The line that names the first problem, else the first warning; and the exit status, 0, 3 or 1."""
    for status, word, exit_status in (("problem", "NO GO", NO_GO), ("warning", "GO WITH LIMITS", WITH_LIMITS)):
        for result in results:
            for finding in result.findings:
                if finding.status == status:
                    return f"{word}: {result.name}, {finding.name}: {finding.text}", exit_status
    return "GO", GO


STAGES = (
    # Also compiles kernels, once per installation.
    Stage("environment", check_environment, 120),
    Stage("bandwidth", check_bandwidth, 60),
    Stage("rewriting", check_rewriting, 60),
    Stage("equality", check_equality, 90),
    Stage("sanitizer", check_under_sanitizer, 60),
    Stage("synchronisation", check_synchronisation, 60),
    Stage("soak", check_soak, 60),
    Stage("mirror", check_mirror, 60),
    Stage("layer", check_layer, 90),
)
# All stages together; a stage gets what is left.
BUDGET_S = 290.0


def _check_megatron() -> list[Finding]:
    from trimtab.doctor.gpu.megatron_stage import check_megatron

    return check_megatron()


# What `--full` adds, with its own time.
MEGATRON = Stage("megatron", _check_megatron, 600)
CPU_RANKS = 2

log = logging.getLogger("trimtab")


@dataclass(frozen=True)
class GpuExamination:
    """Results of all stages.

    Attributes:
        ranks: that ran.
        gpus: whether each had a GPU; else the stages ran on the CPU.
        results: in the order of the stages.
    """

    ranks: int
    gpus: bool
    results: tuple[StageResult, ...]


def examine_gpus(ranks: int | None, stages: Sequence[Stage] = STAGES, *, full: bool = False) -> GpuExamination:
    """Run all stages on local ranks, each on a GPU of its own, or on the CPU if there is no GPU.

    Args:
        ranks: all GPUs by default, or 2 on a CPU.
        full: also time Megatron-core's layers beside planned ones, in 10 minutes more.

    Raises:
        InputError: if there are fewer GPUs than ranks and NCCL does not let them share, or one rank on a CPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = ranks or gpus or CPU_RANKS
    if gpus and ranks > gpus and not can_share_gpus():
        raise InputError(
            f"--ranks is {ranks}; every rank needs a GPU of its own, and there are {gpus} (ranks that share one can be "
            f"checked, but not timed, with NCCL 2.30 and {SHARE_GPUS}=1)"
        )
    if not gpus and ranks < 2:
        raise InputError(f"--ranks is {ranks}; without a GPU, experts are shared by 2 or more")
    folder = Path(tempfile.mkdtemp(prefix="trimtab-doctor-"))
    start = time.monotonic()
    results = []
    try:
        for stage in track([*stages, *([MEGATRON] if full else [])], "doctor --gpu", transient=True):
            left_s = BUDGET_S - (time.monotonic() - start)
            results.append(_run(stage, ranks, folder, MEGATRON.timeout_s if stage is MEGATRON else left_s))
            log.info("%s: %s after %.1f s", stage.name, results[-1].status, results[-1].seconds)
    finally:
        # It stays if it holds the dump of a stage.
        if not any(folder.glob("*.txt")):
            shutil.rmtree(folder)
    return GpuExamination(ranks, bool(gpus), tuple(results))


def _run(stage: Stage, ranks: int, folder: Path, left_s: float) -> StageResult:
    if left_s < 1:
        text = f"not run: the stages before it took {BUDGET_S:.0f} s"
        return StageResult(stage.name, (Finding("time", "problem", text),), 0.0)
    return run_stage(replace(stage, timeout_s=min(stage.timeout_s, left_s)), ranks, folder)
