"""Random training loops give the results of one process, or an error that names the cause.

Hypothesis draws what comes next. The long form also runs 3 and 4 ranks, and longer loops. A loop that failed once is
kept in `any_loop_failures.json`, and runs again: its error has a note with the line to add.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from helpers import any_loop, loop_state, user_actions
from helpers.examples import examples
from helpers.rank_pool import RankPool, shared_pool

seeds = st.integers(0, 1 << 20)
runs = st.sampled_from(loop_state.RUNS)
deviations = st.one_of(st.none(), seeds)
micro_steps = st.integers(0, loop_state.MICRO_STEPS - 1)
# The experts of all layers are trained, those of some, or none. (Hypothesis draws numbers more evenly than it samples.)
FROZEN_LAYERS = [frozenset[int](), frozenset({0}), frozenset[int](), frozenset({1, 2}), frozenset({0, 1, 2})]
# Loops that failed once: number of ranks, and name and arguments of each action.
FAILED_LOOPS = json.loads(Path(__file__).with_name("any_loop_failures.json").read_text())


class AnyLoop(RuleBasedStateMachine):
    """Draws the next action of all ranks."""

    pool: RankPool

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[int] = []
        self.number = 0
        self.sessions = 1
        self.done: list[Any] = []

    def do(self, function: Any, *args: Any) -> None:
        self.done.append([function.__name__, *(sorted(arg) if isinstance(arg, frozenset) else arg for arg in args)])
        try:
            self.pending = self.pool.call(any_loop.call, function, *args)[0]
        except BaseException as error:
            error.add_note(f"to run this loop again: {json.dumps([self.pool.ranks, *self.done])}")
            raise

    @initialize(seed=seeds, checked=st.booleans(), per_rank=st.integers(2, 3), frozen_before=st.booleans(),
                on_threads=st.booleans())  # fmt: skip
    def start(self, seed: int, checked: bool, per_rank: int, frozen_before: bool, on_threads: bool) -> None:
        self.checked = checked
        top_k, frozen = 1 if seed % 4 == 3 else 2, FROZEN_LAYERS[seed % 5]
        self.do(any_loop.begin, seed, checked, top_k, frozen, per_rank, frozen_before, on_threads)

    @rule(seed=seeds, moves=st.booleans(), mode=st.sampled_from(["plan", "plan", "plan", "static", "shadow", "off"]))
    def plan(self, seed: int, moves: bool, mode: str) -> None:
        self.do(any_loop.plan, seed, moves, mode, loop_state.ROWS[seed % 4])

    @rule(index=micro_steps, run=runs, skipped=st.frozensets(st.integers(0, 2), max_size=1), deviates=deviations,
          padded=st.booleans())  # fmt: skip
    def forward(self, index: int, run: str, skipped: frozenset[int], deviates: int | None, padded: bool) -> None:
        self.number += 1
        self.do(any_loop.forward, index, run, self.number, False, skipped, False, deviates, padded)

    @rule(index=micro_steps, run=runs, deviates=deviations, padded=st.booleans())
    def forward_and_backward(self, index: int, run: str, deviates: int | None, padded: bool) -> None:
        self.number += 1
        self.do(any_loop.forward, index, run, self.number, True, frozenset(), False, deviates, padded)

    @rule(index=micro_steps, run=runs, seed=seeds, deviates=deviations)
    def recompute(self, index: int, run: str, seed: int, deviates: int | None) -> None:
        self.do(any_loop.forward, index, run, None, False, frozenset(), seed % 3 > 0, deviates)

    @rule(seed=seeds, run=runs, with_backward=st.booleans())
    def live(self, seed: int, run: str, with_backward: bool) -> None:
        self.number += 1
        self.do(any_loop.live, seed, run, self.number if with_backward else None)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), twice=st.booleans())
    def backward(self, data: st.DataObject, twice: bool) -> None:
        self.do(any_loop.backward, data.draw(st.sampled_from(self.pending)), twice)

    @rule(rank=st.integers(0, 3))
    def touch(self, rank: int) -> None:
        self.do(any_loop.touch, rank)

    @rule(index=micro_steps, run=runs, block=st.integers(0, 1), where=st.sampled_from(["forward", "inside", "outside"]))
    def fail(self, index: int, run: str, block: int, where: str) -> None:
        self.do(any_loop.fail, index, run, block, where)

    @rule()
    def finish(self) -> None:
        self.do(any_loop.finish)

    @rule(zero=st.sampled_from([True, True, False, None]))
    def step(self, zero: bool | None) -> None:
        self.do(any_loop.step, zero)

    @rule(to_none=st.booleans())
    def zero(self, to_none: bool) -> None:
        self.do(any_loop.zero, to_none)

    @rule(seed=seeds)
    def move(self, seed: int) -> None:
        self.do(any_loop.move, seed)

    @rule(seed=seeds)
    def sleep(self, seed: int) -> None:
        self.do(any_loop.sleep, seed)

    @rule()
    def save(self) -> None:
        self.do(user_actions.save)

    @rule(seed=seeds)
    def reload(self, seed: int) -> None:
        self.do(user_actions.reload, seed)

    @precondition(lambda self: self.sessions < 3)
    @rule(seed=seeds)
    def change_session(self, seed: int) -> None:
        self.sessions += 1
        self.do(user_actions.change_session, seed)

    @rule(seed=seeds, replaces=st.booleans())
    def change_optimizer(self, seed: int, replaces: bool) -> None:
        self.do(user_actions.change_optimizer, seed, replaces)

    @rule(seed=seeds)
    def run_other_weights(self, seed: int) -> None:
        self.do(user_actions.run_other_weights, seed)

    @rule(views=st.booleans())
    def wrap_in_ddp(self, views: bool) -> None:
        self.do(user_actions.wrap_in_ddp, views)

    @rule(change=st.sampled_from([user_actions.repoint, user_actions.offload, user_actions.onload]))
    def change_memory(self, change: Any) -> None:
        self.do(change)

    @rule(way=st.sampled_from(["tensor", "data"]))
    def write(self, way: str) -> None:
        self.do(user_actions.write, way)

    @precondition(lambda self: self.checked)
    @rule()
    def write_unnoticed(self) -> None:
        self.do(user_actions.write, "unnoticed")


@pytest.fixture(params=examples(short=[2], long=[2, 3, 4]))
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = shared_pool(request.param)
    yield pool
    pool.forget()


@pytest.mark.hypothesis
@pytest.mark.longer
def test_any_loop_equals_one_process(pool: RankPool) -> None:
    machine = type("AnyLoopOnRanks", (AnyLoop,), {"pool": pool})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(short=10, long=75),
            stateful_step_count=examples(short=30, long=60),
            suppress_health_check=list(HealthCheck),
            phases=examples(short=[Phase.generate], long=[Phase.generate, Phase.shrink]),
        ),
    )


@pytest.mark.parametrize(("pool", "actions"), [(loop[0], loop[1:]) for loop in FAILED_LOOPS], indirect=["pool"])
def test_loops_that_failed_once(pool: RankPool, actions: list[Any]) -> None:
    for name, *args in actions:
        function = getattr(any_loop, name, None) or getattr(user_actions, name)
        pool.call(any_loop.call, function, *(frozenset(arg) if isinstance(arg, list) else arg for arg in args))
