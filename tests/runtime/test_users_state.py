"""State of the user while experts move: state dicts, averages of weights, a second session, optimizers.

Each test compares the model in the session with one whole model, or expects an error on all ranks.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from helpers.equality import relative_error
from helpers.moe_model import ALL_LISTS, Shape, TinyMoE, matches
from helpers.planned_steps import SHAPE, Step, make
from helpers.random_plans import random_placement, random_plan
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from trimtab.errors import InputError
from trimtab.planner import Placement
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.state import moving

LISTED = replace(SHAPE, lists=ALL_LISTS)
MIXED = replace(SHAPE, lists=("down",))
SHAPES = pytest.mark.parametrize("shape", [SHAPE, LISTED, MIXED], ids=["stacks", "lists", "both"])
TOKENS = torch.arange(11).repeat(3)


def homes(*of_first_rank: int) -> Placement:
    """The same homes in all layers, with these experts on rank 0."""
    home_E = np.ones(SHAPE.experts, np.int16)
    home_E[[*of_first_rank]] = 0
    return Placement(np.tile(home_E, (SHAPE.layers, 1)))


def move(session: Session, seed: int) -> None:
    rng = np.random.default_rng(seed)
    session.move(random_placement(rng, SHAPE.layers, SHAPE.experts, session.num_ranks))


def error_of(model: TinyMoE, reference: TinyMoE) -> float:
    """The error of the logits of the model, on live routing."""
    for block in reference.moe_blocks():
        block.recorded_ids = None
    with torch.no_grad():
        return relative_error(model(TOKENS), reference(TOKENS))


def saved(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def change(model: TinyMoE) -> None:
    """Other weights, so that only loading gives the old ones back."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.1)


@SHAPES
@runs_on_ranks()
def test_a_state_dict_from_before_a_move_is_loaded_right_or_refused(shape: Shape) -> None:
    session, model, reference = make(shape=shape)
    state = saved(model)
    move(session, 1)
    change(model)
    with pytest.raises(RuntimeError, match=r"experts have moved.*session\.move_to_saved"):
        model.load_state_dict(state)
    session.move_to_saved(model, state)
    model.load_state_dict(state)
    assert error_of(model, reference) < 1e-6
    assert saved(model).keys() == state.keys()


@SHAPES
@runs_on_ranks()
def test_a_state_dict_with_moved_experts_is_loaded_right_or_refused_in_another_run(shape: Shape) -> None:
    session, model, reference = make(shape=shape)
    move(session, 2)
    move(session, 3)
    state = saved(model)
    assert not any("experts_of_rows" in name for name in session.logical_state_dict(model))
    other_session, other, _ = make(shape=shape)
    change(other)
    with pytest.raises(RuntimeError, match=r"experts have moved.*session\.move_to_saved"):
        other.load_state_dict(state)
    other_session.move_to_saved(other, state)
    other.load_state_dict(state)
    assert error_of(other, reference) < 1e-6
    move(other_session, 4)
    assert error_of(other, reference) < 1e-6
    other_session.logical.load_weights(other, session.logical_state_dict(model))
    assert error_of(other, reference) < 1e-6


@runs_on_ranks()
def test_a_module_puts_the_rows_of_a_state_dict_in_its_order() -> None:
    for shape in (SHAPE, LISTED):
        session, model, reference = make(shape=shape)
        # The same homes by two ways have other rows.
        session.move(homes(0, 5, 2, 3))
        session.move(homes(0, 5, 1, 3))
        state, rows = saved(model), session.homes[0].home_experts.tolist()
        session.move(homes(0, 1, 2, 3))
        session.move(homes(0, 5, 1, 3))
        assert of_all_ranks(session.homes[0].home_experts.tolist() == rows) != [True, True]
        change(model)
        model.load_state_dict(state)
        assert error_of(model, reference) < 1e-6
        # Of Parameters that have one name each, no module can change the order.
        session.move_to_saved(model, state)
        assert session.homes[0].home_experts.tolist() == rows
        model.load_state_dict(state)
        assert error_of(model, reference) < 1e-6


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


def momentum_error(model: TinyMoE, optimizers: list[Any], reference: TinyMoE, expected: Any) -> float:
    """The largest error of the optimizers' state of all parameters."""
    return max(
        relative_error(optimizer.state[parameter]["exp_avg"], expected.state[whole]["exp_avg"][mine])
        for _, parameter, whole, mine in matches(model, reference)
        for optimizer in optimizers
        if parameter in optimizer.state
    )


