"""A training loop with random actions, compared with one process that holds the whole model.

Actions do the same on the model in the session and on the reference, and end by comparing gradients, weights and
optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.equality import relative_error
from helpers.loop_state import (
    MICRO_STEPS,
    TOLERANCE,
    Changes,
    ExpectedError,
    Loop,
    Pending,
    action,
    compare,
    has_gradients,
    zero_gradients,
)
from helpers.moe_model import ALL_LISTS, Shape, TinyMoE
from helpers.planned_steps import rows_of
from helpers.random_plans import all_counts, random_placement, random_plan, random_schedule, random_trace
from trimtab.errors import InputError
from trimtab.planner import Placement, PlannedStep, Schedule, Workload
from trimtab.planner.plan.pass_times import PARTS
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.strategy import NOTHING
from trimtab.runtime import Session, step_planner
from trimtab.trace import RoutingTrace

State = dict[str, Any]


def begin(
    state: State, seed: int, checked: bool, top_k: int, frozen: frozenset[int], per_rank: int = 2,
    frozen_before: bool = False, on_threads: bool = False,
) -> None:  # fmt: skip
    """Start another loop on the ranks of a pool.

    Args:
        on_threads: each plan and what follows until the next one run on a thread of their own, which then ends.
    """
    if "loop" in state:
        state.pop("loop").session.close()
    loop = state["loop"] = start(
        seed, checked, top_k=top_k, frozen=frozen, per_rank=per_rank, frozen_before=frozen_before
    )
    loop.on_threads = on_threads


def call(state: State, function: Callable[..., None], *args: Any) -> list[int]:
    """`begin`, or an action of the loop that it has started. Returns the forwards whose backward may follow."""
    if function is begin:
        begin(state, *args)
    elif (loop := state["loop"]).on_threads:
        before, loop.thread = loop.changes.plans, loop.thread or ThreadPoolExecutor(1)
        loop.thread.submit(function, loop, *args).result()
        if loop.changes.plans > before:
            # What follows runs on another thread.
            loop.thread.shutdown()
            loop.thread = None
    else:
        function(loop, *args)
    return sorted(state["loop"].pending)


def start(
    seed: int = 3,
    checked: bool = False,
    group: dist.ProcessGroup | None = None,
    *,
    top_k: int = 2,
    frozen: frozenset[int] = frozenset(),
    per_rank: int = 2,
    frozen_before: bool = False,
    **settings: Any,
) -> Loop:
    """A new model in a new session, with a first plan.

    Args:
        checked: let the session verify weights.
        group: of the session; all ranks by default.
        frozen: layers whose experts are not trained.
        per_rank: experts of a rank.
        frozen_before: nothing before the first experts is trained, so that their input needs no gradient.
        settings: others of the session.
    """
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    ranks = dist.get_world_size()
    lists = ((), ("down",), ALL_LISTS)[seed % 3]
    shape = Shape(layers=int(rng.integers(2, 4)), experts=ranks * per_rank, top_k=top_k, hidden=4, width=4, lists=lists)
    slots = int(rng.integers(1, 3))
    session = Session(
        num_experts=shape.experts, slots_per_rank=slots, ring_layers=int(rng.integers(2, 4)),
        ranks_per_node=int(rng.choice([size for size in range(1, ranks + 1) if ranks % size == 0])),
        verify_weights=checked, group=group, **settings,
    )  # fmt: skip
    reference, model = TinyMoE(shape, torch.float64), TinyMoE(shape, torch.float64)
    model.load_state_dict(reference.state_dict())
    for block in model.moe_blocks():
        block.is_read = seed % 2 == 0
    model.share(session)
    for either in (reference, model):
        for layer, block in enumerate(either.moe_blocks()):
            for parameter in block.expert_parameters():
                parameter.requires_grad_(layer not in frozen)
        for module in (either.embed, either.mixes[0], either.moe_blocks()[0].router) if frozen_before else ():
            module.requires_grad_(False)
    first, second = (torch.optim.AdamW(m.parameters(), lr=0.01, eps=0.1, foreach=False) for m in (reference, model))
    session.register_optimizers(second)
    loop = Loop(session, model, reference, (first, second), slots, frozen_before)
    loop.averages = tuple({n: p.detach().clone() for n, p in m.named_parameters()} for m in (model, reference))
    session.register_state(model, loop.averages[0])
    plan(loop, seed)
    return loop


def plan(loop: Loop, seed: int, moves: bool = True, mode: str = "plan", rows: str = "known") -> None:
    """Another trace, and a random plan for it.

    Args:
        rows: one of `ROWS`.
    """
    session, rng = loop.session, np.random.default_rng(seed)
    carried_out = mode in ("plan", "static")
    if carried_out and loop.offloaded_parameters is not None:
        return
    layers, ranks = len(session.layers), session.num_ranks
    trace = random_trace(
        rng, num_sequences=6, max_length=8, num_layers=layers, num_experts=session.num_experts,
        top_k=loop.model.moe_blocks()[0].top_k, unknown=0.3 if rows == "some unknown" else 0.0,
    )  # fmt: skip
    if rows == "some with an id twice":
        # As frameworks fill rows without a record.
        trace.expert_ids[rng.random(trace.expert_ids.shape[:2]) < 0.3] = 0
    unread_T = np.zeros(trace.num_tokens, bool)
    if rows == "some unread":
        # Padding, and the last tokens of sequences, for some of which zeros were recorded.
        unread_T = rng.random(trace.num_tokens) < 0.2
        unread_T[trace.sequence_starts[1:] - 1] = True
        trace.expert_ids[unread_T] = np.where(rng.random(int(unread_T.sum())) < 0.5, trace.no_route, 0)[:, None, None]
        if mode == "static":
            mode = "plan"  # Others move experts.
    schedule = random_schedule(rng, 6, num_ranks=ranks, num_micro_steps=MICRO_STEPS)
    mode_before, session.mode = session.mode, mode  # type: ignore[assignment]
    if rows == "some unread":
        _plan_unread(loop, trace, schedule, unread_T, seed)
        _begin(loop, trace, schedule, unread_T, rng)
        return
    placement = random_placement(rng, layers, session.num_experts, ranks) if moves else session.placement
    chosen = random_plan(
        rng, Workload.from_trace(trace.with_repeats_unknown()[0], schedule), schedule, slots=loop.slots,
        placement=placement, ranks_per_node=session.topology.ranks_per_node,
    )  # fmt: skip
    mine = trace.select(schedule.sequences_of(session.rank))
    if carried_out and _would_move_gradients(loop, placement):
        before = session.placement.home
        with pytest.raises(RuntimeError, match="gradients that wait for an optimizer step"):
            session.apply_step_plan(chosen, mine)
        assert np.array_equal(session.placement.home, before)
        # The running plan is one of this mode.
        session.mode = mode_before
        return
    if carried_out and not np.array_equal(chosen.home, session.placement.home):
        zero_gradients(loop, True)  # Gradients of experts that move are dropped, if they are zeros.
    session.apply_step_plan(chosen, mine)
    _begin(loop, trace, schedule, unread_T, rng)


def _plan_unread(loop: Loop, trace: RoutingTrace, schedule: Schedule, unread_T: np.ndarray, seed: int) -> None:
    """Plan micro-steps with unread tokens, at the present homes."""
    session = loop.session

    def random_planned(loads: StepLoads, schedule: Schedule, placement: Placement, *_: Any, **__: Any) -> PlannedStep:
        (load,) = all_counts(loads)
        chosen = random_plan(
            np.random.default_rng(seed), load, schedule, slots=loop.slots, placement=placement,
            ranks_per_node=session.topology.ranks_per_node,
        )  # fmt: skip
        return PlannedStep(schedule, (chosen,), NOTHING, {"nothing": 1.0}, dict.fromkeys(PARTS, 1.0))

    places = [(schedule.micro_step == index) & (schedule.rank == session.rank) for index in range(MICRO_STEPS)]
    rows_M = [rows_of(trace, np.flatnonzero(chosen)).numpy() for chosen in places]
    with mock.patch.object(step_planner, "plan_schedule", random_planned):
        report = session.plan_micro_steps(
            [trace.expert_ids[rows].astype(np.int64) for rows in rows_M],
            unread=[unread_T[rows] for rows in rows_M],
            may_move=False,
        )
    assert report.mixed_instances == 0


def _begin(loop: Loop, trace: RoutingTrace, schedule: Schedule, unread_T: np.ndarray, rng: np.random.Generator) -> None:
    """Go on with a planned step."""
    loop.trace, loop.schedule, loop.unread_T = trace, schedule, unread_T
    loop.tokens, loop.labels = (torch.from_numpy(rng.integers(0, 11, trace.num_tokens)) for _ in range(2))
    loop.changes = loop.changes._replace(plans=loop.changes.plans + 1)
    compare(loop)


def forward(
    loop: Loop,
    index: int,
    run: str = "plain",
    number: int | None = None,
    at_once: bool = False,
    skipped: frozenset[int] = frozenset(),
    inference: bool = False,
    deviates: int | None = None,
    padded: bool = False,
) -> None:
    """A micro-step's forward.

    Args:
        run: how blocks run, see `TinyMoE`.
        number: of the pending backward; without gradients if None.
        at_once: run the backward inside the micro-step.
        inference: run in inference mode.
        deviates: some tokens get other ids than the recorded ones, drawn with this seed. One rank announces it.
        padded: layers are given rows of no token, too.
    """
    run = loop.may_run(run)
    if loop.offloaded_parameters is not None:
        with pytest.raises(InputError, match="has no memory now"), loop.session.micro_step(index):
            pass
        return
    mine = loop.rows(index, loop.session.rank)
    rows = loop.rows(index)
    # Without the first, a middle and the last row.
    places = torch.arange(len(mine))
    positions = places + 1 + (places >= len(mine) // 2) if padded else None
    with torch.inference_mode() if inference else torch.set_grad_enabled(number is not None):
        chosen = None if deviates is None else loop.chosen_ids(deviates)
        expected, expected_logits = loop.expect(rows, run, skipped, False, chosen)
        loop.model.run_block, loop.model.skipped = run, skipped
        if chosen is not None:
            layers = range(len(loop.session.layers))
            ids = [torch.from_numpy(chosen[mine.numpy(), layer]) for layer in layers]
            if positions is not None:
                ids = [torch.full((len(mine) + 3, each.shape[1]), -1).index_copy(0, positions, each) for each in ids]
            loop.model.chosen_ids = ids
        before = loop.session.counters.deviating_rows
        is_announced = deviates is not None and deviates % loop.session.num_ranks == loop.session.rank
        with loop.session.micro_step(index, positions=positions, may_deviate=is_announced):
            loss, logits = loop.loss(loop.model, mine, positions)
            if number is not None:
                carried_out = loop.session.mode in ("plan", "static")
                loop.pending[number] = Pending(loss, expected, loop.changes, carried_out)
                if at_once:
                    _backward(loop, number)
    loop.model.chosen_ids = None
    deviating = (
        0 if chosen is None else _count_deviating(chosen[mine.numpy()], loop.recorded_ids()[mine.numpy()], skipped)
    )
    assert loop.session.counters.deviating_rows - before == deviating
    is_read = ~loop.unread_T
    places = torch.searchsorted(rows[is_read[rows.numpy()]], mine[is_read[mine.numpy()]])
    error = relative_error(logits, expected_logits[places])
    assert error < TOLERANCE, ("logits", error)
    compare(loop)


def _count_deviating(chosen_NLK: np.ndarray, recorded_NLK: np.ndarray, skipped: frozenset[int]) -> int:
    is_recorded = (chosen_NLK[..., None] == recorded_NLK[:, :, None]).any(axis=3)
    deviates = ~is_recorded & (chosen_NLK >= 0) & (recorded_NLK >= 0)
    return int(deviates[:, [layer for layer in range(deviates.shape[1]) if layer not in skipped]].sum())


@action
def live(loop: Loop, seed: int, run: str, number: int | None) -> None:
    """A forward outside any micro-step, on the router's choice: evaluation, generation, another loss."""
    run, rng = loop.may_run(run), np.random.default_rng(seed)
    rank_of = rng.integers(0, loop.session.num_ranks, len(loop.tokens))
    rows, mine = torch.arange(len(loop.tokens)), torch.from_numpy(np.flatnonzero(rank_of == loop.session.rank))
    with torch.set_grad_enabled(number is not None):
        expected, expected_logits = loop.expect(rows, run, frozenset(), live=True)
        loop.model.run_block, loop.model.skipped = run, frozenset()
        loss, logits = loop.loss(loop.model, mine)
    is_read, is_mine_read = ~loop.unread_T, ~loop.unread_T[mine.numpy()]
    places = torch.from_numpy(np.cumsum(is_read) - 1)[mine[is_mine_read]]
    assert relative_error(logits, expected_logits[places]) < TOLERANCE, "live logits"
    if number is not None:
        loop.pending[number] = Pending(loss, expected, loop.changes, False)


