"""`examine_gpus`: the stages of `trimtab doctor --gpu` on all GPUs of this machine; `run_stage`, which runs any stage.

Each stage runs on ranks of its own. A hang or a crash is a finding; the stacks of all ranks are then printed.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trimtab.doctor.examination import versions
from trimtab.doctor.finding import Finding
from trimtab.doctor.gpu_environment import check_environment
from trimtab.doctor.gpu_stages import check_bandwidth, check_equality
from trimtab.errors import InputError, RankFailedError
from trimtab.launch import launch
from trimtab.rank_variables import SHARE_GPUS, can_share_gpus

GO, NO_GO, WITH_LIMITS = 0, 1, 3
Check = Callable[[], list[Finding]]
STAGES: dict[str, Check] = {
    "environment": check_environment, "bandwidth": check_bandwidth, "equality": check_equality,
}  # fmt: skip
# A stage that takes longer hangs.
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class StageResult:
    """What a stage found.

    Attributes:
        name: of the stage.
        findings: at least one.
        seconds: that it took.
    """

    name: str
    findings: tuple[Finding, ...]
    seconds: float


def examine_gpus(ranks: int | None) -> dict[str, Any]:
    """The figures of all stages on local ranks, each with a GPU of its own; see `figures_of`.

    Args:
        ranks: all GPUs by default.

    Raises:
        InputError: if there is no GPU, or there are fewer than ranks and NCCL does not let them share.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        raise InputError("--gpu needs a GPU, and torch finds none; without it, trimtab doctor checks the CPU")
    ranks = ranks or gpus
    if ranks > gpus and not can_share_gpus():
        raise InputError(
            f"--ranks is {ranks}; every rank needs a GPU of its own, and there are {gpus} (ranks that share one can be "
            f"checked, but not timed, with NCCL 2.30 and {SHARE_GPUS}=1)"
        )
    return figures_of([run_stage(name, check, ranks) for name, check in STAGES.items()], ranks)


def figures_of(results: Sequence[StageResult], ranks: int) -> dict[str, Any]:
    """Results for JSON, with the verdict on them."""
    line, status = verdict(results)
    return {
        "schema": "trimtab-doctor-gpu-1", "versions": versions(), "ranks": ranks, "gpus": torch.cuda.is_available(),
        "verdict": line, "status": status, "stages": [asdict(result) for result in results],
    }  # fmt: skip


def verdict(results: Sequence[StageResult]) -> tuple[str, int]:
    """The line that names the first problem, else the first warning; and the exit status, 0, 3 or 1."""
    for status, word, exit_status in (("problem", "NO GO", NO_GO), ("warning", "GO WITH LIMITS", WITH_LIMITS)):
        for result in results:
            for finding in result.findings:
                if finding.status == status:
                    return f"{word}: {result.name}, {finding.name}: {finding.text}", exit_status
    return "GO", GO


def run_stage(name: str, check: Check, ranks: int, timeout_s: float = TIMEOUT_S) -> StageResult:
    """Run a stage on local ranks.

    Args:
        check: called on every rank, with the default process group ready; returns the findings of this rank. It can be
            pickled.
        timeout_s: seconds after which it hangs.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trimtab-doctor-") as folder:
        files, failure = Path(folder), ""
        try:
            launch(_on_rank, (check, files, timeout_s), ranks=ranks)
        except (InputError, RankFailedError) as error:
            failure = str(error)
        seconds = time.monotonic() - start
        findings = merge([_read_findings(files / f"findings-{rank}.json") for rank in range(ranks)])
        if not failure:
            return StageResult(name, tuple(findings), seconds)
        stacks = {path.stem: path.read_text() for path in sorted(files.glob("rank *"))}
    for rank, text in stacks.items():
        sys.stderr.write(f"---- {rank}, stage {name}\n{text}\n")
    has_hung = any(text.startswith("Timeout") for text in stacks.values())
    text = f"no result after {timeout_s:.0f} s; the stacks of all ranks are printed" if has_hung else failure
    # What a rank found before it ended may be why others did not.
    causes = [finding for finding in findings if finding.status == "problem"]
    return StageResult(name, (*causes, Finding("hang" if has_hung else "crash", "problem", text)), seconds)


def _on_rank(check: Check, files: Path, timeout_s: float) -> None:
    """Run a stage on this rank, and write its findings. Warnings that Trimtab logs are findings, too."""
    rank = dist.get_rank()
    stacks = (files / f"rank {rank}").open("w")
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stacks)
    logged = BufferingHandler(capacity=1000)
    logged.setLevel(logging.WARNING)
    logging.getLogger("trimtab").addHandler(logged)
    findings = check() + [Finding("log", "warning", record.getMessage()) for record in logged.buffer]
    (files / f"findings-{rank}.json").write_text(json.dumps([asdict(finding) for finding in findings]))
    faulthandler.cancel_dump_traceback_later()


def _read_findings(path: Path) -> list[Finding]:
    """None if the rank has not written them."""
    return [] if not path.exists() else [Finding(**finding) for finding in json.loads(path.read_text())]


def merge(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """The findings of all ranks: those of the first, and warnings and problems of others.

    Where ranks differ in a check, its warnings and problems name their ranks.
    """
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            if rank == 0 or finding.status != "ok":
                ranks_of.setdefault(finding, []).append(rank)
    merged = []
    for finding, ranks in ranks_of.items():
        checked = [rank for rank, findings in enumerate(by_rank) if finding.name in {each.name for each in findings}]
        # Some checks are of the first rank only.
        if finding.status != "ok" and (ranks != checked or 0 not in ranks):
            text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {finding.text}"
            finding = replace(finding, text=text)
        merged.append(finding)
    return merged