def train(
    session: Session, model: TinyMoE, reference: TinyMoE, seed: int, *optimizers: Any, moves: bool = False
) -> None:
    """A step of the model in the session and of the reference."""
    step = Step(seed)
    plan = step.plan
    if not moves:
        plan = random_plan(step.rng, step.workload, step.schedule, slots=2, placement=session.placement)
    step.apply(session, plan)
    step.reference_loss(reference).backward()
    step.run(session, model)
    for optimizer in optimizers:
        optimizer.step()
    for each in (model, reference):
        each.zero_grad()


def adamw(model: nn.Module | list[nn.Parameter]) -> torch.optim.AdamW:
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return torch.optim.AdamW(parameters, lr=0.01, eps=0.1)


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


@SHAPES
@runs_on_ranks()
def test_averages_by_name_move_with_the_experts(shape: Shape) -> None:
    session, model, reference = make(shape=shape)
    optimizer, expected = adamw(model), adamw(reference)
    session.register_optimizers(optimizer)
    names = [name for name, _ in model.named_parameters()]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_name = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    anchor = saved(model)
    session.register_state(model, average.module)
    session.register_state(model, by_name)
    session.register_state(model, anchor)
    session.register_state(model, anchor)
    whole_average = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    first = copy.deepcopy(reference)
    for seed in range(4):
        # In many rounds, so that a tensor that is registered twice would move twice.
        with mock.patch.object(moving, "ROUND_BYTES", 1):
            train(session, model, reference, seed, optimizer, expected, moves=True)
        average.update_parameters(model)
        whole_average.update_parameters(reference)
        for name, parameter in model.named_parameters():
            by_name[name] = (
                0.9 * by_name[name] + 0.1 * parameter.detach().double() if seed else parameter.detach().double()
            )
    kept = dict(average.module.named_parameters())
    assert names == list(kept)
    for name, _, whole, mine in matches(model, whole_average.module):  # type: ignore[arg-type]
        assert relative_error(kept[name], whole[mine]) < 1e-5, name
        assert relative_error(by_name[name], whole[mine].double()) < 1e-5, name
    for name, _, whole, mine in matches(model, first):
        assert torch.equal(anchor[name], whole[mine]), name
    # The average's state dicts say which experts they have, and registered tensors are loaded by name.
    state = saved(average.module)
    assert any("experts_of_rows" in name for name in state)
    model.load_state_dict(state)
    assert error_of(model, whole_average.module) < 1e-5  # type: ignore[arg-type]
    model.load_state_dict(anchor)
    assert error_of(model, first) < 1e-6


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


def again(model: TinyMoE, **settings: Any) -> Session:
    """Another session over the experts of a model; the model runs in it."""
    session = Session(**{"num_experts": SHAPE.experts} | settings)
    for block in model.moe_blocks():
        block.layer = session.add_layer(
            [t if isinstance(t, nn.Parameter) else list(t) for t in (block.gate_up, block.down)], gated_experts()
        )
    return session


@SHAPES
@runs_on_ranks()
def test_a_second_session_starts_from_the_present_homes(shape: Shape) -> None:
    first, model, reference = make(shape=shape)
    layers = [block.layer for block in model.moe_blocks()]
    move(first, 9)
    second = again(model)
    assert np.array_equal(second.placement.home, first.placement.home)
    assert error_of(model, reference) < 1e-6
    optimizer, expected = adamw(model), adamw(reference)
    second.register_optimizers(optimizer)
    for seed in range(2):
        train(second, model, reference, seed, expected, optimizer, moves=True)
    assert error_of(model, reference) < 1e-5
    # The first one knows the moves of the second one, also one after the last optimizer step.
    move(second, 12)
    for block, layer in zip(model.moe_blocks(), layers, strict=True):
        block.layer = layer
    assert error_of(model, reference) < 1e-5
    step = Step(5)
    first.plan(step.trace.select(step.schedule.sequences_of(first.rank)), step.schedule)
    with first.micro_step(0):
        pass
    move(second, 10)
    with pytest.raises(RuntimeError, match="experts have moved since the plan was applied"), first.micro_step(0):
        pass
    first.plan(step.trace.select(step.schedule.sequences_of(first.rank)), step.schedule)
    step.reference_loss(reference).backward()
    step.run(first, model)
    for name, parameter, whole, mine in matches(model, reference):
        assert parameter.grad is not None
        assert whole.grad is not None
        assert relative_error(parameter.grad, whole.grad[mine]) < 1e-5, name


@runs_on_ranks()
def test_a_second_session_with_other_ranks_is_refused_while_experts_are_away() -> None:
    first, model, _ = make()
    move(first, 11)
    with pytest.raises(InputError, match="MoE layer 0 have moved in an earlier session"):
        again(model, num_experts=4, groups=2)
    first.move(homes(0, 1, 2, 3))
    again(model, num_experts=4, groups=2)
    with pytest.raises(RuntimeError, match="the experts of MoE layer 0 are in a later session with other ranks"):
        move(first, 11)


