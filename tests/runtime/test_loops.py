"""Supported actions of training loops, and the errors of unsupported ones."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from helpers import any_loop, moe_model, user_actions
from helpers.any_loop import backward, finish, forward, live, start, step, update, zero
from helpers.equality import relative_error
from helpers.loop_state import RUNS, Loop
from helpers.moe_model import Shape, TinyMoE
from helpers.planned_steps import rows_of
from helpers.random_plans import random_schedule, random_trace
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.runtime import ExpertWeight, RowGroups, Session, gated_experts
from trimtab.runtime.ranks.lockstep import Lockstep


@pytest.mark.parametrize("run", RUNS[1:])
@runs_on_ranks()
def test_a_checkpointed_layer_runs_again_in_the_micro_step_of_its_first_run(run: str) -> None:
    """Backward outside micro-steps, in an order of pipelines, with live forwards in between."""
    loop = start()
    forward(loop, 0, run, 0)
    forward(loop, 1, run, 1)
    live(loop, 7, run, 2)
    backward(loop, 0)
    forward(loop, 2, run, 3)
    backward(loop, 2)
    backward(loop, 1)
    forward(loop, 0, run)
    backward(loop, 3)
    finish(loop)
    step(loop)


STEP: list[tuple[Any, ...]] = [(update,), (step,)]
ACTIONS: dict[str, Any] = {
    f"memory of parameters, {change.__name__}": [
        *STEP, (change,), (user_actions.onload,), *STEP, *STEP, (change,), (user_actions.onload,), *STEP,
    ]
    for change in (user_actions.repoint, user_actions.offload)
} | {
    f"{name}, set_to_none={to_none}": actions
    for to_none in (False, True)
    for name, actions in {
        "zeroed before gradients are finished": [(update,), (zero, to_none), (update,), (finish,), (step,)],
        "zeroed between forward and backward": [
            (update,), (step, None), (forward, 1, "plain", 1), (zero, to_none), (backward, 1), (finish,),
        ],
        # `finish` asserts the error for gradients that were already summed.
        "summed once": [
            (update,), (finish,), (finish,), (update,), (finish,), (zero, to_none), (finish,), (finish,), (update,),
            (finish,),
        ],
    }.items()
} | {
    f"a backward after a failed one, {run}": [
        (forward, 1, "plain", 1), (any_loop.fail, 0, run, 0, "outside"), (backward, 1), (finish,),
    ]
    for run in ("plain", "reentrant checkpoint")
} | {
    "a micro-step between finished gradients and the step": [
        (update,), (finish,), (forward, 1), (step,), (forward, 1), *STEP,
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", ACTIONS)
@runs_on_ranks()
def test_actions_of_a_loop(what: str) -> None:
    loop = start()
    for action, *arguments in ACTIONS[what]:
        action(loop, *arguments)


AFTER: dict[str, Callable[[Loop], None]] = {
    "plan": lambda loop: any_loop.plan(loop, 5),
    "move": lambda loop: any_loop.move(loop, 5),
    "live": lambda loop: live(loop, 5, "plain", 0),
    "update": lambda loop: update(loop, 1, 0),
}


@pytest.mark.parametrize("after", AFTER)
@runs_on_ranks()
def test_replica_gradients_of_a_failed_backward_are_dropped(after: str) -> None:
    abandoned = 0.0
    for where in ("inside", "outside"):
        loop = start()
        for _ in range(2):
            any_loop.fail(loop, 0, "plain", 0, where)
        AFTER[after](loop)
        update(loop)
        finish(loop)
        abandoned += loop.session.take_metrics()["moe/abandoned_backwards"]
    assert abandoned > 0


@runs_on_ranks()
def test_an_accumulation_without_moe_layers() -> None:
    """A loss without MoE layers, between two zeroings in place."""
    loop = start()
    update(loop)
    loop.session.finish_gradients(loop.model.replicated())
    zero(loop, False)
    dense = loop.model.head
    dense(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    loop.session.finish_gradients(loop.model.replicated())
    assert all(p.grad is not None and (p.grad == 2).all() for p in dense.parameters())
    with pytest.raises(RuntimeError, match="summed over ranks already"):
        loop.session.finish_gradients(loop.model.replicated())


@runs_on_ranks()
def test_expert_functions_may_be_checkpointed() -> None:
    """An expert function runs again in backward, after its slots were reused."""
    inner = gated_experts()

    def apply(weights: Sequence[ExpertWeight], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        output: torch.Tensor = checkpoint(lambda part: inner(weights, part, groups), rows, use_reentrant=False)
        return output

    for seed in (3, 4, 5):
        with mock.patch.object(moe_model, "gated_experts", return_value=apply):
            loop = start(seed)
        for number in (0, 1, 2):
            forward(loop, number, "plain", number)
        for number in (1, 0, 2):
            backward(loop, number)
        finish(loop)


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
        any_loop.plan(loop, 6)
    # Another thread may run the next plan.
    with ThreadPoolExecutor(1) as other:
        other.submit(forward, loop, 0, "reentrant checkpoint", 2).result()
        other.submit(backward, loop, 2).result()


@pytest.mark.parametrize("run", ["reentrant checkpoint", "nested reentrant checkpoint", "checkpoint", "plain"])
@runs_on_ranks()
def test_each_step_may_run_on_a_thread_of_its_own(run: str) -> None:
    """A new thread counts its graph nodes from 0, and may get the identifier of one that has ended."""
    loop = start()

    def run_step(number: int) -> None:
        # Steps begin at different numbers.
        value = torch.ones((), requires_grad=True)
        for _ in range(number * 37 % 50):
            value = value + 1
        any_loop.plan(loop, number)
        for micro_step in range(number % 3, 3):
            forward(loop, micro_step, run, micro_step)
        for micro_step in range(number % 3, 3):
            backward(loop, micro_step)
        step(loop)

    for number in range(6):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(run_step, number).result()


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
        any_loop.plan(loop, 6)
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
def test_a_plan_may_be_applied_in_inference_mode() -> None:
    """Memory that is allocated in inference mode is used in training, too."""
    loop = start()
    with torch.inference_mode():
        any_loop.plan(loop, 5)
        with loop.session.micro_step(0):
            loop.loss(loop.model, loop.rows(0, loop.session.rank))
    forward(loop, 0, "checkpoint", 0, True)
    finish(loop)


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
    loop = start()
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


@pytest.mark.parametrize("mode", ["plan", "static", "shadow", "off"])
@pytest.mark.parametrize("way", ["before a plan", "copied", "repointed"])
@runs_on_ranks()
def test_copies_in_another_precision_are_refreshed(mode: Any, way: str) -> None:
    """Staging memory is refreshed for weights that were loaded before a plan, or changed after a micro-step."""
    torch.manual_seed(0)
    shape = Shape(layers=2, experts=4, top_k=2, hidden=8, width=8)
    rng = np.random.default_rng(0)
    trace = random_trace(rng, num_sequences=4, max_length=9, num_layers=2, num_experts=4, top_k=2)
    schedule = random_schedule(rng, 4, num_ranks=2, num_micro_steps=1)
    tokens = torch.from_numpy(rng.integers(0, 11, trace.num_tokens))

    def make() -> tuple[Session, TinyMoE]:
        session = Session(num_experts=4, mode=mode, least_gain=-1.0, verify_weights=False)
        model = TinyMoE(shape, torch.float32)
        for block in model.moe_blocks():
            block.compute_dtype = torch.bfloat16
        model.share(session)
        return session, model

    def plan(session: Session) -> None:
        session.plan(trace.select(schedule.sequences_of(session.rank)), schedule)

    def logits(session: Session, model: TinyMoE) -> torch.Tensor:
        mine = rows_of(trace, schedule.sequences_of(session.rank))
        with torch.no_grad(), session.micro_step(0):
            result: torch.Tensor = model(tokens[mine])
            return result

    (session, model), (reference, other) = make(), make()
    plan(session)
    before = logits(session, model)
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        if way == "copied":
            with torch.no_grad():
                parameter.copy_(value)
        elif way == "repointed":
            parameter.data = value.detach().clone()
        else:
            parameter.data.copy_(value)
    if way == "before a plan":
        plan(session)
    plan(reference)
    expected = logits(reference, other)
    assert torch.equal(logits(session, model), expected)
    assert relative_error(before, expected) > 0.1


@runs_on_ranks()
def test_verify_weights_detects_hidden_changes() -> None:
    loop = start(checked=True)
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
