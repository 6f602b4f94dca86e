"""Sessions that give their groups and memory back between steps, and passes with the weights of another model."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from helpers import actions, plans
from helpers.actions import update
from helpers.examples import nightly_except
from helpers.loop import Loop
from helpers.moe_model import TinyMoE
from helpers.plans import start
from helpers.rank_tests import runs_on_ranks
from helpers.user_actions import load_by_position
from trimtab.planner import Placement
from trimtab.runtime import Session, gated_experts


def kept() -> tuple[int, int, int]:
    """Process groups, threads, and bytes of tensors of this process."""
    gc.collect()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if _is_tensor(t)}
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task")), sum(storages.values())


def _is_tensor(value: object) -> bool:
    return issubclass(type(value), torch.Tensor)


@pytest.mark.parametrize(("seed", "rounds"), nightly_except([(3, 20), (4, 6), (5, 6)], (5, 6)))
@runs_on_ranks()
def test_steps_after_suspension_are_right_and_keep_nothing(seed: int, rounds: int) -> None:
    # On a GPU backwards have a thread, which stays.
    torch.ones((), requires_grad=True).backward()
    _, threads_before, _ = kept()
    loop, sizes = start(seed), []
    for number in range(rounds):
        if number:
            plans.plan(loop, number)
        update(loop, number % 3)
        actions.step(loop)
        loop.session.suspend()
        loop.session.suspend()
        sizes.append(kept())
        if number % 3 == 0:
            # Without a plan the session goes on, too.
            actions.live(loop, number, "plain", 2)
            actions.backward(loop, 2)
            actions.step(loop)
            loop.session.suspend()
    groups, threads, nbytes = zip(*sizes, strict=True)
    # The default group alone.
    assert set(groups) == {1}
    assert len(set(threads)) == 1
    assert threads[0] <= threads_before
    # Traces have different numbers of tokens.
    assert max(nbytes) < 1.05 * min(nbytes), nbytes


@runs_on_ranks()
def test_backwards_after_suspension_are_refused() -> None:
    loop = start()
    actions.forward(loop, 0, "plain", 1)
    actions.live(loop, 0, "plain", 2)
    loop.session.suspend()
    for number, cause in (
        (1, r"backward\(\) before .*suspend"),
        (2, "was suspended between a forward and its backward"),
    ):
        with pytest.raises(RuntimeError, match=cause):
            loop.pending.pop(number).loss.backward()
    actions.zero(loop)
    plans.plan(loop, 1)
    update(loop)
    actions.step(loop)


RUNS = {"plain": "between the forward", "checkpoint": "another plan was applied", "reentrant checkpoint": "recomputed"}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("suspends", [False, True])
@runs_on_ranks()
def test_planned_backwards_are_refused_when_the_session_goes_on(run: str, suspends: bool) -> None:
    loop = start()
    actions.forward(loop, 0, run, 1)
    if suspends:
        loop.session.suspend()
    plans.plan(loop, 1, moves=False)
    with pytest.raises(RuntimeError, match=RUNS[run]):
        loop.pending.pop(1).loss.backward()


@runs_on_ranks()
def test_a_session_goes_on_with_groups_that_replace_destroyed_ones() -> None:
    loop = start()
    update(loop)
    actions.step(loop)
    loop.session.suspend()
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=PrefixStore("again", store), rank=rank, world_size=ranks)
    for seed in range(2):
        plans.plan(loop, seed)
        update(loop)
        actions.step(loop)
    plans.move(loop, 3)


@runs_on_ranks()
def test_closed_sessions_keep_no_groups() -> None:
    """Ranks may collect their garbage at different times."""
    closed = Session(num_experts=8)
    closed.close()
    kept = [closed] * dist.get_rank()
    del closed
    gc.collect()
    loop = start()
    loop.session.suspend()
    plans.plan(loop, 1)
    update(loop)
    actions.step(loop)
    assert len(kept) == dist.get_rank()


@runs_on_ranks(4)
def test_gradients_before_suspension_are_finished_after_it() -> None:
    session = Session(num_experts=4, groups=2)
    experts = [torch.nn.Parameter(torch.ones(2, *size)) for size in ((8, 4), (4, 4))]
    layer = session.add_layer(experts, gated_experts())
    layer(torch.ones(3, 4), torch.tensor([[0], [2], [3]]), torch.ones(3, 1)).sum().backward()
    before = [parameter.grad.clone() for parameter in experts if parameter.grad is not None]
    session.suspend()
    optimizer = torch.optim.SGD(experts, lr=0.1)
    with pytest.raises(RuntimeError, match="not summed over expert-parallel groups"):
        optimizer.step()
    session.finish_gradients()
    for parameter, gradient in zip(experts, before, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)  # type: ignore[arg-type]
    optimizer.zero_grad()
    layer(torch.ones(3, 4), torch.tensor([[0], [2], [3]]), torch.ones(3, 1)).sum().backward()
    session.close()
    with pytest.raises(RuntimeError, match="not summed over expert-parallel groups"):
        optimizer.step()
    optimizer.zero_grad()
    session.close()
    # The experts may be in another session.
    optimizer.step()


@runs_on_ranks(4)
def test_groups_of_other_sessions_stay() -> None:
    loop, other = start(), Session(num_experts=8, groups=2)
    pair = Session(num_experts=8, group=other.topology.experts)
    other.suspend()
    update(loop)
    actions.step(loop)
    for session in (pair, other):
        session.add_layer([torch.nn.Parameter(torch.ones(4, 2, 2))], lambda weights, rows, groups: rows)
        session.plan_micro_steps([torch.zeros(3, 1, 1, dtype=torch.int64)])


def at_other_homes(seed: int) -> tuple[Loop, TinyMoE, list[torch.Tensor]]:
    """A loop whose experts have moved, another whole model, and the loop's weights."""
    loop = start(seed)
    plans.move(loop, seed)
    update_and_step(loop, seed)
    assert any(not layer.known.are_first for layer in loop.session.homes)
    other = copy.deepcopy(loop.reference)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    return loop, other, [p.detach().clone() for p in loop.model.parameters()]


