"""`is_switched_off`: the environment variable by which a run is repeated without Trimtab, and no code is changed."""

from __future__ import annotations

import os

VARIABLE = "TRIMTAB_BALANCE"
"""Options of most plugins, as `mode=plan slots_per_rank=2`. `mode=off` counts in every integration and session."""


def is_switched_off() -> bool:
    """Whether `VARIABLE` has `mode=off`."""
    return "mode=off" in os.environ.get(VARIABLE, "").split()
