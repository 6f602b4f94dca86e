"""Supported actions of training loops, and the errors of unsupported ones."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from helpers import any_loop
from helpers.any_loop import RUNS, Loop
from helpers.equality import relative_error
from helpers.moe_model import Shape, TinyMoE
from helpers.random_plans import random_schedule, random_trace
from helpers.rank_pool import RankPool
from trimtab.errors import InputError
from trimtab.runtime import ExpertWeight, RowGroups, Session, gated_experts

NOTHING_SKIPPED: frozenset[int] = frozenset()
State = dict[str, Any]


def both(pool: RankPool, *calls: tuple[Any, ...]) -> None:
    """Runs calls on both ranks, with a new model and plan."""
    pool.call(any_loop.start, 3, False)
    for function, *args in calls:
        pool.call(function, *args)


@pytest.mark.parametrize("run", RUNS[1:])
def test_a_checkpointed_layer_runs_again_in_the_micro_step_of_its_first_run(pool: RankPool, run: str) -> None:
    """Backward outside micro-steps, in an order of pipelines, with live forwards in between."""
    forward, live, backward = any_loop.forward, any_loop.live, any_loop.backward
    both(
        pool,
        (forward, 0, run, NOTHING_SKIPPED, 0, False), (forward, 1, run, NOTHING_SKIPPED, 1, False),
        (live, 7, run, 2), (backward, 0), (forward, 2, run, NOTHING_SKIPPED, 3, False), (backward, 2), (backward, 1),
        (forward, 0, run, NOTHING_SKIPPED, None, False), (backward, 3), (any_loop.finish,), (any_loop.step, True),
    )  # fmt: skip


@pytest.mark.parametrize("change", [any_loop.repoint, any_loop.offload])
def test_memory_of_parameters_may_be_replaced(pool: RankPool, change: Callable[[State], None]) -> None:
    update = (any_loop.forward, 0, "plain", NOTHING_SKIPPED, 0, True)
    step = (any_loop.step, True)
    both(
        pool,
        update,
        step,
        (change,),
        (any_loop.onload,),
        update,
        step,
        update,
        (change,),
        (any_loop.onload,),
        update,
        step,
    )


def test_micro_steps_between_finished_gradients_and_the_optimizer_step(pool: RankPool) -> None:
    update = (any_loop.forward, 0, "plain", NOTHING_SKIPPED, 0, True)
    evaluate = (any_loop.forward, 1, "plain", NOTHING_SKIPPED, None, False)
    both(pool, update, (any_loop.finish,), evaluate, (any_loop.step, True), evaluate, update, (any_loop.step, True))


@pytest.mark.parametrize("after", [any_loop.plan, any_loop.move, any_loop.forward, any_loop.live])
def test_replica_gradients_of_a_failed_backward_are_dropped(pool: RankPool, after: Callable[..., None]) -> None:
    args = {
        any_loop.plan: (5, True, "plan"), any_loop.move: (5,), any_loop.live: (5, "plain", 0),
        any_loop.forward: (1, "plain", NOTHING_SKIPPED, 0, True),
    }[after]  # fmt: skip
    update = (any_loop.forward, 0, "plain", NOTHING_SKIPPED, 1, True)
    for inside in (True, False):
        fail = (any_loop.fail_backward, 0, "plain", 0, inside)
        both(pool, fail, fail, (after, *args), update, (any_loop.finish,))
    assert pool.call(count_abandoned)[0] > 0


def test_another_backward_may_follow_a_failed_one(pool: RankPool) -> None:
    """The backward of a forward that ran before the failure, with no layer in between."""
    pending = (any_loop.forward, 1, "plain", NOTHING_SKIPPED, 1, False)
    for run in ("plain", "reentrant checkpoint"):
        fail = (any_loop.fail_backward, 0, run, 0, False)
        both(pool, pending, fail, (any_loop.backward, 1), (any_loop.finish,))


def count_abandoned(state: State) -> float:
    return cast(Loop, state["loop"]).session.take_metrics()["moe/abandoned_backwards"]


def test_gradients_zeroed_before_they_are_finished_stay_zero(pool: RankPool) -> None:
    update = (any_loop.forward, 0, "plain", NOTHING_SKIPPED, 1, True)
    for to_none in (True, False):
        both(pool, update, (any_loop.zero, to_none), update, (any_loop.finish,), (any_loop.step, True))


def test_gradients_are_summed_once(pool: RankPool) -> None:
    """`finish` asserts the error for gradients that were already summed."""
    update = (any_loop.forward, 0, "plain", NOTHING_SKIPPED, 1, True)
    finish = (any_loop.finish,)
    both(pool, update, finish, finish, update, finish, (any_loop.zero, False), update, finish, finish)
    both(pool, finish, finish, update, (any_loop.zero, True), update, finish)


def train_dense_layers_alone(state: State) -> None:
    """A loss without MoE layers, between two zeroings in place."""
    loop: Loop = state["loop"]
    dense = loop.model.head
    parameters = list(dense.parameters())
    any_loop.forward(state, 0, "plain", NOTHING_SKIPPED, 0, True)
    loop.session.finish_gradients(loop.model.replicated())
    for optimizer in loop.optimizers:
        optimizer.zero_grad(set_to_none=False)
    dense(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    loop.session.finish_gradients(loop.model.replicated())
    assert all(p.grad is not None and (p.grad == 2).all() for p in parameters)
    with pytest.raises(RuntimeError, match="summed over ranks already"):
        loop.session.finish_gradients(loop.model.replicated())
    any_loop.zero(state, True)


def test_an_accumulation_without_moe_layers(pool: RankPool) -> None:
    both(pool, (train_dense_layers_alone,))


def checkpoint_inside_experts(state: State, reentrant: bool) -> None:
    """An expert function that runs again in backward, after its slots were reused."""
    inner = gated_experts()

    def apply(weights: Sequence[ExpertWeight], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        output: torch.Tensor = checkpoint(lambda part: inner(weights, part, groups), rows, use_reentrant=reentrant)
        return output

    loop: Loop = state["loop"]
    for block in loop.model.moe_blocks():
        assert block.layer is not None
        block.layer._apply = apply
    for number in (0, 1, 2):
        any_loop.forward(state, number, "plain", NOTHING_SKIPPED, number, False)
    for number in (1, 0, 2):
        any_loop.backward(state, number)
    any_loop.finish(state)


def test_expert_functions_may_be_checkpointed(pool: RankPool) -> None:
    for seed in (3, 4, 5):
        pool.call(any_loop.start, seed, False)
        pool.call(checkpoint_inside_experts, False)


def run_on_other_threads(state: State) -> None:
    loop: Loop = state["loop"]
    for run in ("reentrant checkpoint", "nested reentrant checkpoint", "checkpoint"):
        any_loop.live(state, 5, run, 0)
        any_loop.forward(state, 1, run, NOTHING_SKIPPED, 1, False)
        with ThreadPoolExecutor(1) as executor:
            executor.submit(any_loop.backward, state, 0).result()
            executor.submit(any_loop.backward, state, 1).result()
    with loop.session.micro_step(0), ThreadPoolExecutor(1) as executor:
        call = executor.submit(loop.loss, loop.model, loop.rows(0, loop.session.rank))
        with pytest.raises(RuntimeError, match="by another thread than the one that opened the micro-step"):
            call.result()
    any_loop.zero(state, True)
    any_loop.plan(state, 6, True, "plan")
    # Another thread may run the next plan.
    with ThreadPoolExecutor(1) as executor:
        executor.submit(any_loop.forward, state, 0, "reentrant checkpoint", NOTHING_SKIPPED, 2, False).result()
        executor.submit(any_loop.backward, state, 2).result()


def test_backward_may_run_on_another_thread(pool: RankPool) -> None:
    both(pool, (run_on_other_threads,))


def load_to_the_same_address(state: State) -> None:
    """Other values in new memory at the same address, as an allocator may return it."""
    loop: Loop = state["loop"]
    buffers = [parameter.data.numpy().copy() for parameter in loop.model.parameters()]
    for parameter, buffer in zip(loop.model.parameters(), buffers, strict=True):
        parameter.data = torch.from_numpy(buffer)
    any_loop.forward(state, 0, "plain", NOTHING_SKIPPED, None, False)
    for parameter, buffer in zip(loop.model.parameters(), buffers, strict=True):
        address = parameter.data_ptr()
        parameter.data = torch.empty(0, dtype=torch.float64)
        buffer *= 2
        parameter.data = torch.from_numpy(buffer)
        assert parameter.data_ptr() == address
    with torch.no_grad():
        for parameter in loop.reference.parameters():
            parameter.mul_(2)
    any_loop.forward(state, 0, "plain", NOTHING_SKIPPED, None, False)


def test_new_memory_at_the_same_address_is_detected(pool: RankPool) -> None:
    both(pool, (load_to_the_same_address,))


def assign_parameters(state: State) -> None:
    loop: Loop = state["loop"]
    loop.model.load_state_dict({k: v.clone() for k, v in loop.model.state_dict().items()}, assign=True)
    with pytest.raises(InputError, match="the model has 0 of the session's"):
        loop.session.replicated_parameters(loop.model)
    with pytest.raises(InputError, match="can't be copied"):
        copy.deepcopy(loop.model)


def test_experts_that_were_replaced_or_copied_are_refused(pool: RankPool) -> None:
    both(pool, (assign_parameters,))


def run_in_inference_mode(state: State) -> None:
    """Memory that is allocated in inference mode is used in training, too."""
    loop: Loop = state["loop"]
    with torch.inference_mode():
        any_loop.plan(state, 5, True, "plan")
        with loop.session.micro_step(0):
            loop.loss(loop.model, loop.rows(0, loop.session.rank))
    any_loop.forward(state, 0, "checkpoint", NOTHING_SKIPPED, 0, True)
    any_loop.finish(state)


def test_a_plan_may_be_applied_in_inference_mode(pool: RankPool) -> None:
    both(pool, (run_in_inference_mode,))


def write_to_ids(state: State) -> None:
    loop: Loop = state["loop"]
    layer = loop.session.layers[0]
    rows = len(loop.rows(0, loop.session.rank))
    top_k = loop.model.moe_blocks()[0].top_k
    with loop.session.micro_step(0):
        ids = layer.route(torch.zeros(rows, top_k, dtype=torch.int64))
        ids.add_(0)
        with pytest.raises(RuntimeError, match="other expert ids than its route"):
            layer(torch.zeros(rows, 4, dtype=torch.float64), ids, torch.ones(rows, top_k, dtype=torch.float64))


def test_ids_are_those_that_route_returned(pool: RankPool) -> None:
    both(pool, (write_to_ids,))


def interrupt_a_wait(state: State) -> None:
    """The result of an interrupted wait is not taken for that of the next one."""
    lockstep = cast(Loop, state["loop"]).session._lockstep
    gate = threading.Event()
    done: list[bool] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        lockstep.wait(gate.wait)
    signal.signal(signal.SIGALRM, before)
    gate.set()

    def take_time() -> None:
        time.sleep(0.2)
        done.append(True)

    lockstep.wait(take_time)
    assert done
    any_loop.forward(state, 0, "plain", NOTHING_SKIPPED, 0, True)


def test_a_wait_may_be_interrupted(pool: RankPool) -> None:
    both(pool, (interrupt_a_wait,))


def test_layers_outside_micro_steps_are_counted(pool: RankPool) -> None:
    both(pool, (any_loop.forward, 0, "plain", NOTHING_SKIPPED, None, False))
    assert pool.call(count_live) == [0, 0]
    pool.call(any_loop.live, 5, "plain", None)
    layers = pool.call(count_layers)
    assert pool.call(count_live) == layers


def count_live(state: State) -> float:
    return cast(Loop, state["loop"]).session.take_metrics()["moe/live_layer_calls"]


def count_layers(state: State) -> int:
    return len(cast(Loop, state["loop"]).session.layers)


def differentiate_in_other_ways(state: State) -> None:
    """Replica gradients are added to `.grad`; a backward without accumulation into it is refused."""
    loop: Loop = state["loop"]
    replicas = [len(loop.session.step_plan.replicas_of(0, layer)) for layer in range(len(loop.session.layers))]
    layer = int(np.argmax(replicas))
    expert = loop.session.layers[layer].parameters[0]

    def forward() -> torch.Tensor:
        with loop.session.micro_step(0):
            return loop.loss(loop.model, loop.rows(0, loop.session.rank))[0]

    with pytest.raises(RuntimeError, match=r"torch.autograd.grad\(\) would miss"):
        torch.autograd.grad(forward(), [expert])
    with pytest.raises(RuntimeError, match=r"torch.autograd.grad\(\) would miss"):
        torch.autograd.grad(forward(), list(loop.model.parameters()))
    with pytest.raises(RuntimeError, match=r"backward\(inputs=...\) with expert tensors alone"):
        forward().backward(inputs=[expert])
    handle = expert.register_hook(lambda g: g * 2)
    with pytest.raises(RuntimeError, match="a hook on an expert tensor"):
        forward().backward()
    handle.remove()
    handle = expert.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RuntimeError, match="a hook on an expert tensor"):
        forward().backward()
    handle.remove()
    any_loop.zero(state, True)

    # Only the head's gradient: no gradients of experts.
    head = loop.model.head.weight
    forward().backward(inputs=[head])
    assert head.grad is not None
    assert all(p.grad is None for layer in loop.session.layers for p in layer.parameters)
    router = loop.model.moe_blocks()[0].router.weight
    forward().backward(inputs=[router])
    assert router.grad is not None
    assert all(p.grad is None for layer in loop.session.layers for p in layer.parameters)
    any_loop.zero(state, True)

    loss = forward()
    loss.backward(create_graph=True)
    assert router.grad is not None
    with pytest.raises(RuntimeError, match="once_differentiable"):
        router.grad.sum().backward()
    any_loop.zero(state, True)


def test_other_ways_to_differentiate(pool: RankPool) -> None:
    both(
        pool,
        (differentiate_in_other_ways,),
        (any_loop.forward, 0, "plain", NOTHING_SKIPPED, 0, True),
        (any_loop.finish,),
    )


def offload_for_memory(state: State) -> None:
    loop: Loop = state["loop"]
    any_loop.forward(state, 0, "plain", NOTHING_SKIPPED, 0, True)
    loop.pending.clear()
    memory = [StorageWeakRef(p.data.untyped_storage()) for p in loop.model.parameters()]
    for parameter in loop.model.parameters():
        parameter.data = parameter.data.clone()
    assert all(ref.expired() for ref in memory)


def test_memory_of_parameters_is_not_kept(pool: RankPool) -> None:
    both(pool, (offload_for_memory,))


def replace_parameters(state: State) -> None:
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
    session.close()


def test_parameters_may_be_replaced_by_others(pool: RankPool) -> None:
    pool.call(replace_parameters)


def compute_in_lower_precision(state: State, mode: str, way: str) -> None:
    """Staging memory is refreshed for weights that were loaded before a plan, or changed after a micro-step."""
    session = Session(num_experts=4, mode=cast(Any, mode), least_gain=-1.0, verify_weights=False)
    torch.manual_seed(0)
    shape = Shape(layers=2, experts=4, top_k=2, hidden=8, width=8)
    model, other = TinyMoE(shape, torch.float32), TinyMoE(shape, torch.float32)
    for block in (*model.moe_blocks(), *other.moe_blocks()):
        block.compute_dtype = torch.bfloat16
    model.share(session)
    reference = Session(num_experts=4, mode=cast(Any, mode), verify_weights=False)
    other.share(reference)
    rng = np.random.default_rng(0)
    trace = random_trace(rng, num_sequences=4, max_length=9, num_layers=2, num_experts=4, top_k=2)
    schedule = random_schedule(rng, 4, num_ranks=2, num_micro_steps=1)
    tokens = torch.from_numpy(rng.integers(0, 11, trace.num_tokens))
    mine = trace.select(schedule.sequences_of(session.rank))
    rows = np.concatenate(
        [*(np.arange(*trace.sequence_starts[s : s + 2]) for s in schedule.sequences_of(session.rank))]
    )

    def logits(of: Session, model: TinyMoE) -> torch.Tensor:
        with torch.no_grad(), of.micro_step(0):
            return model(tokens[rows])

    session.plan(mine, schedule)
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
        session.plan(mine, schedule)
    reference.plan(mine, schedule)
    expected = logits(reference, other)
    assert torch.equal(logits(session, model), expected)
    assert relative_error(before, expected) > 0.1
    session.close()
    reference.close()


@pytest.mark.parametrize("mode", ["plan", "static", "shadow", "off"])
@pytest.mark.parametrize("way", ["before a plan", "copied", "repointed"])
def test_copies_in_another_precision_are_refreshed(pool: RankPool, mode: str, way: str) -> None:
    pool.call(compute_in_lower_precision, mode, way)


def see_what_nobody_announces(state: State) -> None:
    loop: Loop = state["loop"]
    for checked in (None, "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRIMTAB_VERIFY_WEIGHTS", raising=False)
            if checked:
                patch.setenv("TRIMTAB_VERIFY_WEIGHTS", checked)
            assert Session(num_experts=4).settings.verify_weights is (checked is not None)
            assert Session(num_experts=4, mode="shadow").settings.verify_weights
            assert not Session(num_experts=4, mode="shadow", verify_weights=False).settings.verify_weights
    assert loop.session.settings.verify_weights
    any_loop.write(state, "unnoticed")
    any_loop.forward(state, 0, "plain", NOTHING_SKIPPED, None, False)
    # One sampled element of one expert, on one rank.
    if loop.session.rank == 1:
        loop.session.layers[1].parameters[1].data[1].view(-1)[0] += 1
    with pytest.raises(RuntimeError, match=r"MoE layer 1: tensor 1 of expert \d changed") as caught:
        loop.session.micro_step(0).__enter__()
    assert str(caught.value).startswith("rank 1: " if loop.session.rank == 0 else "MoE layer 1")


def test_verify_weights_detects_hidden_changes(pool: RankPool) -> None:
    pool.call(any_loop.start, 3, True)
    pool.call(see_what_nobody_announces)
