"""Memory of this process."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory, after unreachable objects are freed."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
