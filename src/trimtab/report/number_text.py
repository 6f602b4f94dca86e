"""Numbers as text, with about three digits and a unit that suits their size, for all tables and pages."""

from __future__ import annotations

import math
import re

NONE = "–"
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seconds(value: float, span: float | None = None) -> str:
    """Seconds in a unit that suits `span`, or the value itself: 1.63 s, 45.2 ms or 400 µs."""
    if not math.isfinite(value):
        return NONE
    size = abs(value if span is None else span)
    factor, unit = (1.0, "s") if size >= 0.9995 or size == 0 else (1e3, "ms") if size >= 0.9995e-3 else (1e6, "µs")
    return f"{digits(value * factor)} {unit}"


def bytes_text(value: float) -> str:
    """Bytes in a decimal unit: 1.23 MB."""
    return scaled(value, "B")


def rate(value: float) -> str:
    """Bytes per second in a decimal unit: 450 GB/s."""
    return scaled(value, "B/s")


def flops(value: float) -> str:
    """Floating-point operations per second in a decimal unit: 400 TFLOP/s."""
    return scaled(value, "FLOP/s")


def scaled(value: float, unit: str) -> str:
    """A quantity with the decimal prefix that leaves one to three digits before the point; without one below 1,000."""
    if not math.isfinite(value):
        return NONE
    for factor, prefix in PREFIXES:
        # Of 999,999 the text would be 1,000 k.
        if abs(value) >= 0.9995 * factor:
            return f"{digits(value / factor)} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def digits(value: float) -> str:
    """The number without a unit."""
    if not math.isfinite(value):
        return NONE
    size = abs(value)
    return f"{value:z,.0f}" if size >= 100 else f"{value:z.1f}" if size >= 10 else f"{value:z.2f}"


def number(value: float | None, shape: str) -> str:
    """The number in a format of Python, or a dash if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return NONE
    text = format(value, shape)
    return text if re.search("[1-9]", text) else text.replace("-", "")