STALE = r"another plan was applied|modified by an inplace|changed within"


@action
def backward(loop: Loop, number: int, twice: bool = False) -> None:
    """The backward of a pending forward, outside any micro-step, or two. It fails if the forward is out of date."""
    pending = loop.pending[number]
    before, now = pending.changes, loop.changes
    if before.weights != now.weights or (pending.is_planned and before.plans != now.plans):
        with pytest.raises(RuntimeError, match=STALE):
            loop.pending.pop(number).loss.backward()
        # As a loop must do after a failed backward.
        zero_gradients(loop, True)
    elif before != now:
        # It runs unless experts have moved, a checkpointed layer would run again, or an optimizer stepped, even without
        # gradients.
        try:
            _backward(loop, number)
        except RuntimeError as error:
            assert re.search(STALE, str(error))
            zero_gradients(loop, True)
    else:
        _backward(loop, number, twice)


def _backward(loop: Loop, number: int, twice: bool = False) -> None:
    pending = loop.pending.pop(number)
    loss = pending.loss
    if twice:
        (loss / 4).backward(retain_graph=True)
        loss = loss * 3 / 4
    loss.backward()
    if loop.is_finished and not has_gradients(loop.reference):
        loop.is_finished = False  # Adding to zeros is allowed.
    pending.expected.backward()
    loop.has_mixed_gradients |= loop.is_finished


