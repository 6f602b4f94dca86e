"""Integer arrays inside a page, small: differences, byte planes, deflate, base64. `common.js` unpacks them."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from trimtab.array_type import Array


class PageArrays:
    """The HTML elements with a page's arrays."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def __call__(self, array: Array) -> dict[str, Any]:
        """Adds an array of integers below 2**50 in size. Returns what `common.js` needs to unpack it."""
        steps = np.diff(array.astype(np.int64).reshape(-1), prepend=0)
        # Signs go to the lowest bit, so that small negative values have few bytes too.
        coded = (steps << 1) ^ (steps >> 63)
        width = max(1, (int(coded.max(initial=0)).bit_length() + 7) // 8)
        # All lowest bytes, then all second bytes: alike bytes next to each other deflate better.
        planes = np.ascontiguousarray(coded.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T)
        text = base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()
        name = f"array-{len(self.elements)}"
        self.elements.append(f'<script type="text/plain" id="{name}">{text}</script>')
        return {"id": name, "count": len(steps), "bytes": width}
