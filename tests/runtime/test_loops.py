"""Supported actions of training loops, and the errors of unsupported ones."""

from __future__ import annotations

import copy
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from helpers import plans, user_actions
from helpers.actions import backward, finish, forward, live, update, zero
from helpers.equality import relative_error
from helpers.plans import start
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.ranks.lockstep import Lockstep


@runs_on_ranks()
def test_backward_may_run_on_another_thread() -> None:
    loop = start()
    with ThreadPoolExecutor(1) as other:
        for run in ("reentrant checkpoint", "nested reentrant checkpoint", "checkpoint"):
            live(loop, 5, run, 0)
            forward(loop, 1, run, 1)
            for number in (0, 1):
                other.submit(backward, loop, number).result()
        with loop.session.micro_step(0):
            call = other.submit(loop.loss, loop.model, loop.rows(0, loop.session.rank))
            with pytest.raises(RuntimeError, match="by another thread than the one that opened the micro-step"):
                call.result()
        zero(loop)
        plans.plan(loop, 6)
    # Another thread may run the next plan.
    with ThreadPoolExecutor(1) as other:
        other.submit(forward, loop, 0, "reentrant checkpoint", 2).result()
        other.submit(backward, loop, 2).result()


@pytest.mark.parametrize("started_at", [0, 40, 2000])
@pytest.mark.parametrize("run", ["reentrant checkpoint", "nested reentrant checkpoint"])
@runs_on_ranks()
def test_a_layer_of_a_thread_that_has_ended_is_not_recomputed_without_its_micro_step(run: str, started_at: int) -> None:
    """Whether its number is one that the next thread has too, in a micro-step or outside of all, or is not."""
    loop = start()

    def nodes(count: int) -> None:
        value = torch.ones((), requires_grad=True)
        for _ in range(count):
            value = value + 1

    def late() -> None:
        nodes(started_at)
        forward(loop, 0, run, 0)

    def next_step() -> None:
        nodes(20)
        plans.plan(loop, 6)
        forward(loop, 0, run)
        nodes(400)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(late).result()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(next_step).result()
        error = thread.submit(loop.pending.pop(0).loss.backward).exception()
    assert isinstance(error, RuntimeError)
    assert "after another plan was applied" in str(error)


@runs_on_ranks()
def test_new_memory_at_the_same_address_is_detected() -> None:
    """Other values in new memory at the same address, as an allocator may return it."""
    loop = start()
    buffers = [parameter.data.numpy().copy() for parameter in loop.model.parameters()]
    for parameter, buffer in zip(loop.model.parameters(), buffers, strict=True):
        parameter.data = torch.from_numpy(buffer)
    forward(loop, 0, number=1)
    for parameter, buffer in zip(loop.model.parameters(), buffers, strict=True):
        address = parameter.data_ptr()
        parameter.data = torch.empty(0, dtype=torch.float64)
        buffer *= 2
        parameter.data = torch.from_numpy(buffer)
        assert parameter.data_ptr() == address
    with torch.no_grad():
        for parameter in loop.reference.parameters():
            parameter.mul_(2)
    forward(loop, 0, number=2)


@runs_on_ranks()
def test_experts_that_were_replaced_or_copied_are_refused() -> None:
    loop = start()
    copied = copy.deepcopy(loop.model)
    assert not set(map(id, copied.parameters())) & set(map(id, loop.model.parameters()))
    with pytest.raises(RuntimeError, match="this model is a copy of one whose experts are in a session"):
        copied(loop.tokens)
    loop.model.load_state_dict({k: v.clone() for k, v in loop.model.state_dict().items()}, assign=True)
    with pytest.raises(InputError, match="the model has 0 of the session's"):
        loop.session.replicated_parameters(loop.model)


@runs_on_ranks()
def test_ids_are_those_that_route_returned() -> None:
    loop = start()
    layer, rows, top_k = loop.session.layers[0], len(loop.rows(0, loop.session.rank)), loop.model.moe_blocks()[0].top_k
    with loop.session.micro_step(0):
        ids = layer.route(torch.zeros(rows, top_k, dtype=torch.int64))
        ids.add_(0)
        with pytest.raises(RuntimeError, match="other expert ids than its route"):
            layer(torch.zeros(rows, 4, dtype=torch.float64), ids, torch.ones(rows, top_k, dtype=torch.float64))


@runs_on_ranks()
def test_a_wait_may_be_interrupted() -> None:
    """The result of an interrupted wait is not taken for that of the next one."""
    loop = start()
    lockstep = Lockstep(loop.session.topology, num_experts=4, slots_per_rank=1, max_values=0)
    gate, done = threading.Event(), list[bool]()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def end_later() -> None:
        done.append(not threading.Event().wait(0.2))

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    with pytest.raises(KeyboardInterrupt):
        lockstep.wait(gate.wait)
    signal.signal(signal.SIGALRM, before)
    gate.set()
    lockstep.wait(end_later)
    assert done == [True]


