"""The table that `trimtab calibrate` prints."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from trimtab.calibration.calibration_result import MEASURABLE, CalibrationResult, is_poor
from trimtab.report.number_text import bytes_text, flops, rate, seconds


def calibration_table(result: CalibrationResult) -> RenderableType:
    """Every figure, the preset's value of it, and the error of its fit: yellow if it is too large to be trusted."""
    table = Table("figure", title=f"This machine: {result.machine}", title_justify="left", title_style="bold")
    for name in ("measured", result.preset.name, "fit off by"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in MEASURABLE:
        figure = result.figures.get(name)
        value = "not measured" if figure is None else _value(name, getattr(result.cluster, name))
        error = "" if figure is None or figure.error is None else f"{figure.error:.1%}"
        style = "yellow" if figure is not None and is_poor(figure) else None
        table.add_row(name, value, _value(name, getattr(result.preset, name)), error, style=style)
    notes = [f"{name}: {figure.note}" for name, figure in result.figures.items() if figure.note]
    checks = [f"{name}: {_value(name, value)}" for name, value in result.checks.items()]
    return Group(table, *notes, *(f"To compare: {check}" for check in checks))


def _value(name: str, value: float) -> str:
    texts = {"_flops": flops, "_bytes_per_s": rate, "_bytes": bytes_text, "_s": seconds}
    return next((text(value) for suffix, text in texts.items() if name.endswith(suffix)), f"{value:,.3g}")
