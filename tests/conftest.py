"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.rank_pool import RankPool

# Sessions check sampled weights as each micro-step begins; ranks inherit it.
os.environ.setdefault("TRIMTAB_VERIFY_WEIGHTS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start ranks or a browser are `slow`."""
    for item in items:
        if {"pool", "browser"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks that all tests share, with a dictionary that the tests of one file share."""
    # Most tests do without torch.
    from helpers.rank_pool import shared_pool

    pool = shared_pool(2)
    yield pool
    pool.forget()
