"""Records, and counts of dropped data, among the items that a reader yields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trimtab.trace.formats.records import Dropped, Record


def kept(items: Iterable[Record | Dropped]) -> list[Record]:
    """The records."""
    return [item for item in items if isinstance(item, Record)]


def dropped(items: Iterable[Record | Dropped]) -> dict[str, int]:
    """Counts of data that is not imported, by kind."""
    counts: Counter[str] = Counter()
    for item in items:
        if isinstance(item, Dropped):
            counts[item.kind] += item.count
    return dict(+counts)
