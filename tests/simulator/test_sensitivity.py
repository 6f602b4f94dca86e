"""`sensitivities`: each row is a simulation of the case on the changed cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.comparison_cases import some_case, some_trace
from trimtab import ClusterSpec
from trimtab.cluster import load_cluster
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.sensitivity import BEST, sensitivities

NAMES = ("static", "eplb", "llep", "foremoe", "taot", "trimtab", "balanced")


@pytest.mark.parametrize("halves", [0, 2])
def test_each_row_is_the_case_on_another_cluster(halves: int) -> None:
    case = some_case(some_trace(longer=1500), token_budget=2000)
    half = some_case(some_trace(seed=1, longer=1500), token_budget=2000)
    case = replace(case, halves=(half,) * halves).with_slots(1, 2)
    outcomes = {name: simulate_policy(case, name) for name in NAMES}
    rows = {row.name: row.step_time_s for row in sensitivities(case, outcomes)}
    first = rows["as priced"]
    assert len(first) == BEST
    assert next(iter(first)) == "trimtab"
    # Those that are left out are slower, and the ideal is no balancer.
    others = {name: outcomes[name].simulated.step_time_s for name in NAMES if name not in (*first, "balanced")}
    assert "balanced" not in first
    assert min(others.values()) >= max(seconds for name, seconds in first.items() if name != "trimtab")
    assert first == {name: outcomes[name].simulated.step_time_s for name in first}
    changed: dict[str, dict[str, Any]] = {
        "25 GB/s network": {
            "network_bytes_per_s": 25e9,
            "dispatch_network_bytes_per_s": case.cluster.dispatch_network_bytes_per_s / 2,
        },
        "no host path": {"host_bytes_per_s": 0.0},
        "processors taken": {"transfer_tax": 0.5},
    }  # fmt: skip
    for name, values in changed.items():
        cluster = replace(case.cluster, **values)
        other = replace(case, cluster=cluster, halves=tuple(replace(half, cluster=cluster) for half in case.halves))
        assert rows[name] == {each: simulate_policy(other, each).simulated.step_time_s for each in first}
    if halves:
        return
    # Worse for who copies, or better for all.
    for name in ("links and memory shared", "processors taken", "25 GB/s network", "small groups are slow"):
        assert rows[name]["trimtab"] > first["trimtab"]
    assert all(rows["dispatch hidden"][name] < first[name] for name in first)


@pytest.mark.parametrize("name", ["h100x8", "gb200-nvl72"])
def test_changes_that_change_nothing_are_left_out(name: str) -> None:
    nodes: ClusterSpec = load_cluster(name, ranks=4, slots_per_rank=1, ranks_per_node=4)
    case = some_case(cluster=nodes)
    names = [row.name for row in sensitivities(case, {"static": simulate_policy(case, "static")})]
    assert "25 GB/s network" not in names
    without = replace(case, cluster=replace(nodes, host_bytes_per_s=0.0))
    names = [row.name for row in sensitivities(without, {"static": simulate_policy(without, "static")})]
    assert "no host path" not in names


@pytest.mark.parametrize("changes", [{"node_bytes_per_s": 0.0}, {"network_bytes_per_s": 0.0}, {"transfer_tax": 0.8}])
def test_any_cluster_has_changes(changes: dict[str, Any]) -> None:
    """Without links all copies come from host memory, and no transfer takes more than all of compute."""
    case = some_case()
    case = replace(case, cluster=replace(case.cluster, **changes))
    names = [row.name for row in sensitivities(case, {"static": simulate_policy(case, "static")})]
    assert ("no host path" in names) == ("transfer_tax" in changes)
    assert "links and memory shared" in names
