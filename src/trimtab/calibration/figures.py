"""From measurements to a `ClusterSpec`: which figure comes from which, and what is said about it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trimtab.calibration.fits import Fit
from trimtab.cluster import ClusterSpec

ONE_RANK = "there was one rank"
ONE_NODE = "there was one node: that inside it"
ONE_EACH = "there was one rank a node: that between nodes"


@dataclass(frozen=True)
class Figure:
    """One figure of a cluster.

    Attributes:
        value: in the unit of the `ClusterSpec` field.
        note: what is to be said about how it came about, if anything.
        measured: or else taken over from a preset.
        error: of the fit behind it, as a part of a timing; None where there is none.
    """

    value: float
    note: str = ""
    measured: bool = True
    error: float | None = None


@dataclass(frozen=True)
class Calibrated:
    """What was measured.

    Attributes:
        cluster: the spec.
        sources: where every figure of it comes from.
        guess: the preset that stands for such a machine.
        figures: by field of `ClusterSpec`, as they were measured.
        checks: other figures, to compare with.
        machine: the processor, the number of ranks, and the version of torch.
    """

    cluster: ClusterSpec
    sources: dict[str, str]
    guess: ClusterSpec
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
        guess: ClusterSpec,
        machine: str,
    ) -> Calibrated:
        """Put figures together.

        Args:
            figures: of every field but those of a run, `ranks_per_node` and `dispatch_forwards`.
            name: of the kind of node.
            guess: with the ranks that there were.
        """
        values: dict[str, Any] = {"ranks": guess.ranks, "ranks_per_node": guess.ranks_per_node, "name": name}
        values["dispatch_forwards"] = False
        sources = {
            "ranks_per_node": f"ranks of trimtab calibrate on {machine}",
            "dispatch_forwards": "trimtab's runtime sends every row straight to its rank, in one all-to-all",
        }
        counts = {field.name for field in fields(ClusterSpec) if field.type == "int"}
        for field, figure in figures.items():
            values[field] = round(figure.value) if field in counts else _three_digits(figure.value)
            how = "measured by" if figure.measured else f"not measured but that of {guess.name}, by"
            sources[field] = "; ".join(filter(None, (f"{how} trimtab calibrate on {machine}", figure.note)))
        return cls(ClusterSpec(**values), sources, guess, dict(figures), dict(checks), machine)

    def to_json(self) -> dict[str, Any]:
        """What `trimtab calibrate --json` writes."""
        return {
            "schema": "trimtab-calibrate-1",
            "machine": self.machine,
            "cluster": asdict(self.cluster),
            "figures": {
                name: asdict(figure) | {"preset": getattr(self.guess, name)} for name, figure in self.figures.items()
            },
            "preset": self.guess.name,
            "checks": self.checks,
        }


def fitted_rate(fit: Fit, kind: int = 0) -> Figure:
    return Figure(fit.rates[kind], fit.note, error=fit.error)


def fitted_cost(fit: Fit, kind: int = 0) -> Figure:
    return Figure(fit.fixed_s[kind], fit.note, error=fit.error)


def of_links(names: tuple[str, str], near: Figure | None, far: Figure | None, guess: ClusterSpec) -> dict[str, Figure]:
    """A figure of links inside a node, and of those between nodes; where there is one kind, it stands for both."""
    if near is None and far is None:
        return {name: Figure(getattr(guess, name), ONE_RANK, measured=False) for name in names}
    return {names[0]: near or _said(far, ONE_EACH), names[1]: far or _said(near, ONE_NODE)}


def _said(figure: Figure | None, more: str) -> Figure:
    assert figure is not None
    return Figure(figure.value, "; ".join(filter(None, (more, figure.note))), figure.measured, figure.error)


def _three_digits(value: float) -> float:
    """More would say more than was measured."""
    return float(f"{value:.3g}")
