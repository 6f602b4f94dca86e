"""The yardstick, and the planning times that it covers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import trimtab
from helpers.planned_times import idle_step
from trimtab import ClusterSpec
from trimtab.policies import POLICIES
from trimtab.policies.planning_time import ETHERNET, MEASURED, PlanningTime, TimeAtSize
from trimtab.simulator import yardstick as module
from trimtab.simulator.yardstick import FOLDERS, SOURCES, yardstick


def test_any_change_of_a_source_changes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = Path(trimtab.__file__).parent
    every = [*SOURCES, *(f"{folder}/{file.name}" for folder in FOLDERS for file in (root / folder).glob("*.py"))]
    for name in every:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((root / name).read_bytes())
    monkeypatch.setattr(module, "files", lambda package: tmp_path)
    assert yardstick.__wrapped__() == yardstick()
    for name in every:
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(before + b"#")
        assert yardstick.__wrapped__() != yardstick(), name
        (tmp_path / name).write_bytes(before)


def test_all_balancers_that_see_the_step_are_charged() -> None:
    for name, policy in POLICIES.items():
        traits = policy.traits
        charged = traits.known_at in ("step", "layer") and not traits.ideal
        assert bool(traits.planning.sizes) == charged, name
        # Live planners are charged published times, the others what we measure.
        assert not charged or (traits.planning.source == MEASURED) == (traits.known_at == "step"), name


def test_measured_planning_is_charged_whole() -> None:
    """48 layers and 3 micro-steps on four cores, at every size that was measured."""
    stored = json.loads((Path(trimtab.__file__).parent / "policies" / "planning_times.json").read_text())
    assert "trimtab" in stored["policies"]
    for name, sizes in stored["policies"].items():
        for size in sizes:
            ranks = size["ranks"]
            cluster = ClusterSpec(ranks, 8, planning_threads=4)
            found = POLICIES[name].traits.hidden_planning(*idle_step(ranks, micro_steps=3), cluster, 48)
            us = dict.fromkeys(TimeAtSize._fields, 0.0) | size
            rollout = 48 * (us["homes"] + 3 * us["homes_instance"]) / 4 + us["choice"] / 4
            header = 3 * us["schedule"] + 3 * 48 * us["schedule_instance"] + 100 * 2 * 48 * stored["route_us"]
            header += math.log2(ranks) * (ETHERNET.message_us + (2 * 8 + 4 * 48 * ranks) * ETHERNET.byte_us)
            mine = math.ceil(48 / ranks)
            each = mine * us["instance"] + 48 * us["join"] + (ranks - 1) * ETHERNET.message_us if us["instance"] else 0
            expected = [rollout * 1e-6, header * 1e-6, each * 1e-6]
            assert [found.rollout_s, found.header_s, found.round_s] == pytest.approx(expected), name


def test_balancers_are_charged_the_parts_that_they_have() -> None:
    """Replicas of micro-steps in slices, homes and strategies during the rollout, schedules before the step."""
    times = {name: policy.traits.planning for name, policy in POLICIES.items()}
    parts = {
        name: {part for part in TimeAtSize._fields[1:] if any(getattr(size, part) for size in planning.sizes)}
        for name, planning in times.items()
        if planning.source == MEASURED
    }
    homes, schedule = {"homes", "homes_instance"}, {"schedule", "schedule_instance"}
    has = {name: {"homes": bool(found & homes), "schedule": bool(found & schedule)} for name, found in parts.items()}
    slices = {name for name, found in parts.items() if {"instance", "join"} <= found}
    assert slices == {"trimtab", "relibra", "foremoe"}
    assert all(("instance" in found) == (name in slices) for name, found in parts.items())
    assert {name for name, each in has.items() if each["homes"]} == parts.keys()
    assert {name for name, each in has.items() if each["schedule"]} == {"trimtab", "routepack"}
    assert {name for name, found in parts.items() if "choice" in found} == {"trimtab"}


def test_times_are_linear_between_sizes_and_never_negative() -> None:
    time = PlanningTime((TimeAtSize(8, 10.0, 0.0, 4.0, 1.0), TimeAtSize(16, 30.0, 8.0, 0.0, 1.0)))
    assert time.at(8) == time.sizes[0]
    assert time.at(12) == TimeAtSize(12, 20.0, 4.0, 2.0, 1.0)
    assert time.at(32) == TimeAtSize(32, 70.0, 24.0, 0.0, 1.0)
    assert time.at(1) == TimeAtSize(1, 0.0, 0.0, 7.5, 1.0)
    assert PlanningTime((TimeAtSize(8, instance=3.0),)).at(64).instance == 3.0
    assert PlanningTime().at(4) == TimeAtSize(4)