@action
def touch(loop: Loop, rank: int) -> None:
    """A backward without MoE layers, on one rank alone."""
    if loop.session.rank == rank % loop.session.num_ranks:
        loop.model.head.bias.sum().backward()
    if loop.is_finished and not has_gradients(loop.reference):
        loop.is_finished = False
    loop.reference.head.bias.sum().backward()
    loop.has_mixed_gradients |= loop.is_finished


@action
def fail(loop: Loop, index: int, run: str, block: int, where: str) -> None:
    """An exception on all ranks: in a micro-step's `forward`, or in its backward, `inside` or `outside` the micro-step.

    After a failed backward the gradients of the accumulation are dropped.
    """

    def stop(*_: object) -> None:
        raise ExpectedError

    def hook(at: int, x: torch.Tensor) -> torch.Tensor:
        if at == block:
            if where == "forward":
                stop()
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            x.register_hook(stop)
        return x

    def run_both() -> None:
        with loop.session.micro_step(index):
            loss, _ = loop.loss(loop.model, loop.rows(index, loop.session.rank))
            if where == "inside":
                loss.backward()
        loss.backward()

    loop.model.before_block, loop.model.run_block, loop.model.skipped = hook, loop.may_run(run), frozenset()
    with pytest.raises(ExpectedError):
        run_both()
    loop.model.before_block = None
    if where != "forward":
        zero_gradients(loop, True)


