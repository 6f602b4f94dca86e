"""Prefetch of an iterator's next item in a second thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Part = TypeVar("Part")


def prefetch(parts: Iterable[Part]) -> Iterator[Part]:
    """Yields the same parts; a second thread computes each while its predecessor is used. Parts must not be None."""
    source = iter(parts)
    with ThreadPoolExecutor(1) as pool:
        next_part = pool.submit(next, source, None)
        while (part := next_part.result()) is not None:
            next_part = pool.submit(next, source, None)
            yield part
