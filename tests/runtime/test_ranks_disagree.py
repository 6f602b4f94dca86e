"""Ranks with different calls raise an error that names ranks and calls; they do not hang, abort or return results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import trimtab
from helpers.loop import Loop
from helpers.plans import start
from helpers.random_plans import random_schedule
from helpers.rank_pool import RankPool, shared_pool
from helpers.rank_tests import runs_on_ranks
from trimtab.cluster import ClusterSpec
from trimtab.errors import RanksDisagreeError
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.ranks import lockstep
from trimtab.runtime.ranks.rank_calls import CallThread
from trimtab.runtime.session_settings import SessionSettings

State = dict[str, Any]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks of this file alone. Each session has a process group of its own, since messages may be left over."""
    pool = RankPool(2)
    yield pool
    pool.close()


def run(_state: State, function: Callable[[str], None], what: str) -> None:
    """Compares logs after a short wait."""
    with mock.patch.object(lockstep, "COMPARE_AFTER_S", 0.5):
        function(what)


def problem_of(state: State, function: Callable[[str], None], what: str) -> str:
    """The error that a function raises on this rank; "" if none."""
    try:
        run(state, function, what)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def session_of_one_layer(**settings: Any) -> Session:
    session = Session(group=dist.new_group(), **{"num_experts": 4} | settings)
    shapes = [(session.num_experts // 2, *size) for size in ((8, 4), (4, 4))]
    session.add_layer([torch.nn.Parameter(torch.ones(shape)) for shape in shapes], gated_experts())
    return session


def make_other_calls(what: str) -> None:
    loop = start(group=dist.new_group())
    session, first = loop.session, dist.get_rank() == 0
    mine = [loop.rows(index, session.rank) for index in range(3)]
    trace, dense = loop.trace.select(loop.schedule.sequences_of(session.rank)), loop.model.replicated()
    blocks, x = loop.model.moe_blocks(), torch.zeros(3, 4, dtype=torch.float64)

    def update(index: int) -> None:
        with session.micro_step(index):
            loop.loss(loop.model, mine[index])[0].backward()

    if what == "number of micro-steps":
        update(0)
        if first:
            update(1)
        session.finish_gradients(dense)
    elif what == "which micro-step":
        update(1 if first else 2)
    elif what == "order of layers":
        with session.micro_step(0):
            x = loop.model.embed(loop.tokens[mine[0]])
            for block in blocks[:: 1 if first else -1]:
                x = x + block(x)
    elif what == "a skipped layer":
        loop.model.skipped = frozenset() if first else frozenset([0])
        update(0)
        session.finish_gradients(dense)
    elif what == "a live layer":
        if first:
            blocks[0](x)
        session.micro_step(0).__enter__()
    elif what == "other live layers":
        blocks[0 if first else 1](x)
    elif what in ("an id that is too large", "an id below 0"):
        wrong = 99 if what == "an id that is too large" else -7
        ids = torch.tensor([[0, 2], [wrong if first else 1, 3], [1, 0]])
        session.layers[0](x, ids, torch.ones(3, 2, dtype=torch.float64))
    elif what == "a recorded id that is too large":
        if first:
            trace.expert_ids[-1, 0, 0] = 77
        session.plan(trace, loop.schedule)
    elif what == "without gradients":
        with torch.set_grad_enabled(first):
            update(0)
    elif what in ("without gradients inside", "without backward"):
        with session.micro_step(0), torch.set_grad_enabled(first or what == "without backward"):
            loss = loop.loss(loop.model, mine[0])[0]
            if first:
                loss.backward()
        update(1)
    elif what == "frozen experts":
        for parameter in session.layers[1].parameters if first else ():
            parameter.requires_grad_(False)
        update(0)
    elif what == "other schedules":
        schedule = random_schedule(np.random.default_rng(session.rank), 6, num_ranks=2, num_micro_steps=3)
        session.plan(loop.trace.select(schedule.sequences_of(session.rank)), schedule)
    elif what == "other live policies":
        live = session_of_one_layer(mode="live", policy="quota" if first else "off")
        live.live_micro_step().__enter__()
    elif what == "a missing rank":
        # With groups of its own, which take longer to create on a busy machine.
        short = session_of_one_layer(timeout=timedelta(minutes=2))
        short._lockstep._timeout_s = 2.0
        if first:
            short.finish_gradients()
    else:
        make_other_gradient_calls(what, loop, update)


def make_other_gradient_calls(what: str, loop: Loop, update: Callable[[int], None]) -> None:
    session, dense, first = loop.session, loop.model.replicated(), dist.get_rank() == 0
    update(0)
    if what == "other replicated parameters":
        session.finish_gradients(dense[: 3 if first else None])
    elif what == "other order":
        session.finish_gradients(dense if first else dense[::-1])
    elif what == "other backwards":
        loop.optimizers[1].zero_grad()
        x = torch.zeros(3, 4, dtype=torch.float64)
        outputs = [loop.model.moe_blocks()[0](x + number) for number in (0, 1)]
        for output in outputs if first else outputs[::-1]:
            output.sum().backward()
        session.finish_gradients(dense)
    else:
        session.finish_gradients(dense)
        if first and what == "a skipped step":
            loop.optimizers[1].step()
        elif first and what == "clip":
            session.clip_gradients(dense, 1.0)
        elif first:
            session.whole_state_dict(loop.model)
        loop.optimizers[1].zero_grad()
        session.micro_step(1).__enter__()


CALLS = {
    "number of micro-steps": r"rank 0 called micro_step\(1\) where rank 1 called finish_gradients\(\)",
    "which micro-step": r"rank 0 called micro_step\(1\) where rank 1 called micro_step\(2\)",
    "order of layers": r"rank 0 called dispatch of MoE layer 0 in .* where rank 1 called dispatch of MoE layer \d in",
    "a skipped layer": r"rank 0 called dispatch of MoE layer 0 in .* where rank 1 called dispatch of MoE layer 1 in",
    "a live layer": r"rank 0 called counts of MoE layer 0 where rank 1 called micro_step\(0\)",
    "other live layers": r"rank 0 called counts of MoE layer 0 where rank 1 called counts of MoE layer 1",
    "an id that is too large": r"MoE layer 0 was given expert id 99; ids should be from 0 to 3",
    "an id below 0": r"MoE layer 0 was given expert id -7; ids should be from 0 to 3",
    "a recorded id that is too large": r"MoE layer 0 has expert ids \[77\D.*below 4",
    "without gradients": r"gradients enabled is True on rank 0 and False on rank 1",
    "without gradients inside": r"in micro-step 0 where rank 1 called dispatch .* without gradients",
    "frozen experts": r"trained expert tensors is \[.*\] on rank 0 and \[.*\] on rank 1",
    "other schedules": r"in plan\(\): schedule is '\w+' on rank 0 and '\w+' on rank 1",
    "other live policies": r"policy is 'quota' on rank 0 and 'off' on rank 1",
    "other replicated parameters": r"in finish_gradients\(\): replicated parameters is",
    "other order": "replicated parameters is",
    "other backwards": r"backward \(of the forward at call \d+\) where rank 1 called",
    "a skipped step": r"rank 0 called optimizer.step\(\) where rank 1 called micro_step\(1\)",
    "clip": r"rank 0 called clip_gradients\(\) where rank 1 called micro_step\(1\)",
    "weights of one rank": r"rank 0 called whole_state_dict\(\) where rank 1 called micro_step\(1\)",
    "a missing rank": r"rank 0 has waited 2 s in finish_gradients\(\); rank 1 has published no log",
}


@pytest.mark.parametrize("what", CALLS)
def test_different_calls_are_named(pool: RankPool, what: str) -> None:
    """The error names both ranks and their calls, without a hang or an abort of gloo."""
    problems = pool.call(problem_of, make_other_calls, what)
    for problem in problems[:1] if what == "a missing rank" else problems:
        assert re.search(CALLS[what], problem), problems


def test_a_missing_backward_is_named(pool: RankPool) -> None:
    """One rank waits in gloo until it is killed."""
    calls = r"combine of MoE layer . in micro-step 0, backward .* where rank 1 called micro_step\(1\)"
    with pytest.raises(AssertionError, match=f"RanksDisagreeError: .*{calls}"):
        pool.call(run, make_other_calls, "without backward")


def step_without_finished_gradients(_what: str) -> None:
    session = Session(num_experts=4, groups=2)
    experts = [torch.nn.Parameter(torch.randn(2, *size)) for size in ((8, 4), (4, 4))]
    layer = session.add_layer(experts, gated_experts())
    layer(torch.randn(3, 4), torch.tensor([[0], [2], [3]]), torch.ones(3, 1)).sum().backward()
    torch.optim.SGD(experts, lr=0.1).step()


def test_a_step_needs_gradients_that_are_summed_over_groups() -> None:
    for problem in shared_pool(4).call(problem_of, step_without_finished_gradients, ""):
        assert "not summed over expert-parallel groups; call finish_gradients" in problem


# Another value than the default, for every setting of a session that all ranks must share.
OTHER: dict[str, Any] = {
    "num_experts": 8, "mode": "static", "slots_per_rank": 1, "ring_layers": 4, "paths": "peer", "mirror_bytes": 1 << 30,
    "peer_memory_bytes": 1 << 30, "least_gain": 0.1, "max_rows_per_rank": 1000, "exact": True,
    "rates": ClusterSpec(2, 2), "policy": "off",
}  # fmt: skip
# Process groups and numbers in them are of one rank; the ranks check what follows from them.
MAY_DIFFER = {
    "verify_weights", "group", "groups", "ranks_per_node", "expert_group", "expert_dp_group", "nodes", "timeout"
}  # fmt: skip


def plan_with_another(name: str) -> None:
    other = {name: OTHER[name]} if name in OTHER and dist.get_rank() == 1 else {}
    version = f"1.{dist.get_rank()}" if name == "version" else trimtab.__version__
    with mock.patch.object(trimtab, "__version__", version):
        session_of_one_layer(**other).plan_micro_steps([np.zeros((3, 1, 1), np.int64)])


@pytest.mark.parametrize("name", sorted({setting.name for setting in fields(SessionSettings)} - MAY_DIFFER))
def test_settings_must_be_equal_on_all_ranks(pool: RankPool, name: str) -> None:
    for problem in pool.call(problem_of, plan_with_another, name):
        assert re.search(rf"RanksDisagreeError: .*\b{name} is .* on rank 0 and {OTHER[name]!r:.7}.* on rank 1", problem)


def test_versions_must_be_equal_on_all_ranks(pool: RankPool) -> None:
    for problem in pool.call(problem_of, plan_with_another, "version"):
        assert re.search(r"RanksDisagreeError: .*'1.0' on rank 0 and '1.1' on rank 1", problem)


@pytest.mark.parametrize("mode", ["plan", "live"])
@runs_on_ranks()
def test_a_dispatcher_that_needs_equal_tokens_gets_them_or_an_error(state: State, mode: Any) -> None:
    session = Session(num_experts=4, group=dist.new_group(), mode=mode, slots_per_rank=1)
    layer = session.add_framework_layer(
        lambda: [[torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2)]], equal_tokens="HybridEP"
    )
    rank = dist.get_rank()
    tokens = [5, 4 + rank]
    if mode == "plan":
        session.plan_micro_steps([np.arange(count)[:, None, None] % 4 for count in tokens])
    for index, count in enumerate(tokens):
        ids, hidden = torch.arange(count)[:, None] % 4, torch.ones(count, 3)
        raises = pytest.raises(RanksDisagreeError, match="HybridEP") if index else nullcontext()
        with raises, session.micro_step(index) if mode == "plan" else session.live_micro_step():
            routes = layer.routes()
            assert routes is not None
            layer.begin(hidden, ids, routes)
    session.close()


def test_an_error_of_a_call_on_the_waiting_thread_is_raised_once() -> None:
    thread = CallThread()
    for call, raised in ((lambda: 1 / 0, pytest.raises(ZeroDivisionError)), (lambda: None, nullcontext())):
        thread.start(call)
        assert thread.is_done(60.0)
        with raised:
            thread.result()
