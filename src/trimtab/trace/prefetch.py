"""Prefetch: the next part is made while the last is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Part = TypeVar("Part")


def ahead(parts: Iterable[Part]) -> Iterator[Part]:
    """Yields the same parts, each made in a second thread while its predecessor is used. Parts must not be None."""
    source = iter(parts)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, source, None)
        while (part := coming.result()) is not None:
            coming = pool.submit(next, source, None)
            yield part
