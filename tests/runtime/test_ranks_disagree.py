"""Ranks with different calls raise an error that names ranks and calls; they do not hang, abort or return results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers import any_loop
from helpers.any_loop import Loop
from helpers.random_plans import random_schedule
from helpers.rank_pool import RankPool, shared_pool
from trimtab.errors import RankFailedError
from trimtab.launch import launch
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.ranks import lockstep

State = dict[str, Any]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks of this file alone. Each session has a process group of its own, since messages may be left over."""
    pool = RankPool(2)
    yield pool
    pool.close()


def problem_of(_state: State, function: Callable[[str], None], what: str) -> str:
    """The error that a function raises on this rank; "" if none."""
    try:
        with mock.patch.object(lockstep, "COMPARE_AFTER_S", 0.5):
            function(what)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def make_other_calls(what: str) -> None:
    state: State = {}
    any_loop.start(state, 3, False, dist.new_group())
    loop: Loop = state["loop"]
    session, first = loop.session, dist.get_rank() == 0
    mine = [loop.rows(index, session.rank) for index in range(any_loop.MICRO_STEPS)]

    def update(index: int) -> None:
        with session.micro_step(index):
            loop.loss(loop.model, mine[index])[0].backward()

    if what == "number of micro-steps":
        update(0)
        if first:
            update(1)
        session.finish_gradients(loop.model.replicated())
    elif what == "which micro-step":
        update(1 if first else 2)
    elif what == "order of layers":
        with session.micro_step(0):
            x = loop.model.embed(loop.tokens[mine[0]])
            for block in loop.model.moe_blocks()[:: 1 if first else -1]:
                x = x + block(x)
    elif what == "a skipped layer":
        loop.model.skipped = frozenset() if first else frozenset([0])
        update(0)
        session.finish_gradients(loop.model.replicated())
    elif what == "a live layer":
        block = loop.model.moe_blocks()[0]
        if first:
            block(torch.zeros(3, 4, dtype=torch.float64))
        else:
            with session.micro_step(0):
                pass
    elif what == "other live layers":
        loop.model.moe_blocks()[0 if first else 1](torch.zeros(3, 4, dtype=torch.float64))
    elif what == "an id that is too large":
        layer = session.layers[0]
        ids = torch.full((3, 2), 99 if first else 0)
        layer(torch.zeros(3, 4, dtype=torch.float64), ids, torch.ones(3, 2, dtype=torch.float64))
    elif what == "a recorded id that is too large":
        assert loop.trace is not None
        assert loop.schedule is not None
        trace = loop.trace.select(loop.schedule.sequences_of(session.rank))
        if first:
            trace.expert_ids[-1, 0, 0] = 77
        session.plan(trace, loop.schedule)
    elif what == "without gradients":
        with torch.set_grad_enabled(first):
            update(0)
    elif what == "without gradients inside":
        with session.micro_step(0), torch.set_grad_enabled(first):
            loss = loop.loss(loop.model, mine[0])[0]
            if first:
                loss.backward()
        update(1)
    elif what == "without backward":
        with session.micro_step(0):
            loss = loop.loss(loop.model, mine[0])[0]
            if first:
                loss.backward()
        update(1)
    elif what == "frozen experts":
        for parameter in session.layers[1].parameters if first else ():
            parameter.requires_grad_(False)
        update(0)
    elif what == "other schedules":
        rng = np.random.default_rng(session.rank)
        schedule = random_schedule(rng, 6, num_ranks=2, num_micro_steps=3)
        assert loop.trace is not None
        session.plan(loop.trace.select(schedule.sequences_of(session.rank)), schedule)
    elif what == "other modes":
        session.mode = "plan" if first else "static"
        assert loop.trace is not None
        assert loop.schedule is not None
        session.plan(loop.trace.select(loop.schedule.sequences_of(session.rank)), loop.schedule)
    elif what in ("other live policies", "other predictors"):
        policies = what == "other live policies"
        live = Session(
            num_experts=4,
            mode="live",
            policy="quota" if policies and first else "predict",
            predictor="last" if policies or first else "average",
            group=dist.new_group(),
        )
        live.add_layer([torch.nn.Parameter(torch.ones(2, *size)) for size in ((8, 4), (4, 4))], gated_experts())
        with live.live_micro_step():
            pass
    elif what == "other replicated parameters":
        update(0)
        session.finish_gradients(loop.model.replicated()[: 3 if first else None])
    else:
        # Rank 1 makes no further call.
        short = Session(num_experts=4, timeout=timedelta(seconds=2), group=dist.new_group())
        short.add_layer(
            [torch.nn.Parameter(torch.ones(2, 8, 4)), torch.nn.Parameter(torch.ones(2, 4, 4))], gated_experts()
        )
        if first:
            short.finish_gradients()


