"""Ranks whose backward runs on a thread of its own, as on a GPU: `device: thread` of `helpers.cases`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from helpers.backward_thread import EngineOnThread
from helpers.rank_pool import RankPool, shared_pool
from helpers.rank_tests import runs_on_ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks with such a thread."""
    pool = shared_pool(2, "backward thread")
    with mock.patch.object(pool, "ways", "thread"):
        yield pool
        pool.forget()


@runs_on_ranks()
def test_backwards_have_run_on_the_thread(state: dict[str, Any]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    before = engine.count
    torch.ones(1, requires_grad=True).sum().backward()
    assert isinstance(engine, EngineOnThread)
    assert engine.count == before + 1
