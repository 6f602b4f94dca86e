"""Sessions that give their groups and memory back between steps."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from helpers import actions, plans
from helpers.actions import update
from helpers.examples import nightly_except
from helpers.plans import start
from helpers.rank_tests import runs_on_ranks
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
    plans.plan(loop, 1)
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
    plans.renumber(loop, 3)


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
