"""Small files that ask their reader for endless memory or work. Each is well-formed as far as a reader can see."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from helpers.pickled_dumps import saved

_PACKED_BYTES = 1 << 24


def growing_names() -> bytes:
    """A pickle whose class names grow by 60,000 letters with each use."""
    letters = b"X" + struct.pack("<I", 60_000) + b"a" * 60_000
    nested_class = b"q\x01" + b"cbuiltins\ngetattr\n" + b"h\x01h\x00\x86R"
    return b"\x80\x02" + letters + b"q\x00" + b"cslime\nX\n" + nested_class * 3000 + b"."


def nested_axes() -> bytes:
    """A pickled array whose order of axes is two equal tuples; comparing them takes 2^60 steps."""
    doubled = b"K\x01\x85" + b"2\x86" * 60
    dtype = b"cnumpy\ndtype\n\x8c\x02u1\x85R"
    array = b"(C\x02ab" + dtype + b"K\x02K\x01\x86\x8c\x01K" + doubled + doubled + b"\x86t"
    return b"\x80\x04cnumpy.core.numeric\n_frombuffer\n" + array + b"R."


def nested_key() -> bytes:
    """A pickled dictionary whose key takes 2^60 steps to hash."""
    return b"\x80\x04})" + b"2\x86" * 60 + b"K\x01s."


def shared_lists() -> bytes:
    """Forty lists of two references each, which stand for 2^41 numbers."""
    value: Any = [1, 2]
    for _ in range(40):
        value = [value, value]
    return pickle.dumps({"samples": [{"rollout_routed_experts": value}]})


def many_objects() -> bytes:
    """Seven million empty dictionaries."""
    return b"\x80\x02(" + b"}" * 7_000_000 + b"t."


def overlapping_entries() -> bytes:
    """A zip file of 20,000 names for the same 16 KB, which unpack to 16 MB each."""
    file = io.BytesIO()
    np.save(file, np.zeros(_PACKED_BYTES, np.uint8))
    content = file.getvalue()
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(content) + packer.flush()
    facts = struct.pack("<3I", zlib.crc32(content), len(packed), len(content))
    name = b"ids.npy"
    local = b"PK\3\4" + struct.pack("<5H", 20, 0, 8, 0, 0) + facts + struct.pack("<2H", len(name), 0) + name + packed
    names = [b"%05d.npy" % index for index in range(20_000)]
    entry = b"PK\1\2" + struct.pack("<6H", 20, 20, 0, 8, 0, 0) + facts
    entry += struct.pack("<5H2I", len(names[0]), 0, 0, 0, 0, 0, 0)
    entries = b"".join(entry + name for name in names)
    count = len(names)
    return local + entries + b"PK\5\6" + struct.pack("<4H2IH", 0, 0, count, count, len(entries), len(local), 0)


def terabytes_of_ids() -> bytes:
    """Recorded counts of 2^38 tokens in 20,000 layers."""
    counts = torch.zeros(1, 20000, 16, dtype=torch.int64)
    counts[..., :8] = 1 << 38
    return saved({"rank": 0, "logical_count": counts})


def repeated_tensor() -> bytes:
    """A tensor of one number, expanded to 2^31."""
    return saved({"routed_experts": torch.ones(1, 1, 1, 1, dtype=torch.int32).expand(1, 1 << 24, 16, 8)})


def repeated_array() -> bytes:
    """A million samples with the same array."""
    ids = np.argsort(np.random.default_rng(0).random((2047, 48, 16)), axis=-1)[..., :8].astype(np.int32)
    return saved({"samples": [{"rollout_routed_experts": ids}] * 1_000_000})


def packed_text() -> bytes:
    """A compressed JSON string of 1.5 GB."""
    packer = zlib.compressobj(1, wbits=31)
    start = packer.compress(b'{"routed_experts": "')
    return start + b"".join(packer.compress(b"A" * (1 << 20)) for _ in range(1500)) + packer.flush()


def packed_brackets() -> bytes:
    """Compressed JSON, nested a million deep."""
    return gzip.compress(b'{"routed_experts": ' + b"[" * 1_000_000)


# The name of the format that the file is to be read as, and its content.
HOSTILE: dict[Callable[[], bytes], str] = {
    growing_names: "slime", nested_axes: "verl", nested_key: "slime", shared_lists: "slime", many_objects: "slime",
    overlapping_entries: "verl", terabytes_of_ids: "sglang-recorder", repeated_tensor: "verl", repeated_array: "slime",
    packed_text: "vllm", packed_brackets: "vllm",
}  # fmt: skip
