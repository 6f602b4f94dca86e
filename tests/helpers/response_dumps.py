"""Dumps of other frameworks, byte for byte as documented, built without Trimtab's readers."""

from __future__ import annotations

import base64
import json
import math
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from helpers.import_items import kept
from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.formats.records import Dropped, Record


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


def npy_text(ids: Array) -> str:
    return base64.b64encode(npy_bytes(ids)).decode()


def raw_text(ids: Array) -> str:
    """Flat little-endian numbers."""
    flat = [int(number) for number in ids.reshape(-1)]
    letter = {"uint8": "B", "uint16": "H", "int16": "h", "int32": "i"}[ids.dtype.name]
    return base64.b64encode(struct.pack(f"<{len(flat)}{letter}", *flat)).decode()


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


def mutants(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Copies of a file with bits flipped, parts cut, doubled or swapped, and numbers made huge."""
    draw = random.Random(seed)
    for _ in range(count):
        data = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 5))):
            at = draw.randrange(len(data) or 1)
            end = min(len(data), at + draw.choice((1, 4, 30, len(content) // 3)))
            kind = draw.randrange(6)
            if kind == 0 and data:
                data[at] ^= 1 << draw.randrange(8)
            elif kind == 1:
                del data[at:]
            elif kind == 2:
                del data[at:end]
            elif kind == 3:
                data[at:at] = data[at:end]
            elif kind == 4:
                data[at:end] = draw.choice((b"[", b"{", b'"', b"-1", b"1e9", b"9" * 30, b"null", b"\x00", b"\xff" * 8))
            else:
                places = [place for place in range(len(data)) if 48 <= data[place] < 58]
                if places:
                    place = draw.choice(places)
                    data[place : place + 1] = draw.choice((b"0", b"7", b"-3", b"4294967296", b"true", b"0.5"))
        yield bytes(data)


def only_input_errors(
    path: Path, content: bytes, read: Callable[[Path], Iterator[Record | Dropped]], count: int
) -> int:
    """Reads `count` mutants; returns how many were refused. Whatever is not refused has records that make sense."""
    refused = 0
    for seed, mutant in enumerate(mutants(content, count, seed=len(content))):
        path.write_bytes(mutant)
        try:
            for record in kept(read(path)):
                assert record.ids.ndim == 3
                assert record.ids.dtype.kind in "iu"
                assert math.prod(record.ids.shape[1:]) > 0
                assert record.first >= 0
                assert record.num_tokens is None or record.num_tokens >= 0
                assert record.layers is None or len(record.layers) == record.ids.shape[1]
        except InputError as error:
            assert "\n" not in str(error), seed
            assert len(str(error)) < 400, error
            refused += 1
    return refused
