"""Weights and optimizer state in logical order are saved and loaded under any homes, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.equality import relative_error
from helpers.moe_model import ALL_LISTS, Shape, TinyMoE
from helpers.random_plans import random_placement
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.planner import Placement
from trimtab.runtime import Session
from trimtab.runtime.state.optimizer_rows import expert_state

SHAPE = Shape(layers=2, experts=8, top_k=2, hidden=8, width=6)
LISTED = replace(SHAPE, lists=ALL_LISTS)
# On 4 ranks, each has one expert.
MIXED = replace(SHAPE, experts=4, lists=("down",))
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def build(name: str, seed: int, shape: Shape = SHAPE) -> tuple[Session, TinyMoE, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    session = Session(num_experts=shape.experts)
    model = TinyMoE(shape, torch.float64)
    model.share(session)
    return session, model, OPTIMIZERS[name](model.parameters())


def whole(session: Session, model: TinyMoE, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Copies on rank 0; empty on other ranks."""
    weights = {name: value.clone() for name, value in session.logical.weights(model)}
    state = {
        name: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for name, values in session.logical.optimizer_state(model, optimizer)
    }
    return weights, state


def assert_equal(actual: tuple[Any, Any], expected: tuple[Any, Any], tolerance: float) -> None:
    if dist.get_rank() != 0:
        return
    assert actual[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert relative_error(actual[0][name], value) <= tolerance, name
    assert {name: values.keys() for name, values in actual[1].items()} == {n: v.keys() for n, v in expected[1].items()}
    for name, values in expected[1].items():
        for key, value in values.items():
            assert actual[1][name][key].dtype is value.dtype, (name, key)
            assert torch.allclose(actual[1][name][key], value, rtol=tolerance, atol=tolerance), (name, key)


@runs_on_ranks()
def test_any_homes_in_any_layer() -> None:
    """Random homes for each layer: every rank loads its rows, and saving gives the same state."""
    session, model, optimizer = build("AdamW", seed=5)
    rng = np.random.default_rng(6)
    session.register_optimizers(optimizer)
    homes_LE = random_placement(rng, SHAPE.layers, SHAPE.experts, session.num_ranks).home
    session.move(Placement(homes_LE))
    torch.manual_seed(7)
    weights = TinyMoE(SHAPE, torch.float64).state_dict()
    state = {
        # Of other dtypes than the parameters; the number of updates is no float64.
        name: {
            "step": torch.tensor(5),
            "updates": torch.tensor((1 << 60) + 1),
            "exp_avg": torch.rand_like(value, dtype=torch.float32),
            "exp_avg_sq": torch.rand_like(value, dtype=torch.bfloat16),
        }
        for name, value in weights.items()
    }
    session.logical.load_weights(model, weights)
    session.logical.load_optimizer_state(model, optimizer, state)
    for index, block in enumerate(model.moe_blocks()):
        assert block.layer is not None
        mine = block.layer.home_experts
        assert set(mine) == set(np.flatnonzero(homes_LE[index] == session.rank))
        assert isinstance(block.down, torch.nn.Parameter)
        assert torch.equal(block.down.detach(), weights[f"blocks.{index}.down"][mine])
        rows = expert_state(optimizer, block.down, is_stack=True)
        assert rows.keys() == {"exp_avg", "exp_avg_sq"}
        assert torch.equal(rows["exp_avg"], state[f"blocks.{index}.down"]["exp_avg"][mine])
    assert_equal(whole(session, model, optimizer), (weights, state), 0.0)
    session.move(random_placement(rng, SHAPE.layers, SHAPE.experts, session.num_ranks))
    assert_equal(whole(session, model, optimizer), (weights, state), 0.0)

    with pytest.raises(InputError, match=r"there is optimizer state of 'head.scale'; this model has no such parameter"):
        session.logical.load_optimizer_state(model, optimizer, {"head.scale": {}})
    for bad, message in (
        (weights | {"blocks.0.down": torch.zeros(9, 8, 6)}, r"'blocks.0.down' has shape \[9, 8, 6\]; .* 8 experts"),
        (weights | {"head.bias": torch.zeros(2)}, r"tensor 'head.bias' has shape \[2\]; this model has \[11\]"),
        ({n: v for n, v in weights.items() if n != "head.bias"}, r"tensor 'head.bias' is missing"),
        (weights | {"extra": torch.zeros(2)}, "there is a tensor 'extra'; this model has none"),
    ):
        with pytest.raises(InputError, match=message):
            session.logical.load_weights(model, bad)

    optimizer.state[model.get_parameter("blocks.1.down")]["step"] = torch.tensor(float(session.rank))
    with pytest.raises(
        InputError, match=r"AdamW: the state of 'blocks.1.down' is .*'step': 1.0.* on rank 1 and .* equal"
    ):
        list(session.logical.optimizer_state(model, optimizer))


@pytest.mark.parametrize(
    ("value", "found"),
    [(torch.zeros(3), r"shape \[3\]"), (torch.zeros(5, 4), r"shape \[5, 4\]"), ([1, 2, 3, 4], "type list")],
)
def test_state_without_expert_rows_is_refused_with_its_name(value: object, found: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 5))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"step": 3, "rate": torch.tensor(0.5), "rows": torch.zeros(4), "basis": value}
    message = rf"SGD keeps 'basis' of {found} for an expert tensor \[4, 5\]; it should be .* have 4 rows"
    with pytest.raises(InputError, match=message):
        expert_state(optimizer, parameter, is_stack=True)
    del optimizer.state[parameter]["basis"]
    assert expert_state(optimizer, parameter, is_stack=True).keys() == {"rows"}
