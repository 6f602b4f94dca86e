"""The ranks of tests of Megatron that keep models for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.rank_pool import RankPool, shared_pool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks on which Megatron is patched, with a dictionary that the tests of one file share."""
    pool = shared_pool(2, "megatron")
    yield pool
    pool.forget()
