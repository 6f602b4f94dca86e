"""Weights and optimizer state of all ranks are saved and loaded on any number of ranks; and those of old versions."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.equality import relative_error
from helpers.moe_model import ALL_LISTS, Shape, TinyMoE
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
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
    weights = {name: value.clone() for name, value in session.whole.weights(model)}
    state = {
        name: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for name, values in session.whole.optimizer_state(model, optimizer)
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
def test_every_rank_loads_its_rows_and_saving_gives_the_same_state() -> None:
    session, model, optimizer = build("AdamW", seed=5)
    session.register_optimizers(optimizer)
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
    session.whole.load_weights(model, weights)
    session.whole.load_optimizer_state(model, optimizer, state)
    for index, block in enumerate(model.moe_blocks()):
        assert block.layer is not None
        mine = block.layer.home_experts
        assert isinstance(block.down, torch.nn.Parameter)
        assert torch.equal(block.down.detach(), weights[f"blocks.{index}.down"][mine])
        rows = expert_state(optimizer, block.down, is_stack=True)
        assert rows.keys() == {"exp_avg", "exp_avg_sq"}
        assert torch.equal(rows["exp_avg"], state[f"blocks.{index}.down"]["exp_avg"][mine])
    assert_equal(whole(session, model, optimizer), (weights, state), 0.0)

    with pytest.raises(InputError, match=r"there is optimizer state of 'head.scale'; this model has no such parameter"):
        session.whole.load_optimizer_state(model, optimizer, {"head.scale": {}})
    for bad, message in (
        (weights | {"blocks.0.down": torch.zeros(9, 8, 6)}, r"'blocks.0.down' has shape \[9, 8, 6\]; .* 8 experts"),
        (weights | {"head.bias": torch.zeros(2)}, r"tensor 'head.bias' has shape \[2\]; this model has \[11\]"),
        ({n: v for n, v in weights.items() if n != "head.bias"}, r"tensor 'head.bias' is missing"),
        (weights | {"extra": torch.zeros(2)}, "there is a tensor 'extra'; this model has none"),
    ):
        with pytest.raises(InputError, match=message):
            session.whole.load_weights(model, bad)

    optimizer.state[model.get_parameter("blocks.1.down")]["step"] = torch.tensor(float(session.rank))
    with pytest.raises(
        InputError, match=r"AdamW: the state of 'blocks.1.down' is .*'step': 1.0.* on rank 1 and .* equal"
    ):
        list(session.whole.optimizer_state(model, optimizer))


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


def move_rows(cells: list[tuple[Any, Any]], rows_RH: torch.Tensor) -> None:
    """Let all ranks' cells, a stack or one for each row, have the values that are in these rows of all."""
    values = [holder[key] for holder, key in cells]
    own = values[0] if len(values) == 1 and values[0].ndim > 2 else torch.stack(values)
    parts = [torch.empty_like(own) for _ in rows_RH]
    dist.all_gather(parts, own)
    moved = torch.cat(parts)[rows_RH[dist.get_rank()]]
    for (holder, key), value in zip(cells, [moved] if own is values[0] else moved, strict=True):
        holder[key] = value


@pytest.mark.parametrize("shape", [SHAPE, LISTED, MIXED], ids=["stacks", "lists", "both"])
@runs_on_ranks()
def test_state_dicts_of_experts_on_other_ranks_are_refused_until_they_are_put_in_order(shape: Shape) -> None:
    """As versions saved them whose experts moved: rows of others, and the ids of all ranks' rows."""
    session, model, optimizer = build("AdamW", 3, shape)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    session.register_optimizers(optimizer)
    expected = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    weights, packed = copy.deepcopy(expected)
    rng = np.random.default_rng(4)
    names = {id(p): (name, number) for number, (name, p) in enumerate(model.named_parameters())}
    for homes in session.homes:
        rows_RH = torch.from_numpy(rng.permutation(shape.experts).reshape(session.num_ranks, -1))
        for tensor in homes.tensors:
            found = [names[id(p)] for p in ([tensor] if isinstance(tensor, torch.Tensor) else tensor)]
            move_rows([(weights, name) for name, _ in found], rows_RH)
            for key in ("exp_avg", "exp_avg_sq"):
                move_rows([(packed["state"][number], key) for _, number in found], rows_RH)
            for name, number in found:
                weights[f"{name}.experts_of_rows"] = rows_RH
                packed["param_groups"][0].setdefault("experts_of_rows", {})[number] = rows_RH
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"was saved while experts were on other ranks.*state_in_order"):
            model.load_state_dict(weights, strict=strict)
    late = OPTIMIZERS["AdamW"](model.parameters())
    late.load_state_dict(packed)
    for call in (late.step, partial(session.register_optimizers, late)):
        with pytest.raises(RuntimeError, match=r"the state of AdamW was saved .*state_in_order"):
            call()
    model.load_state_dict(session.state_in_order(model, weights))
    optimizer.load_state_dict(session.state_in_order(optimizer, packed))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in expected[0].items())
    for number, values in expected[1]["state"].items():
        for key, value in values.items():
            assert torch.equal(optimizer.state_dict()["state"][number][key], value), key
    weights = {name: value[:1] if name.endswith("experts_of_rows") else value for name, value in weights.items()}
    with pytest.raises(InputError, match="was saved with experts on 1 ranks"):
        session.state_in_order(model, weights)
