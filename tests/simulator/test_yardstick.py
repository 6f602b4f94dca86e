"""The yardstick: presets, other balancers and planning times only change deliberately."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trimtab
from trimtab import ClusterSpec
from trimtab.policies import POLICIES
from trimtab.policies.planning_time import MEASURED, PlanningTime, TimeAtSize
from trimtab.simulator import yardstick as module
from trimtab.simulator.yardstick import FOLDERS, SOURCES, yardstick

# Figures of comparisons with another value were made with other presets, balancers or planning times.
FROZEN = "ee472a81b2a9"


def test_the_yardstick_is_frozen() -> None:
    """Change the value with what it stands for, and make the figures of docs/ again."""
    assert yardstick() == FROZEN


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
    """48 layers and 8 micro-steps on four cores, at every size that was measured."""
    stored = json.loads((Path(trimtab.__file__).parent / "policies" / "planning_times.json").read_text())["policies"]
    assert "trimtab" in stored
    for name, sizes in stored.items():
        for size in sizes:
            us = dict.fromkeys(TimeAtSize._fields, 0.0) | size
            serial = us["step"] + 8 * us["micro_step"] + 8 * 48 * us["serial"]
            on_all = 48 * us["layer"] + 48 * 8 * us["instance"] + us["sample"]
            cluster = ClusterSpec(size["ranks"], 8, planning_threads=4)
            charged_s = POLICIES[name].traits.planning_seconds(cluster, 48, 8)
            assert charged_s == pytest.approx((serial + on_all / 4) * 1e-6), name


def test_times_are_linear_between_sizes_and_never_negative() -> None:
    time = PlanningTime((TimeAtSize(8, 10.0, 0.0, 4.0, 1.0), TimeAtSize(16, 30.0, 8.0, 0.0, 1.0)))
    assert time.at(8) == time.sizes[0]
    assert time.at(12) == TimeAtSize(12, 20.0, 4.0, 2.0, 1.0)
    assert time.at(32) == TimeAtSize(32, 70.0, 24.0, 0.0, 1.0)
    assert time.at(1) == TimeAtSize(1, 0.0, 0.0, 7.5, 1.0)
    assert PlanningTime((TimeAtSize(8, instance=3.0),)).at(64).instance == 3.0
    assert PlanningTime().at(4) == TimeAtSize(4)


def test_a_step_takes_its_serial_part_and_its_layers_on_all_cores() -> None:
    time = PlanningTime((TimeAtSize(8, micro_step=5.0, serial=2.0, layer=30.0, instance=7.0),))
    on_one_core = 3 * 5 + 4 * 3 * 2 + 4 * (30 + 3 * 7)
    assert time.step_seconds(8, layers=4, micro_steps=3, threads=1) == pytest.approx(on_one_core * 1e-6)
    on_two = 3 * 5 + 4 * 3 * 2 + 4 * (30 + 3 * 7) / 2
    assert time.step_seconds(8, layers=4, micro_steps=3, threads=2) == pytest.approx(on_two * 1e-6)
