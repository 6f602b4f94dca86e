"""slime's own functions with the plugin, against slime's own replay: make test-slime SLIME=folder.

The folder has what `git archive 624b824a8 slime` of THUDM/slime gives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helpers.rank_pool import RankPool, shared_pool
from helpers.rank_tests import runs_on_ranks
from helpers.slime_source import Results, SlimeCase, run, use_groups, use_slime

FOLDER = os.environ.get("SLIME", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="needs slime's source: make test-slime SLIME=folder")
State = dict[str, Any]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = shared_pool(2, "slime")
    pool.call(_prepare, FOLDER)
    yield pool
    pool.close()


def _prepare(state: State, folder: str) -> None:
    use_slime(folder)
    use_groups()
    state["plain"] = {}


def plain_run(state: State, case: SlimeCase) -> Results:
    """The same without Trimtab."""
    key = (case.rollouts, case.recompute, case.pad, case.sleeps)
    if key not in state["plain"]:
        state["plain"][key] = run(SlimeCase(*key[:3], sleeps=case.sleeps))[0]
    return state["plain"][key]


def compare(state: State, case: SlimeCase) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Worst relative differences by kind of tensor, and what slime would log."""
    expected = plain_run(state, case)
    found, logged = run(case)
    assert found.keys() == expected.keys()
    worst: dict[str, float] = {}
    for name, tensor in expected.items():
        kind = next(kind for kind in ("ref_log_probs", "log_probs", "grad", "norm") if kind in name)
        error = float((found[name].double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1e-9))
        worst[kind] = max(worst.get(kind, 0.0), error)
    if not torch.distributed.get_rank():
        print(f"\n{case}: worst differences", {kind: f"{error:.1e}" for kind, error in worst.items()}, logged[-1])
    return worst, logged


@pytest.mark.parametrize(
    "case",
    [
        SlimeCase(balance="slots_per_rank=6"),
        SlimeCase(balance="", plans="random"),
        SlimeCase(balance="mode=plan slots_per_rank=2", plans="random", recompute=True, pad=16),
    ],
    ids=["planned", "random", "random, recomputed, padded"],
)
@runs_on_ranks()
def test_gradients_are_those_of_slime_s_own_replay(state: State, case: SlimeCase) -> None:
    worst, logged = compare(state, case)
    assert worst["ref_log_probs"] == 0
    assert max(worst.values()) < 1e-5
    assert sum(step["moe/replicas"] for step in logged) > 0
    assert all(step["moe/unplanned_micro_steps"] == step["moe/mixed_instances"] == 0 for step in logged)


@runs_on_ranks()
def test_shadow_changes_no_bit_and_logs_its_plans(state: State) -> None:
    worst, logged = compare(state, SlimeCase(balance="mode=shadow slots_per_rank=6"))
    assert max(worst.values()) == 0
    assert all(step["moe/max_vio_before"] > 0 for step in logged)


def test_groups_are_destroyed_and_created_again_between_steps() -> None:
    pool = shared_pool(2, "slime reloadable")
    pool.call(_compare_sleeping, FOLDER)
    pool.close()


def _compare_sleeping(state: State, folder: str) -> None:
    use_slime(folder)
    use_groups(reloadable=True)
    state["plain"] = {}
    worst, logged = compare(state, SlimeCase(balance="", plans="random", sleeps=True))
    assert max(worst.values()) < 1e-5
    assert all(step["moe/replicas"] > 0 for step in logged[2:])
    assert torch.distributed.get_world_size() == 2
