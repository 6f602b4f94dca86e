"""What a calibration found: the cluster, where each figure comes from, and the table that is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from trimtab.calibration.fits import Fit
from trimtab.cluster import ClusterSpec
from trimtab.report.number_text import bytes_text, flops, rate, seconds

# Fields that do not belong to a run and are not known without a measurement.
_KNOWN = ("ranks", "ranks_per_node", "slots_per_rank", "mirror_experts", "name", "dispatch_forwards")
MEASURABLE = tuple(field.name for field in fields(ClusterSpec) if field.name not in _KNOWN)
# A fit with a larger relative error gets a warning.
LARGEST_ERROR = 0.1


@dataclass(frozen=True)
class Figure:
    """Measured value of one `ClusterSpec` field.

    Attributes:
        value: in the unit of the `ClusterSpec` field.
        note: a remark for the field's source.
        error: relative error of the fit behind it (root mean square); None if it was not fitted.
    """

    value: float
    note: str = ""
    error: float | None = None


@dataclass(frozen=True)
class CalibrationResult:
    """A measured machine.

    Attributes:
        cluster: the measured spec, rounded to three digits, with the preset's values of all that was not measured.
        sources: source of every measured field of the spec.
        preset: of such a machine.
        figures: unrounded values that were measured, by field of `ClusterSpec`.
        checks: other measured figures, only for comparison.
        machine: processor, number of ranks, and version of torch.
    """

    cluster: ClusterSpec
    sources: dict[str, str]
    preset: ClusterSpec
    figures: dict[str, Figure]
    checks: dict[str, float]
    machine: str

    @classmethod
    def of(
        cls,
        figures: Mapping[str, Figure | None],
        checks: Mapping[str, float],
        *,
        name: str,
        preset: ClusterSpec,
        machine: str,
    ) -> CalibrationResult:
        """The result of measured figures.

        Args:
            figures: by field of `ClusterSpec`; None if it could not be measured here.
            checks: other measured figures.
            name: name of the cluster.
            preset: of such a machine, with the ranks that were measured.
            machine: its description.
        """
        measured = {field: figure for field, figure in figures.items() if figure is not None}
        sources = {
            "ranks_per_node": f"ranks of trimtab calibrate on {machine}",
            "dispatch_forwards": "trimtab's runtime sends every row straight to its rank, in one all-to-all",
        }
        counts = {field.name for field in fields(ClusterSpec) if field.type == "int"}
        values: dict[str, Any] = {"name": name, "dispatch_forwards": False}
        for field, figure in measured.items():
            values[field] = round(figure.value) if field in counts else _three_digits(figure.value)
            poor = f"the fit is off by {figure.error:.0%}" if is_poor(figure) else ""
            sources[field] = "; ".join(filter(None, (f"measured by trimtab calibrate on {machine}", figure.note, poor)))
        return cls(replace(preset, **values), sources, preset, measured, dict(checks), machine)

    @property
    def not_measured(self) -> list[str]:
        """Figures that the preset has, and the written file does not."""
        return [name for name in MEASURABLE if name not in self.figures]

    @property
    def warnings(self) -> list[str]:
        """One line on fits that are off by more than `LARGEST_ERROR`, and one on figures that were not measured."""
        poor = [f"{name} {figure.error:.0%}" for name, figure in self.figures.items() if is_poor(figure)]
        lines = []
        if poor:
            lines.append(
                f"fits off by more than {LARGEST_ERROR:.0%}: {', '.join(poor)}; measure again on an idle machine, with "
                "more --rounds"
            )
        if self.not_measured:
            lines.append(
                f"not measured, so not written: {', '.join(self.not_measured)}; the file has base = "
                f'"{self.preset.name}", whose figures are used'
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Content of the file that `trimtab calibrate --json` writes."""
        return {
            "schema": "trimtab-calibrate-2",
            "machine": self.machine,
            "cluster": asdict(self.cluster),
            "figures": {
                name: asdict(figure) | {"preset": getattr(self.preset, name)} for name, figure in self.figures.items()
            },
            "not_measured": self.not_measured,
            "preset": self.preset.name,
            "checks": self.checks,
        }


def is_poor(figure: Figure) -> bool:
    """Whether a figure's fit is off by more than `LARGEST_ERROR`."""
    return figure.error is not None and figure.error > LARGEST_ERROR


def fitted_rate(fit: Fit, kind: int = 0) -> Figure:
    """The fitted rate of one kind of work."""
    return Figure(fit.rates[kind], fit.note, error=fit.error)


def fitted_cost(fit: Fit, kind: int = 0) -> Figure:
    """The fitted seconds of one kind of fixed cost."""
    seconds = fit.fixed_s[kind]
    return Figure(seconds, fit.note or ("" if seconds else "the timings show no such cost"), error=fit.error)


def _three_digits(value: float) -> float:
    """Rounded: measurements are not more precise."""
    return float(f"{value:.3g}")


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
