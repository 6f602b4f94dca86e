"""Replicas that are planned while the step runs: in time or late, equal on all ranks, and with failing planners."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from helpers.programs import run_on_rank
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import RanksDisagreeError
from trimtab.planner.plan.slices import to_bytes
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.runtime import session_micro_steps
from trimtab.runtime.planning import background_slices


def run_with(planner: str, steps: int) -> tuple[dict[str, float], list[str]]:
    """Steps with several rounds of slices, of which rank 1 does not plan those of the first; metrics and warnings."""
    warnings: list[str] = []
    log = logging.getLogger("trimtab")
    with (
        mock.patch.object(log, "warning", lambda text, *values: warnings.append(text % values)),
        mock.patch.object(session_micro_steps, "PATIENCE_S", 0.05),
    ):
        metrics = run_on_rank("7, order: 1F1B", others={"planner": planner, "steps": steps})
    # Routing is random here.
    return metrics, [text for text in warnings if "experts that were recorded" not in text]


def test_a_step_with_a_failed_planner_is_right_and_names_it() -> None:
    results = on_ranks(run_with, ("fails", 2), ranks=2)
    for rank, (metrics, warnings) in enumerate(results):
        assert metrics["moe/late_micro_steps"] > 0
        reason = "MemoryError('no memory for a plan')" if rank == 1 else "the planner of rank 1 failed"
        assert len(warnings) == 1
        assert reason in warnings[0]
        assert "ran without replicas" in warnings[0]


def test_a_stalled_planner_is_named_and_not_used_again() -> None:
    results = on_ranks(run_with, ("stalls", 4), ranks=2)
    for metrics, warnings in results:
        assert metrics["moe/late_micro_steps"] > 0
        assert re.search("waiting for rank (0, )?1", warnings[0])
        assert any("plans are made before their step from now on" in warning for warning in warnings)


@runs_on_ranks()
def test_a_slice_runs_only_if_all_ranks_have_the_same() -> None:
    """Rank 1 receives another byte at the end of rank 0's slices, which is not read."""
    gather = dist.all_gather_object

    def gather_wrongly(outputs: list[Any], mine: Any, **options: Any) -> None:
        gather(outputs, mine, **options)
        if mine[1:] and isinstance(mine[1], bytes) and dist.get_rank() == 1:
            figures, part = outputs[0]
            outputs[0] = figures, part[:-1] + b"\1"

    def to_longest(tables: Sequence[ReplicaTable]) -> bytes:
        return to_bytes(tables) + bytes(1 << 20 if dist.get_rank() == 0 else 0)

    with (
        mock.patch.object(dist, "all_gather_object", gather_wrongly),
        mock.patch.object(background_slices, "to_bytes", to_longest),
        pytest.raises(RanksDisagreeError, match="plan of micro-step 0: rank 0 and rank 1 of"),
    ):
        run_on_rank("7, planner: in time, order: 1F1B")
