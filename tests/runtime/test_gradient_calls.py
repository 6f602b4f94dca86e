"""`finish_gradients`, `clip_gradients` and optimizer steps in unusual loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from helpers import any_loop
from helpers.any_loop import Loop
from helpers.rank_pool import RankPool
from trimtab.errors import InputError

State = dict[str, Any]
SUMMED = "summed over ranks already"


def start(state: State) -> Loop:
    any_loop.start(state, 3, False)
    return cast(Loop, state["loop"])


def update(state: State, index: int = 0) -> None:
    any_loop.forward(state, index, "plain", frozenset(), 1, True)


def parameters_of_any_kind(state: State) -> None:
    """Generators and duplicates are accepted; experts are refused."""
    for given in (lambda ps: (p for p in ps), lambda ps: [*ps, *ps]):
        loop = start(state)
        update(state)
        dense = loop.model.replicated()
        loop.session.finish_gradients(given(dense))
        loop.is_finished = True
        any_loop.compare(loop)
        # The first norm is too large to change anything.
        for max_norm in (1e9, 1e-3):
            norm = loop.session.clip_gradients(given(dense), max_norm)
            expected = torch.nn.utils.clip_grad_norm_(loop.reference.parameters(), max_norm)
            assert abs(norm - expected) < 1e-12 * expected
            any_loop.compare(loop)
    with pytest.raises(InputError, match="include experts of the session"):
        loop.session.finish_gradients(loop.model.parameters())
    with pytest.raises(InputError, match="include experts of the session"):
        loop.session.clip_gradients(loop.model.parameters(), 1.0)


def test_replicated_parameters_in_any_form_but_without_experts(pool: RankPool) -> None:
    pool.call(parameters_of_any_kind)


def clip_too_early(state: State) -> None:
    loop = start(state)
    update(state)
    with pytest.raises(RuntimeError, match="needs complete gradients; call finish_gradients"):
        loop.session.clip_gradients(loop.model.replicated(), 1.0)


def test_clipping_needs_finished_gradients(pool: RankPool) -> None:
    pool.call(clip_too_early)


def add_to_finished(state: State, between: str) -> None:
    """Summed gradients are added to, after an action that could hide it."""
    loop = start(state)
    dense = loop.model.replicated()
    if between == "clip, with frozen experts":
        for layer in loop.session.homes:
            for expert in layer.parameters:
                expert.requires_grad_(False)

    def run(index: int) -> None:
        with loop.session.micro_step(index):
            loop.loss(loop.model, loop.rows(index, loop.session.rank))[0].backward()

    run(0)
    loop.session.finish_gradients(dense)
    if between == "other tensors":
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 2
    elif between == "zeroed experts":
        for layer in loop.session.homes:
            for expert in layer.parameters:
                expert.grad = None
    elif between == "clip by hand":
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
    else:
        loop.session.clip_gradients(dense, 1e9)
    run(1)
    with pytest.raises(RuntimeError, match=SUMMED):
        loop.session.finish_gradients(dense)


@pytest.mark.parametrize("between", ["other tensors", "zeroed experts", "clip by hand", "clip, with frozen experts"])
def test_adding_to_summed_gradients_is_refused(pool: RankPool, between: str) -> None:
    pool.call(add_to_finished, between)


def zero_between_forward_and_backward(state: State) -> None:
    for to_none in (True, False):
        loop = start(state)
        update(state)
        any_loop.step(state, None)
        any_loop.forward(state, 1, "plain", frozenset(), 1, False)
        any_loop.zero(state, to_none)
        # The weights changed before the forward, not after it.
        any_loop.backward(state, 1)
        any_loop.finish(state)
        assert loop.is_finished


def test_gradients_may_be_zeroed_between_forward_and_backward(pool: RankPool) -> None:
    pool.call(zero_between_forward_and_backward)


def leave_out_the_head(state: State) -> None:
    """Optimizers skip parameters without gradient."""
    loop = start(state)
    update(state)
    any_loop.step(state, True)
    with loop.session.micro_step(1):
        mine = loop.rows(1, loop.session.rank)
        hidden = loop.model.embed(loop.tokens[mine])
        for block in loop.model.moe_blocks():
            hidden = hidden + block(hidden)
        hidden.sum().backward()
    loop.session.finish_gradients(loop.model.replicated())
    assert loop.model.head.weight.grad is None
    assert loop.model.embed.weight.grad is not None
    before = loop.model.head.weight.detach().clone()
    loop.optimizers[1].step()
    assert torch.equal(before, loop.model.head.weight)


def test_gradient_that_no_rank_has_stays_none(pool: RankPool) -> None:
    pool.call(leave_out_the_head)


def call_within_backward(state: State, what: str) -> None:
    loop = start(state)
    session = loop.session
    mine = loop.rows(0, session.rank)

    def call(_gradient: torch.Tensor) -> None:
        if what == "finish_gradients":
            session.finish_gradients(loop.model.replicated())
        elif what == "micro_step":
            session.micro_step(0).__enter__()
        else:
            any_loop.plan(state, 5, False, "plan")

    with session.micro_step(0):
        loss = loop.loss(loop.model, mine)[0]
    loss.register_hook(call)
    with pytest.raises(RuntimeError, match="can't begin within a backward"):
        loss.backward()


@pytest.mark.parametrize("what", ["finish_gradients", "micro_step", "plan"])
def test_the_session_is_not_called_within_a_backward(pool: RankPool, what: str) -> None:
    pool.call(call_within_backward, what)


def call_within_micro_step(state: State, what: str) -> None:
    loop = start(state)
    calls: dict[str, Callable[[], object]] = {
        "micro_step": lambda: loop.session.micro_step(0).__enter__(),
        "plan": lambda: any_loop.plan(state, 5, True, "plan"),
        "move": lambda: any_loop.move(state, 5),
    }
    with loop.session.micro_step(1), pytest.raises(RuntimeError, match="can't begin while micro-step 1 is open"):
        calls[what]()


@pytest.mark.parametrize("what", ["micro_step", "plan", "move"])
def test_plans_and_moves_within_a_micro_step_are_refused(pool: RankPool, what: str) -> None:
    pool.call(call_within_micro_step, what)


def step_within_micro_step(state: State, make: Callable[..., torch.optim.Optimizer]) -> None:
    loop = start(state)
    update(state)
    any_loop.finish(state)
    plan = loop.session.step_plan
    replicas = [len(plan.replicas_of(index, 0)) for index in range(plan.num_micro_steps)]
    any_loop.forward(state, replicas.index(max(replicas)), "plain", frozenset(), 2, False)
    optimizer = make(loop.model.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"changed within a micro-step, or between|modified by an inplace"):
        loop.pending.pop(2).loss.backward()


def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def test_weights_do_not_change_between_forward_and_backward(pool: RankPool) -> None:
    """A fused step changes neither addresses nor versions."""
    for make in (torch.optim.SGD, fused):
        pool.call(step_within_micro_step, make)
