"""The table that `trimtab calibrate` prints."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from trimtab.calibration.calibration_result import CalibrationResult


def calibration_table(result: CalibrationResult) -> RenderableType:
    """Every figure, the preset's value of it, and the error of its fit."""
    table = Table("figure", title=f"This machine: {result.machine}", title_justify="left", title_style="bold")
    for name in ("measured", result.preset.name, "fit off by"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, figure in result.figures.items():
        value = _value(name, getattr(result.cluster, name)) if figure.measured else "-"
        error = "" if figure.error is None else f"{figure.error:.1%}"
        table.add_row(name, value, _value(name, getattr(result.preset, name)), error)
    notes = [f"{name}: {figure.note}" for name, figure in result.figures.items() if figure.note]
    checks = [f"{name}: {_value(name, value)}" for name, value in result.checks.items()]
    return Group(table, *notes, *(f"To compare: {check}" for check in checks))


def _value(name: str, value: float) -> str:
    if name.endswith("_flops"):
        return f"{value / 1e9:,.4g} GFLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:,.3g} GB/s"
    if name.endswith("_bytes"):
        return f"{value / 1e9:,.3g} GB"
    if name.endswith("_s"):
        return f"{value * 1e6:,.3g} us"
    return f"{value:,.3g}"
