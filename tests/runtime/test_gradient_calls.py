"""`finish_gradients`, `clip_gradients` and optimizer steps in unusual loops."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import actions, plans
from helpers.actions import update, zero
from helpers.loop import Loop
from helpers.plans import start
from helpers.rank_tests import runs_on_ranks
from helpers.user_actions import change_session
from trimtab.errors import InputError
from trimtab.runtime.gradients import sum_gradients
from trimtab.runtime.state.weight_watch import OptimizerWatch

SUMMED = "summed over ranks already"


@runs_on_ranks()
def test_experts_are_no_replicated_parameters() -> None:
    loop = start()
    update(loop)
    actions.finish(loop)
    for call in (loop.session.finish_gradients, lambda given: loop.session.clip_gradients(given, 1.0)):
        with pytest.raises(InputError, match="include experts of the session"):
            call(loop.model.parameters())


@runs_on_ranks()
def test_clipping_needs_finished_gradients() -> None:
    loop = start()
    update(loop)
    with pytest.raises(RuntimeError, match="needs complete gradients; call finish_gradients"):
        loop.session.clip_gradients(loop.model.replicated(), 1.0)


@pytest.mark.parametrize("between", ["other tensors", "zeroed experts", "clip by hand", "clip, with frozen experts"])
@runs_on_ranks()
def test_adding_to_summed_gradients_is_refused(between: str) -> None:
    """Summed gradients are added to, after an action that could hide it."""
    loop = start()
    dense, experts = loop.model.replicated(), [p for layer in loop.session.homes for p in layer.parameters]
    if between == "clip, with frozen experts":
        for expert in experts:
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
        for expert in experts:
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


@runs_on_ranks()
def test_summed_gradients_are_known_although_one_is_zero() -> None:
    loop = start()
    dense = loop.model.replicated()
    with loop.session.micro_step(0):
        loop.loss(loop.model, loop.rows(0, loop.session.rank))[0].backward()
    loop.session.finish_gradients(dense)
    assert dense[0].grad is not None
    dense[0].grad.zero_()
    with pytest.raises(RuntimeError, match=SUMMED):
        loop.session.finish_gradients(dense)


@runs_on_ranks()
def test_gradient_that_no_rank_has_stays_none() -> None:
    """Optimizers skip parameters without gradient."""
    loop = start()
    update(loop)
    actions.step(loop)
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


def to_main_grad(parameter: torch.nn.Parameter, keeps: bool) -> Any:
    """As frameworks do: a hook on the node that accumulates a gradient adds it to another tensor. Returns the hook, and
    the node, since a new one would have no hook."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    main_grad = torch.zeros_like(parameter)

    def add(*_: object) -> None:
        assert parameter.grad is not None
        main_grad.add_(parameter.grad)
        if not keeps:
            parameter.grad = None

    return node.register_hook(add), node


@pytest.mark.parametrize("steps", [0, 1, 2])
@runs_on_ranks()
def test_a_hook_that_moves_or_copies_gradients_is_refused_in_every_step(steps: int) -> None:
    loop = start()
    for _ in range(steps):
        update(loop)
        actions.step(loop)
    plan = loop.session.step_plan
    for layer, keeps in itertools.product(loop.session.homes, (False, True)):
        has_replicas = bool(len(plan.replicas_of(1, layer.index)))
        hooks = [to_main_grad(expert, keeps) for expert in layer.parameters]
        if has_replicas or not keeps:
            message = "a hook on an expert tensor" if has_replicas else "a hook has moved the gradient"
            with pytest.raises(RuntimeError, match=f"MoE layer {layer.index}: {message}"):
                update(loop, 1)
        for hook, _ in hooks:
            hook.remove()
        zero(loop)
    update(loop, 2)
    actions.step(loop)


@runs_on_ranks()
def test_hooks_of_earlier_sessions_do_not_pile_up() -> None:
    loop = start()
    for seed in (4, 5):
        update(loop)
        actions.step(loop)
        change_session(loop, seed)
    update(loop)
    expert = loop.session.homes[0].parameters[0]
    assert len(expert._post_accumulate_grad_hooks or ()) == 1


