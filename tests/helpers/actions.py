"""What happens in a training loop: each action does the same on the model in the session and on the whole model.

All ranks call the same actions. What a loop may not do raises, as each action asserts.
"""

from __future__ import annotations

import copy
import re
import tempfile
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from helpers.late_device import unwaited
from helpers.loop import (
    MAX_NORM,
    SEQUENCES,
    Changes,
    ExpectedError,
    Loop,
    Options,
    Pending,
    action,
    has_gradients,
    make_loop,
    make_optimizer,
    make_session,
    zero_gradients,
)
from helpers.moe_model import TinyMoE
from helpers.planned_steps import rows_of
from helpers.random_plans import all_counts, random_placement, random_plan, random_schedule, random_trace
from helpers.random_slices import as_header, random_slices
from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import Placement, PlannedStep, Schedule, Workload
from trimtab.planner.plan.pass_times import PARTS
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.strategy import NOTHING
from trimtab.runtime import step_planner
from trimtab.trace import RoutingTrace

# Errors of a backward whose forward is out of date.
STALE = r"another plan was applied|modified by an inplace|changed within|was suspended between"


def start(seed: int = 3, **options: Any) -> Loop:
    """A new model in a new session, with a first plan."""
    loop = make_loop(Options.of(**{"verify_weights": False} | options), seed)
    plan(loop, seed)
    return loop


