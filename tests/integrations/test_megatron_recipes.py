"""Models as recipes build them: layers that differ, hybrid models, layers for multi-token prediction beside others."""

from __future__ import annotations

import pytest

from helpers.megatron_recipes import RECIPES
from helpers.megatron_runs import Layout, MegatronCase, compare_runs
from helpers.rank_pool import on_ranks

LAYOUTS = {"EP 2": Layout(2, 2), "PP 2 x EP 2": Layout(4, 2, pipeline=2)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_train_as_megatron_s_own(recipe: str, layout: str) -> None:
    if "/" in RECIPES[recipe].pattern:
        pytest.importorskip("megatron.core.models.hybrid", reason="this Megatron has no hybrid models with MTP layers")
    cases = [MegatronCase(double=True, recipe=recipe), MegatronCase(double=True, recipe=recipe, live="quota")]
    on_ranks(compare, (LAYOUTS[layout], cases), ranks=LAYOUTS[layout].ranks, patched="megatron")


def compare(layout: Layout, cases: list[MegatronCase]) -> None:
    assert max(compare_runs(layout, cases)) < 1e-11