@pytest.mark.parametrize("which", ["dense", "experts", "an expert tensor"])
@runs_on_ranks()
def test_frozen_tensors_may_keep_their_last_gradients(which: str) -> None:
    loop = start()
    update(loop)
    actions.step(loop, None)
    dense, experts = loop.model.replicated(), [p for layer in loop.session.homes for p in layer.parameters]
    frozen = {"dense": dense[:2], "experts": experts, "an expert tensor": experts[:1]}[which]
    for parameter in frozen:
        parameter.requires_grad_(False)
    for _ in range(2):
        for parameter in loop.model.parameters():
            if parameter.requires_grad:
                parameter.grad = None
        with loop.session.micro_step(0):
            loop.loss(loop.model, loop.rows(0, loop.session.rank))[0].backward()
        loop.session.finish_gradients(dense)
    with pytest.raises(RuntimeError, match=SUMMED):
        loop.session.finish_gradients(dense)


@runs_on_ranks()
def test_sparse_gradients_are_refused() -> None:
    loop = start()
    loop.model.embed.sparse = True
    with loop.session.micro_step(0):
        loop.loss(loop.model, loop.rows(0, loop.session.rank))[0].backward()
    with pytest.raises(InputError, match=r"gradient of a parameter \[11, 4\] is sparse"):
        loop.session.finish_gradients(loop.model.replicated())
    with pytest.raises(InputError, match="is sparse"):
        sum_gradients(loop.model.replicated())


@runs_on_ranks()
def test_parts_in_fsdp_are_no_replicated_parameters() -> None:
    loop = start(sharded=True)
    update(loop)
    with pytest.raises(InputError, match="replicated parameters include DTensors"):
        loop.session.finish_gradients(loop.model.replicated())
    actions.finish(loop)
    with pytest.raises(InputError, match="does not know the gradients of the model's DTensors"):
        loop.session.clip_gradients([], 1.0)


CALLS: dict[str, Callable[[Loop], object]] = {
    "finish_gradients": lambda loop: loop.session.finish_gradients(loop.model.replicated()),
    "micro_step": lambda loop: loop.session.micro_step(0).__enter__(),
    "plan": lambda loop: plans.plan(loop, 5),
    "renumber": lambda loop: plans.renumber(loop, 5),
}


@pytest.mark.parametrize("what", ["finish_gradients", "micro_step", "plan"])
@runs_on_ranks()
def test_the_session_is_not_called_within_a_backward(what: str) -> None:
    loop = start()
    with loop.session.micro_step(0):
        loss = loop.loss(loop.model, loop.rows(0, loop.session.rank))[0]
    loss.register_hook(lambda _: CALLS[what](loop))
    with pytest.raises(RuntimeError, match="can't begin within a backward"):
        loss.backward()


@pytest.mark.parametrize("what", ["micro_step", "plan", "renumber"])
@runs_on_ranks()
def test_plans_and_moves_within_a_micro_step_are_refused(what: str) -> None:
    loop = start()
    with loop.session.micro_step(1), pytest.raises(RuntimeError, match="can't begin while micro-step 1 is open"):
        CALLS[what](loop)


@pytest.mark.parametrize("fused", [False, True])
@runs_on_ranks()
def test_weights_do_not_change_between_forward_and_backward(fused: bool) -> None:
    """A fused step changes neither addresses nor versions."""
    loop = start()
    update(loop)
    actions.finish(loop)
    plan = loop.session.step_plan
    replicas = [len(plan.replicas_of(index, 0)) for index in range(plan.num_micro_steps)]
    actions.forward(loop, replicas.index(max(replicas)), "plain", 2)
    parameters = loop.model.parameters()
    (torch.optim.AdamW(parameters, fused=True) if fused else torch.optim.SGD(parameters, lr=0.1)).step()
    with pytest.raises(RuntimeError, match=r"changed within a micro-step, or between|modified by an inplace"):
        loop.pending.pop(2).loss.backward()


def test_a_session_may_be_collected_in_the_middle_of_an_optimizer_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    seen: list[str] = []

    def collect(holds_experts: Any, _is_registered: bool = False) -> None:
        gc.collect()
        seen.append(f"with experts: {bool(holds_experts)}")

    layer: Any = SimpleNamespace(parameters=[parameter], had=lambda _: False)
    watch = OptimizerWatch(lambda: [layer], collect, collect)
    for _ in range(3):
        other = OptimizerWatch(list, lambda _: None, lambda *_: None)
        # A reference cycle, as in sessions.
        other.itself = other  # type: ignore[attr-defined]
        del other
        torch.optim.SGD([parameter], lr=0.1).step()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert seen == ["with experts: True"] * 6 + ["with experts: False"] * 2
    del watch
