"""What trains experts: optimizers, and Parameters that replace others.

Each test compares the model in the session with one whole model, or expects an error on all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from helpers.moe_model import Shape, TinyMoE
from helpers.planned_steps import SHAPE, Step, make
from helpers.rank_tests import runs_on_ranks
from helpers.tiny_training import LISTED, SHAPES, adamw, again, change, error_of, momentum_error, renumber, saved, train
from trimtab.errors import InputError, RanksDisagreeError
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.state.optimizer_rows import check_elementwise
from trimtab.runtime.transfer.ring import ReplicaRing


@SHAPES
@runs_on_ranks()
def test_experts_are_not_renumbered_while_an_optimizer_with_state_is_not_registered(shape: Shape) -> None:
    session, model, reference = make(shape=shape)
    up = [p for name, p in model.named_parameters() if "gate_up" in name]
    others = [p for name, p in model.named_parameters() if "gate_up" not in name]
    one, two, expected = adamw(others), adamw(up), adamw(reference)
    session.register_optimizers(one)
    train(session, model, reference, 1, one, two, expected)
    with pytest.raises(InputError, match="experts can't be renumbered: AdamW has state"):
        renumber(session, 12)
    assert session.numbering is None
    session.register_optimizers(one, two)
    for seed in range(3, 5):
        train(session, model, reference, seed, one, two, expected)
    assert momentum_error(model, [one, two], reference, expected) < 1e-5
    # Also in another session.
    with pytest.raises(InputError, match="experts can't be renumbered: AdamW, AdamW have state"):
        renumber(again(model), 12)
    session.register_optimizers(two, one)
    renumber(session, 12)


@runs_on_ranks()
def test_experts_are_not_renumbered_with_an_optimizer_of_copies() -> None:
    session, model, _ = make()
    masters = [parameter.detach().clone().double() for parameter in model.parameters()]
    session.register_optimizers(torch.optim.SGD(masters, lr=0.1))
    with pytest.raises(InputError, match=r"no registered optimizer holds all trained expert tensors of MoE layer 0"):
        renumber(session, 1)
    # Of one tensor alone, too, unless it is not trained.
    one = model.moe_blocks()[1].down
    session.register_optimizers(torch.optim.SGD([p for p in model.parameters() if p is not one], lr=0.1))
    with pytest.raises(InputError, match=r"no registered optimizer holds all trained expert tensors of MoE layer 1"):
        renumber(session, 1)
    one.requires_grad_(False)
    renumber(session, 1)


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
    step = Step(3)
    step.apply(session)
    with pytest.raises(InputError, match=r"MoE layer 0: 'gate_up' of MoEBlock has been replaced .*function"):
        session.micro_step(0).__enter__()
    # A function returns the new ones.
    session, model, reference = shared_with_functions()
    state = saved(model)
    change(model)
    model.load_state_dict(state, assign=True)
    assert error_of(model, reference) < 1e-6
    for block in model.moe_blocks():
        block._parameters["gate_up"] = nn.Parameter(block.gate_up.detach().clone())  # type: ignore[operator]
    with session.live_micro_step():
        assert error_of(model, reference) < 1e-6
    again(model)
    assert error_of(model, reference) < 1e-6


@pytest.mark.parametrize("zeroes", ["optimizer", "model"])
@pytest.mark.parametrize("registers", [False, True])
@runs_on_ranks()
def test_an_optimizer_of_parameters_that_were_replaced_is_reported(zeroes: str, registers: bool) -> None:
    session, model, _ = shared_with_functions()
    optimizer, other = adamw(model), nn.Linear(2, 2)
    critic = adamw(other)
    if registers:
        session.register_optimizers(optimizer)
    model.load_state_dict(saved(model), assign=True)
    for seed in range(2):
        step = Step(seed)
        step.apply(session)
        step.run(session, model)
        critic.step()
        optimizer.step()
        (optimizer if zeroes == "optimizer" else model).zero_grad()
        if seed:
            with pytest.raises(InputError, match="no optimizer holds the experts' present Parameters: AdamW"):
                session.micro_step(0).__enter__()
        else:
            with pytest.raises(InputError, match="no optimizer holds the experts' present Parameters: AdamW"):
                session.finish_gradients(model.replicated())
            model.zero_grad()


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
        step = Step(seed)
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
        step = Step(seed)
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


@runs_on_ranks()
def test_lost_transfers_are_no_concern_of_other_models() -> None:
    session, model, _ = make()
    step = Step(0)
    step.apply(session)
    step.run(session, model)
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    with mock.patch.object(ReplicaRing, "complete", side_effect=RuntimeError("connection reset")):
        adamw(other).step()
        with pytest.raises(RuntimeError, match="connection reset"):
            adamw(model).step()


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


class Counting(torch.optim.Optimizer):
    """Makes tensors of its own in its first step, as 8-bit optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.steps: dict[str, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps.setdefault("all", torch.zeros(())).add_(1)


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
    # Also at the start of a warm-up.
    for kind in (torch.optim.Adafactor, Lamb, partial(Lamb, lr=0.0)):
        optimizer = kind(model.parameters())
        session.register_optimizers(optimizer)
        with pytest.raises(InputError, match=r"MoE layer 0, expert tensor 0: \w+ updates an expert by"):
            renumber(session, 1)
        assert not optimizer.state
        listed.register_optimizers(kind(listed_model.parameters()))
        renumber(listed, 1)
    before = saved(model)
    for make_optimizer in ELEMENTWISE:
        optimizer = make_optimizer(model.parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
        optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook of the user was called"))
        session.register_optimizers(optimizer)
        check_elementwise(optimizer, session.homes)
        assert not any(
            key != "sum" for values in optimizer.state.values() for key in values if key not in ("step", "sum")
        )
    # What the check of an optimizer makes can be written later.
    counting = Counting(model.parameters())
    with torch.inference_mode():
        session.register_optimizers(counting)
        check_elementwise(counting, session.homes)
    counting.step()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in saved(model).items())


class Switched(torch.optim.SGD):
    """SGD whose option `by_norm` lets it use the norm of a whole tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = parameter.grad.norm() if group["by_norm"] else 1.0
                    parameter.data.sub_(parameter.grad / scale, alpha=group["lr"])


@runs_on_ranks()
def test_an_option_that_lets_an_optimizer_mix_experts_is_noticed() -> None:
    session, model, _ = make()
    optimizer = Switched(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["by_norm"] = False
    session.register_optimizers(optimizer)
    renumber(session, 3)
    optimizer.param_groups[0]["by_norm"] = True
    with pytest.raises(InputError, match="Switched updates an expert by the other experts of its stack"):
        renumber(session, 3)


@pytest.mark.parametrize("differs", ["lr of an expert", "lr of a rank's experts"])
@runs_on_ranks()
def test_experts_whose_optimizers_have_other_settings_are_not_renumbered(differs: str) -> None:
    """An expert that gets another row gets the settings of another one's group."""
    session, model, _ = make(shape=LISTED)
    parameters = list(model.parameters())
    one = list(session.layers[0].parameters)[:1]
    if differs.startswith("lr of a rank"):
        one = [parameter for layer in session.layers for parameter in layer.parameters] if dist.get_rank() else []
    others = [parameter for parameter in parameters if all(parameter is not each for each in one)]
    groups: list[dict[str, Any]] = [{"params": others}]
    if one:
        groups.append({"params": one, "lr": 0.0})
    session.register_optimizers(torch.optim.SGD(groups, lr=0.1))
    words = "the parameter group of MoE layer 0, expert tensor 0 is |optimizer state of MoE layer 0"
    with pytest.raises((InputError, RanksDisagreeError), match=words):
        renumber(session, 3)


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
