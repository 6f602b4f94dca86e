"""Numbers as text, with about three digits and a unit."""

from __future__ import annotations

import math

NONE = "–"


def seconds(value: float, span: float | None = None) -> str:
    """Seconds in a unit that suits `span`, or the value itself."""
    size = abs(value if span is None else span)
    factor, unit = (1.0, "s") if size >= 1 or size == 0 else (1e3, "ms") if size >= 1e-3 else (1e6, "µs")
    return f"{digits(value * factor)} {unit}"


def bytes_text(value: float) -> str:
    """Bytes in a decimal unit."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def digits(value: float) -> str:
    """The number without a unit."""
    if not math.isfinite(value):
        return NONE
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def number(value: float | None, shape: str) -> str:
    """The number in a format of Python, or a dash if it is None or not finite."""
    return NONE if value is None or not math.isfinite(value) else format(value, shape)


def plural(count: int, noun: str) -> str:
    """A number with its noun, such as "1 micro-step" or "8 micro-steps"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