@runs_on_ranks()
def test_layers_outside_micro_steps_are_counted() -> None:
    loop = start()

    def counted() -> float:
        return loop.session.take_metrics()["moe/live_layer_calls"]

    forward(loop, 0)
    assert counted() == 0
    live(loop, 5, "plain", None)
    assert counted() == len(loop.session.layers)


@runs_on_ranks()
def test_other_ways_to_differentiate() -> None:
    """Replica gradients are added to `.grad`; a backward without accumulation into it is refused."""
    loop = start(4)
    layer = max(loop.session.layers, key=lambda layer: len(loop.session.step_plan.replicas_of(0, layer.index)))
    expert, experts = layer.parameters[0], [p for each in loop.session.layers for p in each.parameters]

    def loss() -> torch.Tensor:
        with loop.session.micro_step(0):
            return loop.loss(loop.model, loop.rows(0, loop.session.rank))[0]

    for inputs in ([expert], list(loop.model.parameters())):
        with pytest.raises(RuntimeError, match=r"torch.autograd.grad\(\) would miss"):
            torch.autograd.grad(loss(), inputs)
    with pytest.raises(RuntimeError, match=r"backward\(inputs=...\) with expert tensors alone"):
        loss().backward(inputs=[expert])
    hooks = (
        lambda: expert.register_hook(lambda g: g * 2),
        lambda: expert.register_post_accumulate_grad_hook(lambda p: None),
    )
    for register in hooks:
        handle = register()
        with pytest.raises(RuntimeError, match="a hook on an expert tensor"):
            loss().backward()
        handle.remove()
    zero(loop)
    # Gradients of the head or a router alone: none of experts.
    router = loop.model.moe_blocks()[0].router.weight
    for parameter in (loop.model.head.weight, router):
        loss().backward(inputs=[parameter])
        assert parameter.grad is not None
        assert all(p.grad is None for p in experts)
    zero(loop)
    loss().backward(create_graph=True)
    assert router.grad is not None
    with pytest.raises(RuntimeError, match="once_differentiable"):
        router.grad.sum().backward()
    zero(loop)
    update(loop)
    finish(loop)


@runs_on_ranks()
def test_memory_of_parameters_is_not_kept() -> None:
    loop = start()
    update(loop)
    memory = [StorageWeakRef(p.data.untyped_storage()) for p in loop.model.parameters()]
    for parameter in loop.model.parameters():
        parameter.data = parameter.data.clone()
    assert all(ref.expired() for ref in memory)


@runs_on_ranks()
def test_parameters_may_be_replaced_by_others() -> None:
    """New parameters in the module, in a layer that was added with a function."""
    session = Session(num_experts=4, verify_weights=False)
    torch.manual_seed(0)
    holder = torch.nn.Module()
    whole = [torch.randn(4, 8, 4), torch.randn(4, 4, 4)]
    holder.gate_up, holder.down = (torch.nn.Parameter(w[session.home_experts].clone()) for w in whole)
    layer = session.add_layer(lambda: list(holder.parameters()), gated_experts())
    hidden, ids, weights = torch.randn(3, 4), torch.tensor([[0], [2], [3]]), torch.ones(3, 1)
    before = layer(hidden, ids, weights)
    holder.down = torch.nn.Parameter(holder.down.detach() * 2)
    after = layer(hidden, ids, weights)
    assert relative_error(after, 2 * before) < 1e-6
    after.sum().backward()
    assert holder.down.grad is not None
    holder.down = torch.nn.Parameter(holder.down.detach().double())
    with pytest.raises(InputError, match=r"expert tensor 1 was added as \[2, 4, 4\] torch.float32"):
        session.live_micro_step(positions=torch.arange(3)).__enter__()


@runs_on_ranks()
def test_verify_weights_detects_hidden_changes() -> None:
    loop = start(verify_weights=True)
    for checked in (None, "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRIMTAB_VERIFY_WEIGHTS", raising=False)
            if checked:
                patch.setenv("TRIMTAB_VERIFY_WEIGHTS", checked)
            assert Session(num_experts=4).settings.verify_weights is (checked is not None)
            assert Session(num_experts=4, mode="shadow").settings.verify_weights
            assert not Session(num_experts=4, mode="shadow", verify_weights=False).settings.verify_weights
    user_actions.write(loop, "unnoticed")
    forward(loop, 0)
    # One sampled element of one expert, on one rank.
    if loop.session.rank == 1:
        loop.session.layers[1].parameters[1].data[1].view(-1)[0] += 1
    with pytest.raises(RuntimeError, match=r"MoE layer 1: tensor 1 of expert \d changed") as caught:
        loop.session.micro_step(0).__enter__()
    assert str(caught.value).startswith("rank 1: " if loop.session.rank == 0 else "MoE layer 1")
