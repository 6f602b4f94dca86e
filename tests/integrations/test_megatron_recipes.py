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
from helpers.megatron_moves import Pair, compare_checkpoints, save_checkpoints
from helpers.megatron_recipes import RECIPES
from helpers.megatron_runs import Layout, MegatronCase, Model, compare_runs, use_layout
from helpers.rank_pool import on_ranks
from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.expert_places import ExpertPlaces

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
def test_experts_of_mtp_layers_stay_at_home_when_others_move(tmp_path: Path) -> None:
    """Optimizer state moves, and checkpoints have logical order, with layers that are not planned among the others."""
    for recipe in ("DeepSeek-V3", "hybrid"):
        case = MegatronCase(distributed_optimizer=True, recipe=recipe)
        on_ranks(train_with_moves, (case,), ranks=4, patched="megatron")
        folder = str(tmp_path / recipe)
        on_ranks(save_checkpoints, (PIPELINE, case, folder, 2), ranks=4, patched="megatron")
        on_ranks(compare_checkpoints, (Layout(4, 4), case, folder), ranks=4, patched="megatron")


def train_with_moves(case: MegatronCase) -> None:
    use_layout(PIPELINE)
    pair = Pair(PIPELINE, case)
    pair.train(3)
    assert pair.moved > 0 < pair.replicas
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


def test_exported_names_are_those_of_layers_with_experts() -> None:
    """An exporter of a hybrid model may number its layers as another model's."""
    pytest.importorskip("megatron.core")
    from trimtab.integrations.megatron.logical_order import rename_experts

    moved = ExpertPlaces(np.array([1, 0], np.int16), np.zeros(2, np.int64))
    places = {1: moved, 3: ExpertPlaces(np.array([0, 1], np.int16), np.zeros(2, np.int64))}

    def renamed(name: str) -> str:
        return next(rename_experts([(name, torch.ones(2))], places))[0]

    assert renamed("model.layers.1.mlp.experts.0.up_proj.weight") == "model.layers.1.mlp.experts.1.up_proj.weight"
    # Of MTP layers, by their own number and by that behind the last layer.
    for name in (
        "mtp.layers.1.transformer_layer.mlp.experts.linear_fc1.weight0",
        "mtp.layers.0.mtp_model_layer.layers.1.mlp.experts.linear_fc1.weight0",
        "model.layers.4.mlp.experts.0.up_proj.weight",
    ):
        assert renamed(name) == name
    with pytest.raises(InputError, match=r"layers\.2\..* has experts, and layer 2 of the Megatron model has none"):
        renamed("model.layers.2.mlp.experts.0.up_proj.weight")
