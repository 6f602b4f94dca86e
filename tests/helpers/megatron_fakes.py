"""Two ranks with Megatron on replacements of Transformer Engine, DeepEP and HybridEP."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from examples.megatron_on_cpu import use_cpu
from helpers.fake_deep_ep import use_deep_ep
from helpers.fake_te import use_extensions
from helpers.megatron_runs import Layout, use_layout
from helpers.rank_pool import RankPool, shared_pool

State = dict[str, Any]
FAKES_LAYOUT = Layout(ranks=2, expert=2)


@pytest.fixture(name="pool")
def pool_with_fakes() -> Iterator[RankPool]:
    """The ranks. The pool starts new ones after a failure."""
    pool = shared_pool(2, "megatron with fakes")
    pool.call(use_fakes)
    yield pool
    pool.forget()


def use_fakes(_state: State) -> None:
    replace_libraries()
    use_layout(FAKES_LAYOUT)


@cache
def replace_libraries() -> None:
    use_cpu()
    use_deep_ep()
    use_extensions()
