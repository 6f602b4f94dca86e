"""Figures of a result, each stated once: name, value, unit and text. Reports, metrics, JSON and docs come from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """One figure of a result.

    Attributes:
        name: its attribute of the result.
        value: its value.
        unit: such as `s`, `bytes` or `rows`; "" for a number without a unit, or a text.
        text: what it means.
        key: its name in JSON or in metrics; "" if it is not written there.
    """

    name: str
    value: Any
    unit: str
    text: str
    key: str


def measured(text: str, unit: str = "", *, key: str = "", default: Any = MISSING) -> Any:
    """A field of a dataclass that is a figure; see `Figure`."""
    return field(default=default, metadata={"figure": (unit, text, key)})


class _Computed(cached_property[T]):
    """A property that is a figure."""

    def __init__(self, compute: Callable[[Any], T], unit: str, key: str) -> None:
        super().__init__(compute)
        self.described = unit, " ".join((compute.__doc__ or "").split()), key


def computed(unit: str = "", *, key: str = "") -> Callable[[Callable[[Any], T]], cached_property[T]]:
    """Decorates a method, which becomes a figure that is computed once. Its docstring is the text; see `Figure`."""
    return lambda compute: _Computed(compute, unit, key)


def described_figures(kind: type) -> dict[str, tuple[str, str, str]]:
    """Unit, text and key of each figure of a class of results, by name."""
    of_fields = {part.name: part.metadata["figure"] for part in fields(kind) if "figure" in part.metadata}
    return of_fields | {name: part.described for name, part in vars(kind).items() if isinstance(part, _Computed)}


def figures_of(result: Any) -> list[Figure]:
    """The figures of a result: its `measured` fields, then its `computed` properties."""
    described = described_figures(type(result))
    return [Figure(name, getattr(result, name), *texts) for name, texts in described.items()]


def by_key(result: Any) -> dict[str, Any]:
    """The values of a result's figures by key, for JSON and metrics."""
    return {figure.key: figure.value for figure in figures_of(result) if figure.key}


def with_documented_figures(kind: type[T]) -> type[T]:
    """Decorates a dataclass: the texts of its `measured` fields become attributes in its docstring."""
    lines = [f"    {name}: {text}" for name, (_, text, _) in described_figures(kind).items()]
    kind.__doc__ = "\n".join([kind.__doc__ or "", "Attributes:", *lines])
    return kind


def plural(count: int, noun: str) -> str:
    """A number with its noun, such as "1 micro-step" or "8 micro-steps"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