@runs_on_ranks()
def test_an_average_can_not_be_in_a_session() -> None:
    session, model, _ = make()
    average = AveragedModel(model)
    session.register_state(model, average.module)
    with pytest.raises(InputError, match="register_state"):
        again(average.module)  # type: ignore[arg-type]


@SHAPES
@runs_on_ranks()
def test_experts_do_not_move_while_an_optimizer_with_state_is_not_registered(shape: Shape) -> None:
    session, model, reference = make(shape=shape)
    up = [p for name, p in model.named_parameters() if "gate_up" in name]
    others = [p for name, p in model.named_parameters() if "gate_up" not in name]
    one, two, expected = adamw(others), adamw(up), adamw(reference)
    session.register_optimizers(one)
    train(session, model, reference, 1, one, two, expected)
    before = session.placement.home
    with pytest.raises(InputError, match="experts can't move: AdamW has state"):
        move(session, 12)
    step = Step(2)
    with pytest.raises(InputError, match="experts can't move: AdamW has state"):
        step.apply(session)
    assert np.array_equal(session.placement.home, before)
    session.register_optimizers(one, two)
    for seed in range(3, 5):
        train(session, model, reference, seed, one, two, expected, moves=True)
    assert momentum_error(model, [one, two], reference, expected) < 1e-5
    # Also in another session.
    with pytest.raises(InputError, match="experts can't move: AdamW, AdamW have state"):
        move(again(model), 12)


@runs_on_ranks()
def test_an_optimizer_with_copied_state_must_be_registered() -> None:
    session, model, reference = make()
    old, expected = adamw(model), adamw(reference)
    session.register_optimizers(old)
    train(session, model, reference, 1, old, expected)
    new = adamw(model)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    move(session, 13)
    step = Step(2, moves=False)
    session.plan(step.trace.select(step.schedule.sequences_of(session.rank)), step.schedule)
    step.run(session, model)
    with pytest.raises(RuntimeError, match=r"AdamW has state of the experts .* session.register_optimizers\(\)"):
        new.step()
    old.step()


@runs_on_ranks()
def test_an_optimizer_without_state_need_not_be_registered() -> None:
    session, model, reference = make()
    for seed in range(2):
        train(session, model, reference, seed, torch.optim.SGD(model.parameters(), lr=0.1),
              torch.optim.SGD(reference.parameters(), lr=0.1))  # fmt: skip
        move(session, seed)
    assert error_of(model, reference) < 1e-5


def shared_with_functions() -> tuple[Session, TinyMoE, TinyMoE]:
    """As `make`, with layers that are added with functions."""
    session, model, reference = make()
    session = Session(num_experts=SHAPE.experts)
    for block in model.moe_blocks():
        block.layer = session.add_layer(lambda block=block: [block.gate_up, block.down], gated_experts())  # type: ignore[misc]
    return session, model, reference


@runs_on_ranks()
def test_parameters_that_were_replaced_in_the_model_are_refused() -> None:
    session, model, reference = make()
    change(model)
    model.load_state_dict(saved(model), assign=True)
    step = Step(3, moves=False)
    step.apply(session)
    with pytest.raises(InputError, match=r"MoE layer 0: 'gate_up' of MoEBlock has been replaced .*function"):
        session.micro_step(0).__enter__()
    # A function returns the new ones.
    session, model, reference = shared_with_functions()
    move(session, 14)
    state = saved(model)
    change(model)
    model.load_state_dict(state, assign=True)
    assert error_of(model, reference) < 1e-6
    # The new Parameters have the experts' places, too: at once, and if torch writes them past `setattr`, when they run.
    assert any("experts_of_rows" in name for name in saved(model))
    for block in model.moe_blocks():
        block._parameters["gate_up"] = nn.Parameter(block.gate_up.detach().clone())  # type: ignore[operator]
    with session.live_micro_step():
        assert error_of(model, reference) < 1e-6
    again(model)
    assert error_of(model, reference) < 1e-6


