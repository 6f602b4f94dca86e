"""Measured figures, and the `ClusterSpec` with sources made of them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from trimtab.calibration.fits import Fit
from trimtab.cluster import ClusterSpec

ONE_RANK = "there was one rank"
ONE_NODE = "there was one node: that inside it"
ONE_PER_NODE = "there was one rank a node: that between nodes"


@dataclass(frozen=True)
class Figure:
    """Value of one `ClusterSpec` field.

    Attributes:
        value: in the unit of the `ClusterSpec` field.
        note: a remark for the field's source.
        measured: False if it is the preset's value.
        error: relative error of the fit behind it; None if it was not fitted.
    """

    value: float
    note: str = ""
    measured: bool = True
    error: float | None = None


@dataclass(frozen=True)
class CalibrationResult:
    """A measured machine.

    Attributes:
        cluster: the measured spec, rounded to three digits.
        sources: source of every field of the spec.
        preset: the preset of such a machine.
        figures: unrounded values, by field of `ClusterSpec`.
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
        figures: Mapping[str, Figure],
        checks: Mapping[str, float],
        *,
        name: str,
        preset: ClusterSpec,
        machine: str,
    ) -> CalibrationResult:
        """The result of measured figures.

        Args:
            figures: of every field except those of a run, `ranks_per_node` and `dispatch_forwards`.
            checks: other measured figures.
            name: name of the cluster.
            preset: of such a machine, with the ranks that were measured.
            machine: its description.
        """
        values: dict[str, Any] = {"ranks": preset.ranks, "ranks_per_node": preset.ranks_per_node, "name": name}
        values["dispatch_forwards"] = False
        sources = {
            "ranks_per_node": f"ranks of trimtab calibrate on {machine}",
            "dispatch_forwards": "trimtab's runtime sends every row straight to its rank, in one all-to-all",
        }
        counts = {field.name for field in fields(ClusterSpec) if field.type == "int"}
        for field, figure in figures.items():
            values[field] = round(figure.value) if field in counts else _three_digits(figure.value)
            how = "measured by" if figure.measured else f"not measured but that of {preset.name}, by"
            sources[field] = "; ".join(filter(None, (f"{how} trimtab calibrate on {machine}", figure.note)))
        return cls(ClusterSpec(**values), sources, preset, dict(figures), dict(checks), machine)

    def to_json(self) -> dict[str, Any]:
        """Content of the file that `trimtab calibrate --json` writes."""
        return {
            "schema": "trimtab-calibrate-1",
            "machine": self.machine,
            "cluster": asdict(self.cluster),
            "figures": {
                name: asdict(figure) | {"preset": getattr(self.preset, name)} for name, figure in self.figures.items()
            },
            "preset": self.preset.name,
            "checks": self.checks,
        }


def fitted_rate(fit: Fit, kind: int = 0) -> Figure:
    """The fitted rate of one kind of work."""
    return Figure(fit.rates[kind], fit.note, error=fit.error)


def fitted_cost(fit: Fit, kind: int = 0) -> Figure:
    """The fitted seconds of one kind of fixed cost."""
    return Figure(fit.fixed_s[kind], fit.note, error=fit.error)


def link_figures(
    names: tuple[str, str], near: Figure | None, far: Figure | None, preset: ClusterSpec
) -> dict[str, Figure]:
    """Figures of links inside a node and between nodes, by field name. If only one kind was measured, both get it."""
    if near is None and far is None:
        return {name: Figure(getattr(preset, name), ONE_RANK, measured=False) for name in names}
    return {names[0]: near or _with_note(far, ONE_PER_NODE), names[1]: far or _with_note(near, ONE_NODE)}


def _with_note(figure: Figure | None, note: str) -> Figure:
    assert figure is not None
    return replace(figure, note="; ".join(filter(None, (note, figure.note))))


def _three_digits(value: float) -> float:
    """Rounded: measurements are not more precise."""
    return float(f"{value:.3g}")
