"""Dumps of other frameworks, byte for byte as documented, built without Trimtab's readers."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array


def routes(tokens: int, layers: int, top_k: int, experts: int, dtype: str, *, seed: int = 0) -> Array:
    """Ids `[tokens, layers, top_k]`, distinct in every row."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, layers, experts)), axis=2)[:, :, :top_k]
    return ids.astype(dtype)


def npy_bytes(ids: Array, *, descr: str | None = None, shape: str | None = None) -> bytes:
    """Version 1.0 of the format: magic, version, length of the header, the header padded to 64 bytes, the numbers."""
    little = "|u1" if ids.dtype == np.uint8 else f"<{ids.dtype.kind}{ids.dtype.itemsize}"
    text = f"{{'descr': '{descr or little}', 'fortran_order': False, 'shape': {shape or tuple(ids.shape)}, }}"
    text += " " * (-(10 + len(text) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + ids.tobytes()


def npy_text(ids: Array, **claims: str) -> str:
    return base64.b64encode(npy_bytes(ids, **claims)).decode()


def raw_text(ids: Array) -> str:
    """Flat little-endian numbers."""
    return base64.b64encode(ids.astype(ids.dtype.newbyteorder("<")).tobytes()).decode()


def safetensors_bytes(tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def json_lines(path: Path, values: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path