def update_and_step(loop: Loop, seed: int) -> None:
    plans.plan(loop, seed, moves=False)
    update(loop)
    actions.step(loop)


def restore(loop: Loop, weights: list[torch.Tensor]) -> None:
    for parameter, value in zip(loop.model.parameters(), weights, strict=True):
        parameter.data.copy_(value)


def live_pass(loop: Loop, in_micro_step: bool) -> torch.Tensor:
    with torch.no_grad(), loop.session.live_micro_step() if in_micro_step else nullcontext():
        logits: torch.Tensor = loop.model(loop.tokens[loop.rows(0, loop.session.rank)])
    return logits


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("in_micro_step", [True, False])
@runs_on_ranks()
def test_such_a_pass_at_other_homes_is_refused(seed: int, in_micro_step: bool) -> None:
    loop, other, mine = at_other_homes(seed)
    live_pass(loop, in_micro_step)
    load_by_position(loop.model, other, loop.session.home_experts.tolist())
    replaced = r"were replaced while .* enter session.first_homes\(\)"
    with pytest.raises(RuntimeError, match=replaced):
        live_pass(loop, in_micro_step)
    for trains, micro_step in ((True, loop.session.live_micro_step()), (False, loop.session.micro_step(0))):
        with pytest.raises(RuntimeError, match=replaced), torch.set_grad_enabled(trains), micro_step:
            pass
    restore(loop, mine)
    live_pass(loop, in_micro_step)
    update_and_step(loop, seed + 1)
    # New weights of the same model, which optimizers don't know.
    with torch.no_grad():
        for parameter in (*loop.model.parameters(), *loop.reference.parameters()):
            parameter.data.mul_(0.5)
    loop.session.weights_changed()
    actions.live(loop, seed, "plain", None)
    # While some of them are offloaded.
    for layer in loop.session.layers:
        parameter, values = layer.parameters[0], layer.parameters[0].detach().clone()
        parameter.data.untyped_storage().resize_(0)
        loop.session.weights_changed()
        parameter.data = values
    actions.live(loop, seed, "plain", None)


@runs_on_ranks()
def test_trained_weights_are_loaded_within_first_homes_for_its_end() -> None:
    """Also where a rank has its first experts in other rows."""
    loop = start(0)
    session = loop.session
    before = session.placement.home.copy()
    num_homes = session.num_experts // session.num_ranks
    for seed in range(20):
        plans.move(loop, seed)
    session.move(Placement(before[:, np.r_[num_homes : session.num_experts, :num_homes]].copy()))
    update_and_step(loop, 3)
    mine = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with pytest.raises(OSError, match="no such weights"), session.first_homes():
        raise OSError("no such weights")
    with session.first_homes():
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.data.zero_()
        live_pass(loop, False)
        loop.model.load_state_dict(mine)
    loop.compare()
    update_and_step(loop, 4)


@runs_on_ranks()
def test_steps_of_other_models_do_not_hide_weights_of_another_model() -> None:
    loop, other, _ = at_other_homes(1)
    critic = torch.nn.Parameter(torch.ones(3))
    critic.grad = torch.ones(3)
    torch.optim.SGD([critic], lr=0.1).step()
    load_by_position(loop.model, other, loop.session.home_experts.tolist())
    with pytest.raises(RuntimeError, match=r"enter session.first_homes\(\)"):
        live_pass(loop, True)


ACTIONS: dict[str, Callable[[Loop], object]] = {
    "plan": lambda loop: plans.plan(loop, 7),
    "move": lambda loop: plans.move(loop, 7),
    "planned": lambda loop: actions.forward(loop, 0),
    "gradients": lambda loop: actions.live(loop, 0, "plain", 3),
    "finish": lambda loop: loop.session.finish_gradients(loop.model.replicated()),
    "step": lambda loop: loop.optimizers[1].step(),
    "suspend": lambda loop: loop.session.suspend(),
}


@pytest.mark.parametrize("action", ACTIONS)
@runs_on_ranks()
def test_what_needs_the_trained_model_is_refused_at_first_homes(action: str) -> None:
    loop, _, _ = at_other_homes(1)
    with loop.session.first_homes(), pytest.raises(RuntimeError, match="first_homes"):
        ACTIONS[action](loop)
    update_and_step(loop, 2)
