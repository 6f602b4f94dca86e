"""`Finding`: the result of one check, and the texts that findings have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the part that was checked.
        status: `ok`; `warning`, a run works but something is missing or slow; `problem`, a run would fail.
        text: one line: the facts found, and the remedy unless the status is `ok`.
        figures: what was measured, for JSON.
    """

    name: str
    status: Status
    text: str
    figures: dict[str, Any] | None = field(default=None, compare=False)


def first_line(error: Exception) -> str:
    """The first line of an error's message; its type if the message is empty."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