@runs_on_ranks()
def test_experts_that_no_optimizer_holds_are_reported_on_all_ranks() -> None:
    session, model, _ = make()
    experts = {id(p) for layer in session.layers for p in layer.parameters}
    missing = {id(model.moe_blocks()[1].down)} if session.rank else set()

    def without(ids: set[int]) -> torch.optim.Optimizer:
        return adamw([nn.Parameter(p.detach().clone()) if id(p) in ids else p for p in model.parameters()])

    optimizer = without(missing)
    calls = (
        lambda: session.micro_step(0).__enter__(),
        lambda: session.live_micro_step().__enter__(),
        lambda: session.finish_gradients(model.replicated()),
        lambda: session.plan(step.trace.select(step.schedule.sequences_of(session.rank)), step.schedule),  # type: ignore[has-type]
    )
    for seed, call in enumerate(calls):
        step = Step(seed, moves=False)
        step.apply(session)
        step.run(session, model)
        optimizer.step()
        model.zero_grad()
        with pytest.raises(InputError, match="MoE layer 1: no optimizer holds 1 of 8 trained expert tensors"):
            call()
    # A registered one may have copies of all experts.
    del optimizer
    optimizer = without(experts)
    session.register_optimizers(optimizer)
    step.apply(session)
    step.run(session, model)
    optimizer.step()
    session.micro_step(0).__enter__()


@runs_on_ranks()
def test_optimizers_may_step_in_turn_and_other_models_are_no_concern() -> None:
    session, model, _ = make()
    experts = [p for layer in session.layers for p in layer.parameters]
    dense, of_experts = adamw(model.replicated()), adamw(experts)
    other = nn.Linear(2, 2)
    critic = adamw(other)
    for seed in range(4):
        step = Step(seed, moves=False)
        step.apply(session)
        step.run(session, model)
        other(torch.ones(2)).sum().backward()
        critic.step()
        if seed:
            dense.step()
        if seed == 2:
            of_experts.step()
        model.zero_grad()
    # Updates without an optimizer.
    session, model, _ = make()
    step.apply(session)
    step.run(session, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator, misc]
    critic.step()
    model.zero_grad()
    step.apply(session)
    step.run(session, model)


class Lamb(torch.optim.Optimizer):
    """A trust ratio of whole tensors."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.norm() / p.grad.norm() * p.grad


ELEMENTWISE: tuple[Any, ...] = (
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.SGD(p, lr=0.0),
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.AdamW(p, foreach=False, lr=torch.tensor(0.0)),
    lambda p: torch.optim.AdamW(p, foreach=True),
    lambda p: torch.optim.Adam(p, amsgrad=True, maximize=True),
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adamax,
    torch.optim.Rprop, torch.optim.Adadelta, torch.optim.ASGD,
)  # fmt: skip


@runs_on_ranks()
def test_optimizers_that_mix_the_experts_of_a_stack_are_refused() -> None:
    session, model, _ = make()
    listed, listed_model, _ = make(shape=LISTED)
    state = torch.random.get_rng_state()
    for kind in (torch.optim.Adafactor, Lamb):
        optimizer = kind(model.parameters())
        with pytest.raises(InputError, match=rf"MoE layer 0, expert tensor 0: {kind.__name__} updates an expert by"):
            session.register_optimizers(optimizer)
        assert not optimizer.state
        listed.register_optimizers(kind(listed_model.parameters()))
    # Also at the start of a warm-up.
    with pytest.raises(InputError, match="Lamb updates an expert by"):
        session.register_optimizers(Lamb(model.parameters(), lr=0.0))
    before = saved(model)
    for make_optimizer in ELEMENTWISE:
        optimizer = make_optimizer(model.parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
        optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook of the user was called"))
        session.register_optimizers(optimizer)
        assert not any(
            key != "sum" for values in optimizer.state.values() for key in values if key not in ("step", "sum")
        )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in saved(model).items())


@runs_on_ranks()
def test_lists_move_with_the_state_of_adafactor() -> None:
    session, model, reference = make(shape=LISTED)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    expected = torch.optim.Adafactor(reference.parameters(), lr=0.01)
    session.register_optimizers(optimizer)
    for seed in range(3):
        train(session, model, reference, seed, optimizer, expected, moves=True)
    assert error_of(model, reference) < 1e-5


class Doubled(nn.Module):
    """As the sum of a weight and an adapter."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@runs_on_ranks()
def test_parametrized_experts_are_refused_with_the_cause() -> None:
    holder = nn.Module()
    holder.gate_up, holder.down = nn.Parameter(torch.randn(2, 6, 4)), nn.Parameter(torch.randn(2, 4, 3))
    session = Session(num_experts=4)
    session.add_layer([holder.gate_up, holder.down], gated_experts())
    parametrize.register_parametrization(holder, "gate_up", Doubled())
    with pytest.raises(InputError, match=r"MoE layer 0: 'gate_up' .* is parametrized, as LoRA"):
        session.live_micro_step().__enter__()
    with pytest.raises(InputError, match=r"expert tensor 0 is of type Tensor, not a Parameter; .*parametrize \(?"):
        Session(num_experts=4).add_layer(lambda: [holder.gate_up, holder.down], gated_experts())  # type: ignore[list-item]
