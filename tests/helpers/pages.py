"""Values of a page, unpacked as its scripts do, and the page as parsed HTML."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import numpy as np

from trimtab.array_type import Array


def values_of(page: str) -> dict[str, Any]:
    """The JSON that the page's scripts read."""
    match = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert match
    return dict(json.loads(match[1]))


def array_of(page: str, part: dict[str, Any]) -> Array:
    """An array of the page as int64, given its entry in the JSON."""
    match = re.search(rf'<script type="text/plain" id="{part["id"]}">([^<]*)</script>', page)
    assert match
    planes = zlib.decompress(base64.b64decode(match[1]))
    count, values, last = part["count"], [], 0
    assert len(planes) == count * part["bytes"]
    for i in range(count):
        coded = sum(planes[plane * count + i] << (8 * plane) for plane in range(part["bytes"]))
        last += -(coded + 1) // 2 if coded % 2 else coded // 2
        values.append(last)
    return np.array(values, np.int64)