def plan(loop: Loop, seed: int, moves: bool = True, mode: str | None = None, rows: str | None = None) -> None:
    """Another trace, and a plan for it.

    Args:
        moves: experts may move.
        mode, rows: instead of the loop's.
    """
    session, options, rng = loop.session, loop.options, np.random.default_rng(seed)
    rows, planner = rows or options.rows, options.planner
    mode_before = session.mode
    session.mode = mode or session.mode  # type: ignore[assignment]
    if loop.is_carried_out and loop.offloaded_parameters is not None:
        session.mode = mode_before
        return
    layers, ranks, experts = len(session.layers), session.topology.num_data_ranks, session.num_experts
    trace = random_trace(
        rng, num_sequences=SEQUENCES, max_length=8, num_layers=layers, num_experts=experts,
        top_k=loop.model.moe_blocks()[0].top_k, unknown=0.3 if rows == "unknown" else 0.0,
    )  # fmt: skip
    if rows == "twice":
        # As frameworks fill rows without a record.
        trace.expert_ids[rng.random(trace.expert_ids.shape[:2]) < 0.3] = 0
    unread_T = np.zeros(trace.num_tokens, bool)
    if rows == "unread":
        # Padding, and the last tokens of sequences, for some of which zeros were recorded.
        unread_T = rng.random(trace.num_tokens) < 0.2
        unread_T[trace.sequence_starts[1:] - 1] = True
        trace.expert_ids[unread_T] = np.where(rng.random(int(unread_T.sum())) < 0.5, trace.no_route, 0)[:, None, None]
        planner = "micro-steps" if planner in ("random", "sequences") else planner
    schedule = random_schedule(rng, SEQUENCES, num_ranks=ranks, num_micro_steps=3)
    if planner == "sequences":
        # Of sequences that are on other ranks.
        own = np.flatnonzero(np.arange(SEQUENCES) * ranks // SEQUENCES == loop.data_rank)
        planned = session.plan_sequences(trace.select(own), token_budget=16)
        schedule = planned.schedule
    placement = random_placement(rng, layers, experts, session.num_ranks) if moves else session.placement
    if session.mode == "static":
        # Others move experts.
        placement = session.placement
    if session.mode == "static" and planner != "random":
        # Its plans have the first homes.
        zero_gradients(loop)
    mine = trace.select(schedule.sequences_of(loop.data_rank))
    if loop.is_live:
        pass
    elif loop.is_carried_out and planner == "random" and _would_move_gradients(loop, placement):
        before, plans = session.placement.home, _random_plans(loop, trace, schedule, placement, rng)
        with pytest.raises(RuntimeError, match="gradients that wait for an optimizer step"):
            session.apply_step_plan(plans, mine)
        assert np.array_equal(session.placement.home, before)
        # The running plan is one of this mode.
        session.mode = mode_before
        return
    elif planner == "random":
        if loop.is_carried_out and not np.array_equal(placement.home, session.placement.home):
            zero_gradients(loop)  # Gradients of experts that move are dropped, if they are zeros.
        session.apply_step_plan(_random_plans(loop, trace, schedule, placement, rng), mine)
    elif planner == "sequences":
        session.apply_plan(planned, mine)
    elif planner == "own" and rows != "unread":
        session.plan(mine, schedule)
    else:
        _plan_micro_steps(loop, trace, schedule, unread_T, seed, planner, moves)
    # Nothing reads them any more.
    mine.expert_ids[:] = 0
    loop.trace, loop.schedule, loop.unread_T, loop.kind = trace, schedule, unread_T, rows
    loop.tokens, loop.labels = (torch.from_numpy(rng.integers(0, 11, trace.num_tokens)) for _ in range(2))
    loop.changes = loop.changes._replace(plans=loop.changes.plans + 1)
    if loop.compares:
        loop.compare()


def _random_plans(
    loop: Loop, trace: RoutingTrace, schedule: Schedule, placement: Placement, rng: np.random.Generator
) -> Any:
    """The plan of this rank's group."""
    session, plans = loop.session, []
    for group in range(session.topology.groups):
        of_group, group_schedule = schedule.of_group(group, session.num_ranks)
        workload = Workload.from_trace(trace.select(of_group).with_repeats_unknown()[0], group_schedule)
        plans.append(
            random_plan(
                rng, workload, group_schedule, slots=session.slots_per_rank, placement=placement,
                ranks_per_node=session.topology.ranks_per_node,
            )
        )  # fmt: skip
    return plans[session.topology.group]


def _plan_micro_steps(
    loop: Loop, trace: RoutingTrace, schedule: Schedule, unread_T: Array, seed: int, planner: str, moves: bool
) -> None:
    """Plan this rank's rows of each micro-step, at random homes if gradients allow it."""
    session, home_rng, plan_rng = loop.session, np.random.default_rng(seed), np.random.default_rng((seed, 1))

    def random_planned(
        loads: StepLoads, schedule: Schedule, placement: Placement, *_: Any, **chosen: Any
    ) -> PlannedStep:
        if chosen["may_move"]:
            placement = random_placement(home_rng, len(session.layers), session.num_experts, session.num_ranks)
        plans = tuple(
            random_plan(
                plan_rng, load, part, slots=session.slots_per_rank, placement=placement,
                ranks_per_node=session.topology.ranks_per_node,
            )
            for part, load in zip(loads.schedules, all_counts(loads), strict=True)
        )  # fmt: skip
        planned = PlannedStep(schedule, plans, NOTHING, {"nothing": 1.0}, dict.fromkeys(PARTS, 1.0))
        if planner == "micro-steps" or not chosen["sliced"]:
            return planned
        return as_header(planned, slots=session.slots_per_rank, waits=planner in ("in time", "fails"))

    micro_steps = range(schedule.num_micro_steps)
    rows_M = [loop_rows(trace, schedule, index, loop.data_rank) for index in micro_steps]
    unread = [unread_T[rows] for rows in rows_M] if unread_T.any() else None
    with ExitStack() as stack:
        if planner != "own":
            stack.enter_context(mock.patch.object(step_planner, "plan_schedule", random_planned))
            stack.enter_context(random_slices(loop.delay))
        report = session.plan_micro_steps(
            [trace.expert_ids[rows].astype(np.int64) for rows in rows_M], unread=unread, may_move=moves
        )
    is_unknown_TL = (trace.with_repeats_unknown()[0].expert_ids == trace.no_route).any(axis=2) & ~unread_T[:, None]
    rank_T, micro_step_T = (np.repeat(each, trace.sequence_lengths) for each in (schedule.rank, schedule.micro_step))
    of_group = rank_T // session.num_ranks == session.topology.group
    mixed = sum(is_unknown_TL[of_group & (micro_step_T == index)].any(axis=0).sum() for index in micro_steps)
    assert report.mixed_instances == mixed


def loop_rows(trace: RoutingTrace, schedule: Schedule, index: int, rank: int) -> Array:
    """Numbers of the tokens that a rank has in a micro-step."""
    return rows_of(trace, np.flatnonzero((schedule.micro_step == index) & (schedule.rank == rank))).numpy()


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
    chunk: tuple[int, int] = (0, 1),
) -> None:
    """A micro-step's forward.

    Args:
        run: how blocks run, see `TinyMoE`.
        number: of the pending backward; without gradients if None.
        at_once: run the backward inside the micro-step.
        inference: run in inference mode.
        deviates: some tokens get other ids than the recorded ones, drawn with this seed. One rank announces it.
        padded: layers are given rows of no token, too.
        chunk: a pipeline chunk, and the number of all. Chunks of one forward have one number.
    """
    run, session, model = loop.may_run(run), loop.session, loop.model
    if loop.offloaded_parameters is not None:
        with pytest.raises(InputError, match="has no memory now"), loop.micro_step(index):
            pass
        return
    rows, mine = loop.rows(index), loop.rows(index, loop.data_rank)
    # Without the first, a middle and the last row.
    places = torch.arange(len(mine))
    positions = places + 1 + (places >= len(mine) // 2) if padded else None
    chosen = None if deviates is None or loop.is_live else loop.chosen_ids(deviates)
    model.run_block, model.skipped = run, skipped
    model.chosen_ids = None if chosen is None else _ids_of_layers(chosen[mine.numpy()], positions)
    before, run_before = session.counters.deviating_rows, [block.rows_run for block in model.moe_blocks()]
    is_announced = chosen is not None and deviates is not None and deviates % session.num_ranks == session.rank
    first, end = (len(session.layers) * place // chunk[1] for place in (chunk[0], chunk[0] + 1))
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(number is not None))
        pending = loop.pending[number or 0] if chunk[0] else Pending(loop.changes, loop.is_carried_out)
        if number is not None:
            loop.pending[number] = pending
        stack.enter_context(loop.micro_step(index, positions=positions, may_deviate=is_announced))
        if pending.left is None:
            x = model.embed(loop.batch(mine, positions))
        else:
            x = pending.left.detach().requires_grad_(number is not None)
            pending.cuts.append((pending.left, x))
        with nullcontext() if loop.may_wait or chosen is not None else unwaited():
            pending.left = x = model.run(x, first, end)
            logits = model.head(x) if chunk[0] + 1 == chunk[1] else None
        if logits is not None:
            pending.loss, logits = loop.loss_of(logits, mine, positions)
            pending.expected, expected = loop.expect(rows, run, skipped, live=loop.is_live, chosen=chosen)
            if at_once and number is not None:
                _backward(loop, number)
    # Queued work reads them.
    loop.kept += model.chosen_ids or []
    model.chosen_ids = None
    if chunk == (0, 1) and not loop.is_live:
        wanted = _count_deviating(chosen, loop.recorded_ids(), mine.numpy(), skipped)
        assert session.counters.deviating_rows - before == wanted
        if loop.is_planned and chosen is None and not skipped:
            rows_run = [block.rows_run - one for block, one in zip(model.moe_blocks(), run_before, strict=True)]
            assert rows_run == session.rank_loads[index, :, session.rank].tolist(), "rows of the plan"
    if logits is not None:
        is_read = ~loop.unread_T
        places = torch.searchsorted(rows[is_read[rows.numpy()]], mine[is_read[mine.numpy()]])
        error = loop.error_of(logits, expected[places])
        assert error < 1, ("logits", error)
    if loop.compares:
        loop.compare()


def _ids_of_layers(ids_NLK: Array, positions: torch.Tensor | None) -> list[torch.Tensor]:
    """Ids of this rank's rows by layer, -1 for rows of no token."""
    ids = [torch.from_numpy(ids_NLK[:, layer]) for layer in range(ids_NLK.shape[1])]
    if positions is None:
        return ids
    return [torch.full((len(each) + 3, each.shape[1]), -1).index_copy(0, positions, each) for each in ids]


def _count_deviating(chosen_TLK: Array | None, recorded_TLK: Array, mine: Array, skipped: frozenset[int]) -> int:
    if chosen_TLK is None:
        return 0
    chosen_NLK, recorded_NLK = chosen_TLK[mine], recorded_TLK[mine]
    is_recorded = (chosen_NLK[..., None] == recorded_NLK[:, :, None]).any(axis=3)
    deviates = ~is_recorded & (chosen_NLK >= 0) & (recorded_NLK >= 0)
    return int(deviates[:, [layer for layer in range(deviates.shape[1]) if layer not in skipped]].sum())


@action
def live(loop: Loop, seed: int, run: str = "plain", number: int | None = None) -> None:
    """A forward outside any micro-step, on the router's choice: evaluation, generation, another loss."""
    run, rng = loop.may_run(run), np.random.default_rng(seed)
    rank_of = rng.integers(0, dist.get_world_size(), len(loop.tokens))
    rows, mine = torch.arange(len(loop.tokens)), torch.from_numpy(np.flatnonzero(rank_of == loop.data_rank))
    with torch.set_grad_enabled(number is not None):
        expected, expected_logits = loop.expect(rows, run, live=True)
        loop.model.run_block, loop.model.skipped = run, frozenset()
        loss, logits = loop.loss(loop.model, mine)
    is_read, is_mine_read = ~loop.unread_T, ~loop.unread_T[mine.numpy()]
    places = torch.from_numpy(np.cumsum(is_read) - 1)[mine[is_mine_read]]
    assert loop.error_of(logits, expected_logits[places]) < 1, "live logits"
    if number is not None:
        loop.pending[number] = Pending(loop.changes, False, loss=loss, expected=expected)


@action
def backward(loop: Loop, number: int, twice: bool = False, chunk: int = 0) -> None:
    """The backward of a pending forward, or of one chunk, outside any micro-step; or two. It fails if the forward is
    out of date."""
    pending = loop.pending[number]
    before, now = pending.changes, loop.changes
    if before.weights != now.weights or (pending.is_planned and before.plans != now.plans):
        with pytest.raises(RuntimeError, match=STALE):
            loop.pending.pop(number).loss.backward()
        # As a loop must do after a failed backward.
        zero_gradients(loop)
    elif before != now:
        # It runs unless experts have moved, a checkpointed layer would run again, or an optimizer stepped, even without
        # gradients.
        try:
            _backward(loop, number)
        except RuntimeError as error:
            assert re.search(STALE, str(error))
            loop.pending.pop(number)
            zero_gradients(loop)
    else:
        _backward(loop, number, twice, chunk)


def _backward(loop: Loop, number: int, twice: bool = False, chunk: int = 0) -> None:
    pending = loop.pending[number]
    if chunk == len(pending.cuts):
        loss = pending.loss
        with nullcontext() if loop.may_wait else unwaited():
            if twice:
                (loss / 4).backward(retain_graph=True)
                loss = loss * 3 / 4
            loss.backward()
    else:
        left, entered = pending.cuts.pop()
        left.backward(entered.grad)
    if chunk:
        return
    del loop.pending[number]
    if loop.is_finished and not has_gradients(loop.reference):
        loop.is_finished = False  # Adding to zeros is allowed.
    pending.expected.backward()
    loop.has_mixed_gradients |= loop.is_finished


@action
def touch(loop: Loop, rank: int) -> None:
    """A backward without MoE layers, on one rank alone."""
    mix: Any = loop.model.mixes[-1]
    if dist.get_rank() == rank % dist.get_world_size():
        mix.bias.sum().backward()
    if loop.is_finished and not has_gradients(loop.reference):
        loop.is_finished = False
    whole: Any = loop.reference.mixes[-1]
    whole.bias.sum().backward()
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
        with loop.micro_step(index):
            loss, _ = loop.loss(loop.model, loop.rows(index, loop.data_rank))
            if where == "inside":
                loss.backward()
        loss.backward()

    loop.model.before_block, loop.model.run_block, loop.model.skipped = hook, loop.may_run(run), frozenset()
    with pytest.raises(ExpectedError):
        run_both()
    loop.model.before_block = None
    if where != "forward":
        zero_gradients(loop)


def finish(loop: Loop) -> None:
    """Complete the gradients; once for each accumulation."""
    if loop.is_finished and has_gradients(loop.reference):
        with pytest.raises(RuntimeError, match="summed over ranks already"):
            loop.session.finish_gradients(loop.dense())
        return
    loop.session.finish_gradients(loop.dense())
    loop.is_finished = True
    if loop.compares:
        loop.compare()


@action
def step(loop: Loop, zero: bool | None = True) -> None:
    """An optimizer step with complete gradients, clipped where the loop's are.

    Args:
        zero: value of `set_to_none` for the zeroing after it; None: gradients are kept.
    """
    if loop.has_mixed_gradients:
        zero_gradients(loop)
    if not loop.is_finished:
        finish(loop)
    if loop.options.sgd and has_gradients(loop.reference):
        norm = loop.session.clip_gradients(loop.dense(), MAX_NORM)
        expected = torch.nn.utils.clip_grad_norm_(loop.reference.parameters(), MAX_NORM)
        assert loop.error_of(torch.as_tensor(norm, dtype=expected.dtype), expected) < loop.most, (
            "norm",
            norm,
            expected,
        )
    # An optimizer skips parameters without gradients.
    changes = any(p.grad is not None for p in loop.reference.parameters())
    loop.changes = Changes(loop.changes.plans, loop.changes.weights + changes, loop.changes.steps + 1)
    for optimizer in loop.optimizers:
        optimizer.step()
    loop.has_stepped = True
    for average, model in zip(loop.averages, (loop.model, loop.reference), strict=True):
        for name, parameter in model.named_parameters():
            if name in average:
                average[name].data.mul_(0.75).add_(parameter.detach(), alpha=0.25)
    if zero is not None:
        zero_gradients(loop, zero)


def update(loop: Loop, index: int = 0, number: int = 1) -> None:
    """Forward and backward of a micro-step."""
    forward(loop, index, "plain", number, True)


def zero(loop: Loop, to_none: bool = True) -> None:
    """Gradients are zeroed."""
    zero_gradients(loop, to_none)
    if loop.compares:
        loop.compare()


@action
def suspend(loop: Loop, seed: int) -> None:
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
        zero_gradients(loop)
    session.move(placement)
    if not same and loop.is_carried_out:
        with pytest.raises(RuntimeError, match="experts have moved"), session.micro_step(0):
            pass
    plan(loop, seed, moves=False)


def _would_move_gradients(loop: Loop, placement: Placement) -> bool:
    """Whether experts with gradients have another home under a placement."""
    if loop.options.groups > 1:
        # A group knows its own gradients alone.
        zero_gradients(loop)
    moved_L = (placement.home != loop.session.placement.home).any(axis=1)
    return any(
        moved and parameter.grad is not None and bool(parameter.grad.any())
        for block, moved in zip(loop.reference.moe_blocks(), moved_L, strict=True)
        for parameter in block.expert_parameters()
    )


@action
def save(loop: Loop) -> None:
    """Store state dicts, and the model's weights in order of experts."""
    parts = (loop.model, loop.optimizers[1], loop.reference, loop.optimizers[0])
    states = [part.state_dict() for part in parts]
    loop.saved = tuple(copy.deepcopy([*states, loop.session.logical_state_dict(loop.model)]))


@action
def reload(loop: Loop, seed: int) -> None:
    """Load what was stored, after experts have returned to the places that they had. Before that it is refused, or
    modules put rows in order."""
    if loop.saved is None:
        return
    model, session = loop.model, loop.session
    zero_gradients(loop)
    mine, state, whole, whole_state, saved = (copy.deepcopy(part) for part in loop.saved)
    before = [layer.places for layer in session.homes]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    try:
        model.load_state_dict(mine)
        is_loaded = True
    except RuntimeError as error:
        assert "move_to_saved" in str(error)
        is_loaded = False
    loop.reference.load_state_dict(whole)
    if is_loaded:
        weights = session.logical_state_dict(model)
        assert all(torch.equal(weights[name], value) for name, value in saved.items())
    session.move_to_saved(model, mine)
    model.load_state_dict(mine)
    loop.optimizers[1].load_state_dict(state)
    loop.optimizers[0].load_state_dict(whole_state)
    loop.changes = loop.changes._replace(weights=loop.changes.weights + 1)
    loop.pending.clear()
    if any(layer.places is not places for layer, places in zip(session.homes, before, strict=True)):
        plan(loop, seed, False)


@action
def save_distributed(loop: Loop) -> None:
    """Weights are saved and loaded by `torch.distributed.checkpoint`."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    save_checkpoint(loop.session.dcp_state_dict(loop.model), checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(0.5).add_(0.1)
    load_checkpoint(loop.session.dcp_state_dict(loop.model), checkpoint_id=folder[0])
    loop.session.weights_changed()
    loop.changes = loop.changes._replace(weights=loop.changes.weights + 1)
    loop.pending.clear()


@action
def change_session(loop: Loop, seed: int) -> None:
    """Another session gets the model's experts, where they are."""
    before = loop.session
    loop.pending.clear()
    loop.session = make_session(loop.options, loop.seed, before.num_experts)
    loop.session.mode = before.mode
    for block in loop.model.moe_blocks():
        block.run_in(loop.session)
    assert np.array_equal(loop.session.placement.home, before.placement.home)
    loop.session.register_optimizers(loop.optimizers[1])
    zero_gradients(loop)
    before.close()
    plan(loop, seed, False)


@action
def change_optimizer(loop: Loop, seed: int, replaces: bool = False) -> None:
    """Another optimizer with the same state, for the same parameters or for others that replace them.

    Args:
        replaces: the model gets other parameters; refused at the next micro-step if the session got a list.
    """
    old = loop.optimizers[1]
    if replaces:
        if not loop.model.moe_blocks()[0].is_read:
            return
        zero_gradients(loop)
        loop.pending.clear()
        frozen = {name for name, parameter in loop.model.named_parameters() if not parameter.requires_grad}
        values = {name: value.clone() for name, value in loop.model.state_dict().items()}
        loop.model.load_state_dict(values, assign=True)
        for name, parameter in loop.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    new = make_optimizer(loop.options, loop.model)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    loop.session.register_optimizers(new)
    placement = random_placement(
        np.random.default_rng(seed), len(loop.session.layers), loop.session.num_experts, loop.session.num_ranks
    )
    has_state = any(p in old.state for layer in loop.session.layers for p in layer.parameters)
    if loop.has_stepped and has_state and not np.array_equal(placement.home, loop.session.placement.home):
        with pytest.raises(InputError, match=f"experts can't move: {type(old).__name__} has state"):
            loop.session.move(placement)
    # Nobody uses it any more.
    old.param_groups.clear()
    old.state.clear()
    loop.optimizers, loop.has_stepped = (loop.optimizers[0], new), False


@action
def repoint(loop: Loop) -> None:
    """Replace the memory of all parameters by a clone, as when weights are loaded or averaged."""
    for parameter in loop.model.parameters():
        parameter.data = parameter.data.clone()
    # Hidden from autograd's version check, which is not tested here.
    loop.pending.clear()


@action
def offload(loop: Loop) -> None:
    """The parameters' memory is freed."""
    loop.pending.clear()
    loop.offloaded_parameters = [parameter.data.clone() for parameter in loop.model.parameters()]
    for parameter in loop.model.parameters():
        parameter.data.untyped_storage().resize_(0)


def onload(loop: Loop) -> None:
    """The parameters get new memory."""
    if loop.offloaded_parameters is not None:
        for parameter, values in zip(loop.model.parameters(), loop.offloaded_parameters, strict=True):
            parameter.data = values
        loop.offloaded_parameters = None
    if loop.compares:
        loop.compare()


@action
def write(loop: Loop, way: str) -> None:
    """New weights: by tensor operations, announced writes through `.data`, or unannounced ones."""
    if way == "unnoticed":
        # Run a forward first, so that the session has copied the current weights.
        forward(loop, 0)
        for parameter in loop.model.parameters():
            parameter.data.mul_(2)
        with pytest.raises(RuntimeError, match=r"changed without an optimizer step"), loop.micro_step(0):
            pass
        for parameter in loop.model.parameters():
            parameter.data.div_(2)
        return
    # Alternately, since large weights would have large rounding errors.
    loop.writes += 1
    factor = 1.25 if loop.writes % 2 else 0.8
    for parameter in (*loop.model.parameters(), *loop.reference.parameters()):
        if way == "data":
            parameter.data.mul_(factor)
        else:
            with torch.no_grad():
                parameter.mul_(factor)
    if way == "data":
        loop.pending.clear()
    # Where experts are away from their first homes, they could be the weights of another model.
    if way == "data" or any(not layer.known.are_first for layer in loop.session.homes):
        loop.session.weights_changed()
    loop.changes = loop.changes._replace(weights=loop.changes.weights + 1)


def load_by_position(model: TinyMoE, whole: TinyMoE, home: list[int]) -> None:
    """As frameworks load a reference model: rows are those of the experts that the rank held at first."""
    experts = re.compile(r"(blocks\.\d+\.(?:gate_up|down))(?:\.(\d+))?$")
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if match := experts.match(name):
                rows = [home[int(match[2])]] if match[2] else home
                whole_stack = weights.get(match[1])
                of_rows = [weights[f"{match[1]}.{row}"] if whole_stack is None else whole_stack[row] for row in rows]
                stack = torch.stack(of_rows)
                parameter.data.copy_(stack[0] if match[2] else stack)
            else:
                parameter.data.copy_(weights[name])


@action
def run_other_weights(loop: Loop, seed: int) -> None:
    """The weights of another model, loaded by position, run at the first homes."""
    other = copy.deepcopy(loop.reference)
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    for block in other.moe_blocks():
        block.recorded_ids = None
    loop.model.run_block = other.run_block = "plain"
    loop.model.skipped = other.skipped = frozenset()
    mine = [parameter.detach().clone() for parameter in loop.model.parameters()]
    loop.pending.clear()
    load_by_position(loop.model, other, loop.session.home_experts.tolist())
    tokens = loop.tokens[loop.rows(0, loop.data_rank)] if len(loop.tokens) else loop.tokens
    with loop.session.first_homes(), torch.no_grad():
        assert loop.error_of(loop.model(tokens), other(tokens)) < 1
    for parameter, value in zip(loop.model.parameters(), mine, strict=True):
        parameter.data.copy_(value)