def finish(loop: Loop) -> None:
    """Complete the gradients; once for each accumulation."""
    if loop.is_finished and has_gradients(loop.reference):
        with pytest.raises(RuntimeError, match="summed over ranks already"):
            loop.session.finish_gradients(loop.model.replicated())
        return
    loop.session.finish_gradients(loop.model.replicated())
    loop.is_finished = True
    compare(loop)


@action
def step(loop: Loop, zero: bool | None = True) -> None:
    """An optimizer step with complete gradients.

    Args:
        zero: value of `set_to_none` for the zeroing after it; None: gradients are kept.
    """
    if loop.has_mixed_gradients:
        zero_gradients(loop, True)
    if not loop.is_finished:
        finish(loop)
    # An optimizer skips parameters without gradients.
    changes = any(p.grad is not None for p in loop.reference.parameters())
    loop.changes = Changes(loop.changes.plans, loop.changes.weights + changes, loop.changes.steps + 1)
    for optimizer in loop.optimizers:
        optimizer.step()
    loop.has_stepped = True
    for average, model in zip(loop.averages, (loop.model, loop.reference), strict=True):
        for name, parameter in model.named_parameters():
            average[name] = 0.75 * average[name] + 0.25 * parameter.detach()
    if zero is not None:
        zero_gradients(loop, zero)


def update(loop: Loop, index: int = 0, number: int = 1) -> None:
    """Forward and backward of a micro-step."""
    forward(loop, index, "plain", number, True)


def zero(loop: Loop, to_none: bool = True) -> None:
    """Gradients are zeroed."""
    zero_gradients(loop, to_none)
    compare(loop)


@action
def sleep(loop: Loop, seed: int) -> None:
    """The session gives everything back, and is used again."""
    loop.session.suspend()
    plan(loop, seed, moves=False)


@action
def move(loop: Loop, seed: int) -> None:
    """Experts move to random homes, between steps."""
    session = loop.session
    placement = random_placement(
        np.random.default_rng(seed), len(session.layers), session.num_experts, session.num_ranks
    )
    if _would_move_gradients(loop, placement):
        with pytest.raises(RuntimeError, match="gradients that wait for an optimizer step"):
            session.move(placement)
        return
    same = np.array_equal(placement.home, session.placement.home)
    if not same:
        zero_gradients(loop, True)
    session.move(placement)
    if not same and session.mode in ("plan", "static"):
        with pytest.raises(RuntimeError, match="experts have moved"), session.micro_step(0):
            pass
    plan(loop, seed, False, session.mode)


def _would_move_gradients(loop: Loop, placement: Placement) -> bool:
    """Whether experts with gradients have another home under a placement."""
    moved_L = (placement.home != loop.session.placement.home).any(axis=1)
    return any(
        moved and parameter.grad is not None and bool(parameter.grad.any())
        for block, moved in zip(loop.reference.moe_blocks(), moved_L, strict=True)
        for parameter in block.expert_parameters()
    )
