"""`verdict`: GO, GO WITH LIMITS or NO GO, from the findings of all stages."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.doctor.gpu.stage_process import StageResult

GO, NO_GO, WITH_LIMITS = 0, 1, 3


def verdict(results: Sequence[StageResult]) -> tuple[str, int]:
    """The line that names the first problem, else the first warning; and the exit status, 0, 3 or 1."""
    for status, word, exit_status in (("problem", "NO GO", NO_GO), ("warning", "GO WITH LIMITS", WITH_LIMITS)):
        for result in results:
            for finding in result.findings:
                if finding.status == status:
                    return f"{word}: {result.name}, {finding.name}: {finding.text}", exit_status
    return "GO", GO