CALLS = {
    "number of micro-steps": r"rank 0 called micro_step\(1\) where rank 1 called finish_gradients\(\)",
    "which micro-step": r"rank 0 called micro_step\(1\) where rank 1 called micro_step\(2\)",
    "order of layers": r"rank 0 called dispatch of MoE layer 0 in .* where rank 1 called dispatch of MoE layer \d in",
    "a skipped layer": r"rank 0 called dispatch of MoE layer 0 in .* where rank 1 called dispatch of MoE layer 1 in",
    "a live layer": r"rank 0 called counts of MoE layer 0 where rank 1 called micro_step\(0\)",
    "other live layers": r"rank 0 called counts of MoE layer 0 where rank 1 called counts of MoE layer 1",
    "an id that is too large": r"MoE layer 0 was given expert id 99; ids should be from 0 to 3",
    "a recorded id that is too large": r"MoE layer 0 has expert ids \[77\D.*below 4",
    "without gradients": r"gradients enabled is True on rank 0 and False on rank 1",
    "without gradients inside": r"in micro-step 0 where rank 1 called dispatch .* without gradients",
    "without backward": r"combine of MoE layer . in micro-step 0, backward .* where rank 1 called micro_step\(1\)",
    "frozen experts": r"trained expert tensors is \[.*\] on rank 0 and \[.*\] on rank 1",
    "other schedules": r"in plan\(\): schedule is '\w+' on rank 0 and '\w+' on rank 1",
    "other modes": r"in plan\(\): mode is 'plan' on rank 0 and 'static' on rank 1",
    "other live policies": r"policy is 'quota' on rank 0 and 'predict' on rank 1",
    "other predictors": r"predictor is 'last' on rank 0 and 'average' on rank 1",
    "other replicated parameters": r"in finish_gradients\(\): replicated parameters is",
    "a missing rank": r"rank 0 has waited 2 s in finish_gradients\(\); rank 1 has published no log",
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_different_calls_are_named(pool: RankPool, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The error names both ranks and their calls, without a hang or an abort of gloo."""
    if what == "without backward":
        # One rank waits in gloo until the launcher kills it.
        with pytest.raises(RankFailedError, match=CALLS[what]):
            launch(make_other_calls, (what,), ranks=2)
        return
    problems = pool.call(problem_of, make_other_calls, what)
    for problem in problems[:1] if what == "a missing rank" else problems:
        assert re.search(CALLS[what], problem), problems


def make_other_gradient_calls(what: str) -> None:
    state: State = {}
    groups = dist.get_world_size() // 2
    if what == "a step without finished gradients":
        session = Session(num_experts=4, groups=groups)
        experts = [torch.nn.Parameter(torch.randn(2, *size)) for size in ((8, 4), (4, 4))]
        layer = session.add_layer(experts, gated_experts())
        optimizer = torch.optim.SGD(experts, lr=0.1)
        layer(torch.randn(3, 4), torch.tensor([[0], [2], [3]]), torch.ones(3, 1)).sum().backward()
        optimizer.step()
        return
    any_loop.start(state, 3, False, dist.new_group())
    loop: Loop = state["loop"]
    session, first = loop.session, dist.get_rank() == 0
    dense = loop.model.replicated()
    with session.micro_step(0):
        loop.loss(loop.model, loop.rows(0, session.rank))[0].backward()
    if what == "other order":
        session.finish_gradients(dense if first else dense[::-1])
    elif what == "a skipped step":
        session.finish_gradients(dense)
        if first:
            loop.optimizers[1].step()
        loop.optimizers[1].zero_grad()
        with session.micro_step(1):
            pass
    elif what == "clip":
        session.finish_gradients(dense)
        if first:
            session.clip_gradients(dense, 1.0)
        with session.micro_step(1):
            pass
    elif what == "weights of one rank":
        session.finish_gradients(dense)
        if first:
            session.logical_state_dict(loop.model)
        with session.micro_step(1):
            pass
    elif what == "other backwards":
        loop.optimizers[1].zero_grad()
        x = torch.zeros(3, 4, dtype=torch.float64)
        outputs = [loop.model.moe_blocks()[0](x + number) for number in (0, 1)]
        for output in outputs if first else outputs[::-1]:
            output.sum().backward()
        session.finish_gradients(dense)
    else:
        other = Session(num_experts=4, ring_layers=2 if first else 3, group=dist.new_group())
        for _ in session.layers:
            other.add_layer([torch.nn.Parameter(torch.ones(2, *size)) for size in ((8, 4), (4, 4))], gated_experts())
        assert loop.trace is not None
        assert loop.schedule is not None
        other.plan(loop.trace.select(loop.schedule.sequences_of(session.rank)), loop.schedule)


GRADIENT_CALLS = {
    "other order": "replicated parameters is",
    "a skipped step": r"rank 0 called optimizer.step\(\) where rank 1 called micro_step\(1\)",
    "clip": r"rank 0 called clip_gradients\(\) where rank 1 called micro_step\(1\)",
    "weights of one rank": r"rank 0 called logical_state_dict\(\) where rank 1 called micro_step\(1\)",
    "other backwards": r"backward \(of the forward at call \d+\) where rank 1 called",
    "other rings": r"ring_layers is 2 on rank 0 and 3 on rank 1",
    "a step without finished gradients": "not summed over expert-parallel groups; call finish_gradients",
}


@pytest.mark.parametrize("what", GRADIENT_CALLS)
def test_different_calls_with_gradients_are_named(pool: RankPool, what: str) -> None:
    ranks = shared_pool(4) if what == "a step without finished gradients" else pool
    problems = ranks.call(problem_of, make_other_gradient_calls, what)
    for problem in problems:
        assert re.search(GRADIENT_CALLS[what], problem), problems
