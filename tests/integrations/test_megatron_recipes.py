"""Models as recipes build them: layers that differ, hybrid models, layers for multi-token prediction beside others."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.examples import nightly_except
from helpers.megatron_recipes import RECIPES
from helpers.megatron_renumbering import Pair, compare_checkpoints, save_checkpoints
from helpers.megatron_runs import Layout, MegatronCase, Model, compare_runs, use_layout
from helpers.rank_pool import on_ranks
from trimtab.array_type import Array
from trimtab.errors import InputError

PIPELINE = Layout(4, 2, pipeline=2)
LAYOUTS = {"EP 2": Layout(2, 2), "PP 2 x EP 2": PIPELINE}


def recipes_of_this_megatron() -> list[str]:
    """Hybrid models with MTP layers came with `megatron.core.models.hybrid`."""
    import importlib.util

    has_hybrid = importlib.util.find_spec("megatron.core.models.hybrid") is not None
    return [name for name, recipe in RECIPES.items() if has_hybrid or "/" not in recipe.pattern]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    nightly_except(
        product(recipes_of_this_megatron(), LAYOUTS),
        ("DeepSeek-V3", "EP 2"), ("Qwen3-Next", "PP 2 x EP 2"), ("hybrid", "EP 2"),
    ),
)  # fmt: skip
def test_recipes_train_as_megatron_s_own(recipe: str, layout: str) -> None:
    """With the routing of the whole model on every stage, whose layers are numbered in it."""
    case = MegatronCase(double=True, recipe=recipe, live=None if "PP" in layout else "quota")
    on_ranks(compare, (LAYOUTS[layout], case), ranks=LAYOUTS[layout].ranks, patched="megatron")


def compare(layout: Layout, case: MegatronCase) -> None:
    with mock.patch.object(Model, "record", whole_model(Model.record)):
        assert max(compare_runs(layout, [case])) < 1e-11


def whole_model(record: Any) -> Any:
    """`Model.record` of all stages."""

    def recorded(*args: Any) -> list[Array]:
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
        stages: list[Any] = [None] * group.size()
        dist.all_gather_object(stages, record(*args), group=group)
        return [np.concatenate(parts, axis=1) for parts in zip(*stages, strict=True)]

    return recorded


@pytest.mark.nightly
def test_experts_of_mtp_layers_keep_their_ids_when_others_are_renumbered(tmp_path: Path) -> None:
    """With layers that are not planned among the others."""
    for recipe in ("DeepSeek-V3", "hybrid"):
        case = MegatronCase(distributed_optimizer=True, recipe=recipe)
        on_ranks(train_renumbered, (case,), ranks=4, patched="megatron")
        folder = str(tmp_path / recipe)
        on_ranks(save_checkpoints, (PIPELINE, case, folder, 2), ranks=4, patched="megatron")
        on_ranks(compare_checkpoints, (Layout(4, 4), case, folder), ranks=4, patched="megatron")


def train_renumbered(case: MegatronCase) -> None:
    use_layout(PIPELINE)
    pair = Pair(PIPELINE, case)
    pair.train(3)
    assert pair.renumbered > 0 < pair.replicas
    assert pair.difference() < 1e-5
    pair.session.remove()


def test_what_one_stage_refuses_is_refused_on_all() -> None:
    on_ranks(refuse_on_stages, (), ranks=4, patched="megatron")


def refuse_on_stages() -> None:
    from megatron.core import parallel_state

    from trimtab.integrations.megatron import balance

    use_layout(PIPELINE)
    is_last = parallel_state.get_pipeline_model_parallel_rank() == 1
    model = Model(PIPELINE, MegatronCase(recipe="hybrid"))
    layer = next(model.moe_layers())
    router, number = layer.router, layer.layer_number
    if is_last:
        layer.router = torch.nn.Identity()
    with pytest.raises(InputError, match="MoE layer 6 has a Identity; it should be Megatron's TopKRouter"):
        balance(model.chunks)
    layer.router = router
    for wrong in (4, None):
        if is_last:
            layer.layer_number = wrong
        with pytest.raises(InputError, match=rf"numbers \[4, {wrong}, 8\], and {wrong} is not that of one layer"):
            balance(model.chunks)
    layer.layer_number = number
    session = balance(model.chunks)
    routing = [np.zeros((16, 4, 2), np.int64)] * 4
    with pytest.raises(InputError, match=r"has 4 layers; it should have the 3 MoE layers of the model or the \d of"):
        session.plan(routing, 4)
    session.remove()
    # Frameworks that give each stage its own routes balance a model where there is something to balance.
    if is_last:
        session = balance(model.chunks, routes_of_stage=True)
        with pytest.raises(InputError, match="it should have the 2 MoE layers of the model or the 2 of this rank"):
            session.plan([routing[0][:, :3]] * 4, 4)
        session.remove()
