"""`experiments.planning_times`: the timed parts make the plan of the balancer, and times follow from a tiny run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import run_command
from experiments import planning_times
from experiments.planning_times import AMOUNTS, PLANNERS, Parts, Step, fit_parts, join_slices
from trimtab.policies import POLICIES
from trimtab.policies.planning_time import MEASURED, TimeAtSize


@pytest.fixture(scope="module")
def step() -> Step:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning_times, "TOKENS_PER_RANK", 2048)
        return Step.draw(ranks=16, experts=32, micro_steps=2, layers=3)


@pytest.mark.parametrize("name", list(PLANNERS))
def test_timed_parts_make_the_plan_of_the_balancer(name: str, step: Step) -> None:
    policy, parts = POLICIES[name], Parts()
    planned, plan = PLANNERS[name](policy, step.view(policy), parts), policy.plan(step.view(policy))
    assert np.array_equal(planned.schedule.micro_step, plan.micro_step)
    assert np.array_equal(planned.schedule.rank, plan.rank)
    assert parts.us.keys() <= AMOUNTS.keys()
    assert all(us > 0 for us in parts.us.values())
    assert bool(planned.rounds) == ("instance" in parts.us) == ("join" in parts.us)
    if name == "trimtab":
        # Its homes are improved here whatever the strategy.
        assert sum(len(table.ranks) for table in planned.rounds) > 0
        return
    assert np.array_equal(planned.home_LE, plan.home)
    if planned.rounds:
        for found, expected in zip(join_slices(planned.rounds), plan.replicas, strict=True):
            assert np.array_equal(found, expected)


def test_all_measured_balancers_are_timed_in_parts() -> None:
    measured = {name for name, policy in POLICIES.items() if policy.traits.planning.source == MEASURED}
    assert PLANNERS.keys() == measured
    assert {field for fields in AMOUNTS.values() for field in fields} == set(TimeAtSize._fields) - {"ranks"}


def test_times_of_parts_are_recovered_from_steps() -> None:
    sizes = [(m, layers) for m in (4, 16) for layers in (8, 16)]
    of_instances = {"instance": 90.0, "join": 5.0}
    us = {
        (m, layers): {"schedule": 30.0 * m + 2.0 * m * layers, "homes": 500.0 * layers, "choice": 7000.0}
        | {part: time * m * layers for part, time in of_instances.items()}
        for m, layers in sizes
    }
    expected = {"schedule": 30.0, "schedule_instance": 2.0, "homes": 500.0, "homes_instance": 0.0, "choice": 7000.0}
    assert fit_parts(us) == pytest.approx(expected | of_instances)


@pytest.mark.nightly
def test_a_tiny_run_writes_times_of_every_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "SIZES": ((2, 8), (4, 8)), "MICRO_STEPS": (1, 2), "LAYERS": (2, 3), "TOKENS_PER_RANK": 512, "MEAN_LENGTH": 128,
        "COUNTED_LENGTH": 64,
    }.items():  # fmt: skip
        monkeypatch.setattr(planning_times, name, value)
    path = tmp_path / "times.json"
    assert run_command("experiments.planning_times", ["--rounds", "1", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures["schema"] == planning_times.SCHEMA
    assert figures["route_us"] > 0
    assert figures["policies"].keys() == PLANNERS.keys()
    for sizes in figures["policies"].values():
        assert [TimeAtSize(**size).ranks for size in sizes] == [2, 4]
