"""State of the user while experts move: state dicts, averages of weights, functions that are called.

Each test compares the model in the session with one whole model, or expects an error on all ranks.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.moe_model import Shape, TinyMoE, matches
from helpers.moved_experts import (
    MIXED,
    SHAPES,
    adamw,
    again,
    change,
    error_of,
    homes,
    momentum_error,
    move,
    saved,
    train,
)
from helpers.planned_steps import make
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.planner import Placement
from trimtab.runtime import Session, gated_experts


def load_after_refusal(session: Session, model: TinyMoE, state: dict[str, torch.Tensor], reference: TinyMoE) -> None:
    """Load a state dict with experts in other rows, as the error says."""
    change(model)
    with pytest.raises(RuntimeError, match=r"experts have moved.*session\.move_to_saved"):
        model.load_state_dict(state)
    session.move_to_saved(model, state)
    model.load_state_dict(state)
    assert error_of(model, reference) < 1e-6


@SHAPES
@runs_on_ranks()
def test_a_state_dict_with_moved_experts_is_loaded_right_or_refused_in_another_run(shape: Shape) -> None:
    session, model, reference = make(shape=shape)
    move(session, 2)
    move(session, 3)
    state = saved(model)
    assert not any("experts_of_rows" in name for name in session.logical_state_dict(model))
    other_session, other, _ = make(shape=shape)
    load_after_refusal(other_session, other, state, reference)
    move(other_session, 4)
    assert error_of(other, reference) < 1e-6
    other_session.logical.load_weights(other, session.logical_state_dict(model))
    assert error_of(other, reference) < 1e-6


@runs_on_ranks()
def test_state_dicts_of_other_ranks_are_refused() -> None:
    session, model, _ = make()
    move(session, 5)
    state = saved(model)
    name = next(name for name in state if "experts_of_rows" in name)
    state[name] = state[name].reshape(4, 2)
    with pytest.raises(InputError, match="was saved with experts on 4 ranks, 2 on each; here are 2"):
        session.move_to_saved(model, state)


class OneExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(3, 4, bias=False)


@runs_on_ranks()
def test_experts_that_are_modules_refuse_rows_of_others() -> None:
    session, model = Session(num_experts=4), nn.ModuleList(OneExpert() for _ in range(2))
    session.add_layer([[e.up.weight for e in model], [e.down.weight for e in model]], gated_experts())  # type: ignore[union-attr, misc]
    state = saved(model)
    session.move(Placement(np.array([[0, 1, 0, 1]], np.int16)))
    moved = saved(model)
    assert any("experts_of_rows" in name for name in moved)
    with pytest.raises(RuntimeError, match="experts have moved"):
        model.load_state_dict(state)
    session.move_to_saved(model, state)
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="experts have moved"):
        model.load_state_dict(moved)


@runs_on_ranks()
def test_a_module_that_gets_experts_later_saves_their_rows() -> None:
    session, model, _ = make()
    move(session, 6)
    again = nn.Module()
    again.gate_up = model.moe_blocks()[0].gate_up
    rows_RH = again.state_dict()["gate_up.experts_of_rows"]
    assert rows_RH.tolist() == session.homes[0].places.experts_RH.tolist()
    # It may get other parameters then, and experts of a session need no module.
    again.gate_up = nn.Parameter(torch.zeros(1))
    del model.moe_blocks()[1].gate_up
    session.live_micro_step().__enter__()


@SHAPES
@runs_on_ranks()
def test_optimizer_state_from_before_a_move_is_refused(shape: Shape) -> None:
    session, model, reference = make(shape=shape)
    optimizer, expected = adamw(model), adamw(reference)
    session.register_optimizers(optimizer)
    train(session, model, reference, 1, optimizer, expected)
    weights, state = saved(model), copy.deepcopy(optimizer.state_dict())
    move(session, 7)
    with pytest.raises(RuntimeError, match=r"state of AdamW .*experts have moved.*session\.move_to_saved"):
        optimizer.load_state_dict(state)
    state_now = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state_now)
    session.move_to_saved(model, weights)
    optimizer.load_state_dict(state)
    assert momentum_error(model, [optimizer], reference, expected) < 1e-5
    with pytest.raises(RuntimeError, match="experts have moved"):
        optimizer.load_state_dict(state_now)


@runs_on_ranks()
def test_state_moves_until_it_is_not_used_any_more() -> None:
    session, model, reference = make()
    old, new = saved(model), saved(model)
    end = session.register_state(model, old)
    session.register_state(model, new)
    end()
    end()
    before = {name: value.clone() for name, value in old.items()}
    old_values = dict(old)
    old.clear()
    move(session, 3)
    for name, _, whole, mine in matches(model, reference):
        assert torch.equal(new[name], whole[mine]), name
        assert torch.equal(old_values[name], before[name]), name


@runs_on_ranks()
def test_modules_that_are_frozen_from_garbage_collection_are_found() -> None:
    session, model = Session(num_experts=4), nn.Module()
    # Without torch's hook on registration.
    model._parameters.update(up=nn.Parameter(torch.randn(2, 6, 4)), down=nn.Parameter(torch.randn(2, 4, 3)))
    gc.freeze()
    try:
        session.add_layer(list(model.parameters()), gated_experts())
        session.move(Placement(np.array([[1, 0, 1, 0]], np.int16)))
        assert {"up.experts_of_rows", "down.experts_of_rows"} < model.state_dict().keys()
    finally:
        gc.unfreeze()


@runs_on_ranks()
def test_state_that_does_not_fit_is_refused_on_all_ranks() -> None:
    session, model, reference = make(shape=MIXED)
    average = saved(model)
    with pytest.raises(InputError, match="no tensors under the names of the experts' parameters, such as 'blocks"):
        session.register_state(model, {"module." + name: value for name, value in average.items()})
    partial_list = {name: value for name, value in average.items() if not name.endswith("down.0")}
    with pytest.raises(InputError, match="MoE layer 0: register_state\\(\\) was given only some of its experts"):
        session.register_state(model, partial_list)
    wrong = average | {"blocks.1.gate_up": average["blocks.1.gate_up"][1:]}
    with pytest.raises(InputError, match=r"'blocks\.1\.gate_up' has shape"):
        session.register_state(model, wrong)
    session.register_state(model, average)
    if session.rank == 1:
        average["blocks.0.gate_up"] = torch.zeros(3)
    with pytest.raises(InputError, match=r"'blocks.0.gate_up' has shape \[3\]"):
        move(session, 8)
    assert error_of(model, reference) < 1e-6


@runs_on_ranks()
def test_functions_are_called_after_moves_in_any_session() -> None:
    session, model, _ = make()
    calls: list[Any] = []

    def call(layer: int, before: Any, after: Any) -> None:
        dist.barrier()
        calls.append((layer, before.experts_RH[session.rank].tolist(), after.experts_RH[session.rank].tolist()))

    session.on_move(call)
    first = session.homes[1].home_experts.tolist()
    home_LE = session.placement.home.copy()
    home_LE[1] = homes(0, 5, 2, 3).home[1]
    session.move(Placement(home_LE))
    now = session.homes[1].home_experts.tolist()
    assert calls == [(1, first, now)]
    session.move(Placement(home_LE))
    assert len(calls) == 1
    again(model).move(homes(0, 1, 2, 3))
    assert calls[1:] == [(1, now, first)]
