"""Curves of balance against bytes are compared at equal balance and at equal bytes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.planner_bounds import compare_curves


def points(curve: str, *pairs: tuple[float, float]) -> list[dict[str, Any]]:
    names = ("replica_bytes_per_instance", "max_over_mean_mean")
    return [{"curve": curve, **dict(zip(names, pair, strict=True))} for pair in pairs]


def test_curves_are_interpolated_at_equal_balance_and_at_equal_bytes() -> None:
    """Trimtab reaches 1.05 between 100 and 200 bytes; llep never does."""
    found = compare_curves(
        points("trimtab", (200, 1.02), (100, 1.1), (400, 1.0))
        + points("ultraep", (150, 1.2), (300, 1.04), (50, 1.3))
        + points("llep", (100, 1.08), (400, 1.06))
    )
    assert found["balance"] == 1.05
    assert found["bytes_per_instance"]["trimtab"] == pytest.approx(100 + 100 * 0.05 / 0.08)
    assert found["bytes_per_instance"]["ultraep"] == pytest.approx(150 + 150 * 0.15 / 0.16)
    assert found["bytes_per_instance"]["llep"] is None
    # At 150 bytes Trimtab has 1.06, at 300 bytes 1.01; at 100 bytes 1.1 and llep 1.08.
    assert found["trimtab_above"]["ultraep"] == pytest.approx(1.01 - 1.04)
    assert found["trimtab_above"]["llep"] == pytest.approx(1.1 - 1.08)
