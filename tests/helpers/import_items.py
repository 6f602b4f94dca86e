"""Records, and counts of dropped data, among the items that a reader yields; readers of damaged files."""

from __future__ import annotations

import io
import math
import random
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from trimtab.errors import InputError
from trimtab.trace.formats.dump_fields import damaged_values
from trimtab.trace.formats.records import Dropped, Record
from trimtab.trace.message_text import at_place

ABSURD_NUMBERS = [b"-1", b"0", b"999999999999", b"1e308", b"4294967296", b"0.5", b"null", b'"x"', b"[]", b"{}", b"true"]


def kept(items: Iterable[Record | Dropped]) -> list[Record]:
    """The records, whose ids and tokens can be read."""
    with damaged_values():
        records = [item for item in items if isinstance(item, Record)]
    for record in records:
        with at_place(record.where), damaged_values():
            _ = record.ids, record.token_ids
    return records


def tokens_of(record: Record) -> list[int] | None:
    return None if record.token_ids is None else record.token_ids.tolist()


def dropped(items: Iterable[Record | Dropped]) -> dict[str, int]:
    """Counts of data that is not imported, by kind."""
    counts: Counter[str] = Counter()
    for item in items:
        if isinstance(item, Dropped):
            counts[item.kind] += item.count
        else:
            counts["padding rows"] += len(item.block) - len(item.ids) if item.padding is None else item.padding
    return dict(+counts)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The file with bytes cut, flipped, filled, repeated or moved, or absurd numbers, once or more often.

    Half of the zip files are damaged within an entry, behind its checksum.
    """
    if content[:2] == b"PK" and rng.random() < 0.5:
        return _damaged_entry(content, rng)
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        start, size = rng.randrange(len(data) + 1), rng.choice([1, 2, 4, 8, 40, len(content) // 3])
        match rng.randrange(8):
            case 0:
                del data[start:]
            case 1 if start < len(data):
                data[start] ^= 1 << rng.randrange(8)
            case 2:
                data[start : start + size] = bytes([rng.choice([0, 1, 0x7F, 0x80, 0xFF])]) * size
            case 3:
                del data[start : start + size]
            case 4:
                data[start:start] = data[max(0, start - size) : start] * (rng.choice([1, 50]) if size <= 40 else 1)
            case 5:
                data[start : start + size] = rng.randbytes(size)
            case 6:
                other = rng.randrange(len(data) + 1)
                data[other:other] = data[start : start + size]
            case _:
                if numbers := list(re.finditer(rb"\d+", data)):
                    place = rng.choice(numbers)
                    data[place.start() : place.end()] = rng.choice(ABSURD_NUMBERS)
    return bytes(data)


def _damaged_entry(content: bytes, rng: random.Random) -> bytes:
    """A zip file whose pickle, or one of its arrays, is damaged."""
    source, target = zipfile.ZipFile(io.BytesIO(content)), io.BytesIO()
    names = source.namelist()
    chosen = next((name for name in names if name.endswith("data.pkl")), rng.choice(names))
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            data = source.read(name)
            archive.writestr(name, damaged(data, rng) if name == chosen else data)
    return target.getvalue()


def survives(
    content: bytes, file: Path, read: Callable[[Path], Iterable[Record | Dropped]], cases: int, seed: int = 0
) -> int:
    """Damages a dump; all are refused in one line or have records that make sense. Returns how many are refused."""
    rng = random.Random(seed)
    refused = 0
    for case in range(cases):
        file.write_bytes(damaged(content, rng))
        try:
            for record in kept(read(file)):
                record.ids.sum()
                assert record.ids.ndim == 3, case
                assert record.ids.dtype.kind in "iu", case
                assert math.prod(record.ids.shape[1:]) > 0, case
                assert record.first >= 0, case
                assert record.num_tokens is None or record.num_tokens >= 0, case
                assert record.layers is None or len(record.layers) == record.ids.shape[1], case
        except InputError as error:
            refused += 1
            assert "\n" not in str(error), error
            assert len(str(error)) < 400, error
    return refused
