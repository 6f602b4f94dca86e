"""A training loop with random actions, compared with one process that holds the whole model.

Actions do the same on the model in the session and on the reference, and end by comparing gradients, weights and
optimizer state.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.equality import relative_error
from helpers.moe_model import ALL_LISTS, WITHOUT_CHECKPOINTS, Shape, TinyMoE, matches
from helpers.planned_steps import rows_of
from helpers.random_plans import random_placement, random_plan, random_schedule, random_trace
from trimtab.errors import InputError
from trimtab.planner import Placement, PlannedStep, Schedule, Workload
from trimtab.planner.plan.pass_times import PARTS
from trimtab.planner.plan.strategy import NOTHING
from trimtab.runtime import Session, step_planner
from trimtab.trace import RoutingTrace

State = dict[str, Any]
MICRO_STEPS = 3
# Ways to run a block, see `TinyMoE`.
RUNS = (
    "plain", "checkpoint", "checkpoint without early stop", "reentrant checkpoint", "nested checkpoint",
    "nested reentrant checkpoint", "checkpointed experts", "reentrantly checkpointed experts",
)  # fmt: skip
# Recorded rows of a trace.
ROWS = "known", "some unknown", "some with an id twice", "some unread"
TOLERANCE = 1e-12


class ExpectedError(Exception):
    """Raised by a test inside the model."""


class Changes(NamedTuple):
    """How many plans were applied, how often weights changed and optimizers stepped."""

    plans: int = 0
    weights: int = 0
    steps: int = 0


class Pending(NamedTuple):
    """A forward whose backward has not run, and the changes before it."""

    loss: torch.Tensor
    expected: torch.Tensor
    changes: Changes
    is_planned: bool


@dataclass(eq=False)
class Loop:
    """The state of one rank.

    Attributes:
        unread_T: `[T]` bool, tokens of the trace whose output is not used.
        writes: how often `write` changed the weights.
        pending: forwards whose backward has not run, by number.
        is_finished: whether gradients are complete.
        has_mixed_gradients: whether gradients were added to others that had been summed over ranks.
        offloaded_parameters: the parameters' values while they are offloaded; else None.
        averages: of the weights, by the names of the model's and of the reference's parameters.
        has_stepped: whether the model's optimizer has.
        saved: state dicts of the model and its optimizer, and those of the reference; None if there are none.
    """

    session: Session
    model: TinyMoE
    reference: TinyMoE
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]
    slots: int
    trace: RoutingTrace = field(init=False)
    schedule: Schedule = field(init=False)
    unread_T: np.ndarray = field(init=False)
    tokens: torch.Tensor = field(init=False)
    labels: torch.Tensor = field(init=False)
    changes: Changes = field(default_factory=Changes)
    writes: int = 0
    pending: dict[int, Pending] = field(default_factory=dict)
    is_finished: bool = False
    has_mixed_gradients: bool = False
    offloaded_parameters: list[torch.Tensor] | None = None
    has_stepped: bool = False
    averages: tuple[dict[str, torch.Tensor], ...] = ()
    saved: tuple[dict[str, Any], ...] | None = None

    def rows(self, index: int, rank: int | None = None) -> torch.Tensor:
        """The tokens of a micro-step, of one rank or all."""
        chosen = self.schedule.micro_step == index
        if rank is not None:
            chosen = chosen & (self.schedule.rank == rank)
        return rows_of(self.trace, np.flatnonzero(chosen))

    def loss(self, model: TinyMoE, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of the tokens that are read, and their logits."""
        is_read, logits = torch.from_numpy(~self.unread_T[rows.numpy()]), model(self.tokens[rows])
        logits, labels = logits[is_read], self.labels[rows][is_read]
        return F.cross_entropy(logits, labels, reduction="sum") / len(self.tokens), logits

    def recorded_ids(self) -> np.ndarray:
        """`[T, L, K]` int64, -1 where the route is unknown or has an id twice, or the token is not read."""
        ids = self.trace.expert_ids.astype(np.int64)
        is_unknown = (ids == self.trace.no_route).any(axis=2) | (np.diff(np.sort(ids)) == 0).any(axis=2)
        ids[is_unknown | self.unread_T[:, None]] = -1
        return ids

    def chosen_ids(self, seed: int) -> np.ndarray:
        """`[T, L, K]` int64, ids that some tokens get in place of the recorded ones; -1 for the others."""
        rng, recorded = np.random.default_rng(seed), self.recorded_ids()
        tokens, layers, top_k = recorded.shape
        chosen = np.argsort(rng.random((tokens, layers, self.session.num_experts)), axis=2)[:, :, :top_k]
        kind = rng.integers(0, 6, (tokens, layers))
        kind[(recorded[:, :, 0] < 0) & (kind < 2)] = 3
        # The same ids in another order; the last one replaced, perhaps by itself; all of them replaced.
        chosen[kind == 0] = recorded[kind == 0][:, ::-1]
        is_other = (kind == 1) & (chosen[:, :, -1:] != recorded[:, :, :-1]).all(axis=2)
        chosen[is_other, :-1] = recorded[is_other, :-1]
        chosen[(kind > 2) | self.unread_T[:, None]] = -1
        return chosen

    def expect(
        self,
        rows: torch.Tensor,
        run: str,
        skipped: frozenset[int],
        live: bool,
        chosen: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Loss and logits of the reference model for the same rows."""
        ids_TLK = self.recorded_ids()
        if chosen is not None:
            ids_TLK = np.where(chosen < 0, ids_TLK, chosen)
        self.reference.run_block, self.reference.skipped = WITHOUT_CHECKPOINTS.get(run, "plain"), skipped
        for layer, block in enumerate(self.reference.moe_blocks()):
            block.recorded_ids = None if live else torch.from_numpy(ids_TLK[rows.numpy(), layer])
        return self.loss(self.reference, rows)


Action = Callable[..., None]


def action(function: Action) -> Action:
    """What a loop can't do while its parameters are offloaded; nothing happens then. Results are compared after it."""

    @wraps(function)
    def act(loop: Loop, *args: Any) -> None:
        if loop.offloaded_parameters is None:
            function(loop, *args)
            compare(loop)

    return act


def begin(state: State, seed: int, checked: bool, top_k: int, frozen: frozenset[int]) -> None:
    """Start another loop on the ranks of a pool."""
    if "loop" in state:
        state.pop("loop").session.close()
    state["loop"] = start(seed, checked, top_k=top_k, frozen=frozen)


def call(state: State, function: Callable[..., None], *args: Any) -> list[int]:
    """An action of the loop that `begin` has started. Returns the forwards whose backward may follow."""
    function(state["loop"], *args)
    return sorted(state["loop"].pending)


def start(
    seed: int = 3,
    checked: bool = False,
    group: dist.ProcessGroup | None = None,
    *,
    top_k: int = 2,
    frozen: frozenset[int] = frozenset(),
) -> Loop:
    """A new model in a new session, with a first plan.

    Args:
        checked: let the session verify weights.
        group: of the session; all ranks by default.
        frozen: layers whose experts are not trained.
    """
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    ranks = dist.get_world_size()
    lists = ((), ("down",), ALL_LISTS)[seed % 3]
    shape = Shape(layers=int(rng.integers(2, 4)), experts=ranks * 2, top_k=top_k, hidden=4, width=4, lists=lists)
    slots = int(rng.integers(1, 3))
    session = Session(
        num_experts=shape.experts, slots_per_rank=slots, ring_layers=int(rng.integers(2, 4)),
        ranks_per_node=int(rng.choice([size for size in range(1, ranks + 1) if ranks % size == 0])),
        verify_weights=checked, group=group,
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
    first, second = (torch.optim.AdamW(m.parameters(), lr=0.01, eps=0.1, foreach=False) for m in (reference, model))
    session.register_optimizers(second)
    loop = Loop(session, model, reference, (first, second), slots)
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
        _zero(loop, True)  # Gradients of experts that move are dropped, if they are zeros.
    session.apply_step_plan(chosen, mine)
    _begin(loop, trace, schedule, unread_T, rng)


def _plan_unread(loop: Loop, trace: RoutingTrace, schedule: Schedule, unread_T: np.ndarray, seed: int) -> None:
    """Plan micro-steps with unread tokens, at the present homes."""
    session = loop.session

    def random_planned(
        loads: Sequence[Workload], schedule: Schedule, placement: Placement, *_: Any, **__: Any
    ) -> PlannedStep:
        chosen = random_plan(
            np.random.default_rng(seed), loads[0], schedule, slots=loop.slots, placement=placement,
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
) -> None:
    """A micro-step's forward.

    Args:
        run: how blocks run, see `TinyMoE`.
        number: of the pending backward; without gradients if None.
        at_once: run the backward inside the micro-step.
        inference: run in inference mode.
        deviates: some tokens get other ids than the recorded ones, drawn with this seed. One rank announces it.
    """
    if loop.offloaded_parameters is not None:
        with pytest.raises(InputError, match="has no memory now"), loop.session.micro_step(index):
            pass
        return
    mine = loop.rows(index, loop.session.rank)
    rows = loop.rows(index)
    with torch.inference_mode() if inference else torch.set_grad_enabled(number is not None):
        chosen = None if deviates is None else loop.chosen_ids(deviates)
        expected, expected_logits = loop.expect(rows, run, skipped, False, chosen)
        loop.model.run_block, loop.model.skipped = run, skipped
        if chosen is not None:
            layers = range(len(loop.session.layers))
            loop.model.chosen_ids = [torch.from_numpy(chosen[mine.numpy(), layer]) for layer in layers]
        before = loop.session.counters.deviating_rows
        is_announced = deviates is not None and deviates % loop.session.num_ranks == loop.session.rank
        with loop.session.micro_step(index, may_deviate=is_announced):
            loss, logits = loop.loss(loop.model, mine)
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
    rng = np.random.default_rng(seed)
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
def backward(loop: Loop, number: int) -> None:
    """The backward of a pending forward, outside any micro-step. It fails if the forward is out of date."""
    pending = loop.pending[number]
    before, now = pending.changes, loop.changes
    if before.weights != now.weights or (pending.is_planned and before.plans != now.plans):
        with pytest.raises(RuntimeError, match=STALE):
            loop.pending.pop(number).loss.backward()
        # As a loop must do after a failed backward.
        _zero(loop, True)
    elif before != now:
        # It runs unless experts have moved, a checkpointed layer would run again, or an optimizer stepped, even without
        # gradients.
        try:
            _backward(loop, number)
        except RuntimeError as error:
            assert re.search(STALE, str(error))
            _zero(loop, True)
    else:
        _backward(loop, number)


def _backward(loop: Loop, number: int) -> None:
    pending = loop.pending.pop(number)
    pending.loss.backward()
    if loop.is_finished and not _has_gradients(loop.reference):
        loop.is_finished = False  # Adding to zeros is allowed.
    pending.expected.backward()
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
            x.register_hook(stop)
        return x

    def run_both() -> None:
        with loop.session.micro_step(index):
            loss, _ = loop.loss(loop.model, loop.rows(index, loop.session.rank))
            if where == "inside":
                loss.backward()
        loss.backward()

    loop.model.before_block, loop.model.run_block, loop.model.skipped = hook, run, frozenset()
    with pytest.raises(ExpectedError):
        run_both()
    loop.model.before_block = None
    if where != "forward":
        _zero(loop, True)


def finish(loop: Loop) -> None:
    """Complete the gradients; once for each accumulation."""
    if loop.is_finished and _has_gradients(loop.reference):
        with pytest.raises(RuntimeError, match="summed over ranks already"):
            loop.session.finish_gradients(loop.model.replicated())
        return
    loop.session.finish_gradients(loop.model.replicated())
    loop.is_finished = True
    compare(loop)


def _has_gradients(model: TinyMoE) -> bool:
    return any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


@action
def step(loop: Loop, zero: bool | None = True) -> None:
    """An optimizer step with complete gradients.

    Args:
        zero: value of `set_to_none` for the zeroing after it; None: gradients are kept.
    """
    if loop.has_mixed_gradients:
        _zero(loop, True)
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
        _zero(loop, zero)


def update(loop: Loop, index: int = 0, number: int = 1) -> None:
    """Forward and backward of a micro-step."""
    forward(loop, index, "plain", number, True)


def zero(loop: Loop, to_none: bool = True) -> None:
    """Gradients are zeroed."""
    _zero(loop, to_none)
    compare(loop)


def _zero(loop: Loop, to_none: bool) -> None:
    for optimizer in loop.optimizers:
        optimizer.zero_grad(set_to_none=to_none)
    loop.is_finished = loop.has_mixed_gradients = False


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
        _zero(loop, True)
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


@action
def save(loop: Loop) -> None:
    """Store state dicts."""
    parts = (loop.model, loop.optimizers[1], loop.reference, loop.optimizers[0])
    loop.saved = tuple(copy.deepcopy(part.state_dict()) for part in parts)


@action
def reload(loop: Loop, seed: int) -> None:
    """Load what was stored, after experts have returned to the places that they had. Before that it is refused, or
    modules put rows in order."""
    if loop.saved is None:
        return
    model, session = loop.model, loop.session
    _zero(loop, True)
    mine, state, whole, whole_state = (copy.deepcopy(part) for part in loop.saved)
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
        assert all(torch.equal(weights[name], value) for name, value in loop.reference.state_dict().items())
    session.move_to_saved(model, mine)
    model.load_state_dict(mine)
    loop.optimizers[1].load_state_dict(state)
    loop.optimizers[0].load_state_dict(whole_state)
    loop.changes = loop.changes._replace(weights=loop.changes.weights + 1)
    loop.pending.clear()
    if any(layer.places is not places for layer, places in zip(session.homes, before, strict=True)):
        plan(loop, seed, False, session.mode)


@action
def change_session(loop: Loop, seed: int) -> None:
    """Another session gets the model's experts, where they are."""
    before, settings = loop.session, loop.session.settings
    loop.pending.clear()
    loop.session = Session(
        num_experts=settings.num_experts, slots_per_rank=settings.slots_per_rank, ring_layers=settings.ring_layers,
        ranks_per_node=before.topology.ranks_per_node, verify_weights=settings.verify_weights, mode=before.mode,
    )  # fmt: skip
    for block in loop.model.moe_blocks():
        block.run_in(loop.session)
    assert np.array_equal(loop.session.placement.home, before.placement.home)
    loop.session.register_optimizers(loop.optimizers[1])
    _zero(loop, True)
    before.close()
    plan(loop, seed, False, loop.session.mode)


@action
def change_optimizer(loop: Loop, seed: int, replaces: bool) -> None:
    """Another optimizer with the same state, for the same parameters or for others that replace them.

    Args:
        replaces: the model gets other parameters; refused at the next micro-step if the session got a list.
    """
    old = loop.optimizers[1]
    if replaces:
        if not loop.model.moe_blocks()[0].is_read:
            return
        _zero(loop, True)
        loop.pending.clear()
        frozen = {name for name, parameter in loop.model.named_parameters() if not parameter.requires_grad}
        values = {name: value.clone() for name, value in loop.model.state_dict().items()}
        loop.model.load_state_dict(values, assign=True)
        for name, parameter in loop.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    new = torch.optim.AdamW(loop.model.parameters(), lr=0.01, eps=0.1, foreach=False)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    loop.session.register_optimizers(new)
    placement = random_placement(
        np.random.default_rng(seed), len(loop.session.layers), loop.session.num_experts, loop.session.num_ranks
    )
    has_state = any(p in old.state for layer in loop.session.layers for p in layer.parameters)
    if loop.has_stepped and has_state and not np.array_equal(placement.home, loop.session.placement.home):
        with pytest.raises(InputError, match="experts can't move: AdamW has state"):
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
    compare(loop)


@action
def write(loop: Loop, way: str) -> None:
    """New weights: by tensor operations, announced writes through `.data`, or unannounced ones."""
    if way == "unnoticed":
        # Run a forward first, so that the session has copied the current weights.
        forward(loop, 0)
        for parameter in loop.model.parameters():
            parameter.data.mul_(2)
        with pytest.raises(RuntimeError, match=r"changed without an optimizer step"), loop.session.micro_step(0):
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


def compare(loop: Loop) -> None:
    """Asserts that gradients, weights and optimizer state equal those of the reference."""
    if loop.offloaded_parameters is not None:
        return
    session = loop.session
    experts = {id(p) for layer in session.layers for p in layer.parameters}
    for name, actual, expected, mine in matches(loop.model, loop.reference):
        own, wanted = (torch.zeros_like(p) if p.grad is None else p.grad for p in (actual, expected))
        if id(actual) in experts:
            wanted = wanted[mine]
        elif loop.has_mixed_gradients:
            continue
        elif not loop.is_finished:
            own = own.clone()
            dist.all_reduce(own)
        assert relative_error(own, wanted) < 100 * TOLERANCE, (name, "gradient")
    weights = session.logical_state_dict(loop.model)
    for name, expected in loop.reference.state_dict().items():
        assert relative_error(weights[name], expected) < 100 * TOLERANCE, (name, "weights")
    names = {id(parameter): name for name, parameter in loop.reference.named_parameters()}
    for name, _, expected, mine in matches(loop.model, loop.reference):
        whole = loop.averages[1][names[id(expected)]]
        assert relative_error(loop.averages[0][name], whole[mine]) < 100 * TOLERANCE, (name, "average")
    states = dict(session.logical.optimizer_state(loop.model, loop.optimizers[1]))
    for name, expected in loop.reference.named_parameters() if session.rank == 0 else ():
        for key, value in loop.optimizers[0].state.get(expected, {}).items():
            own_value = states[name][key]
            assert isinstance(own_value, torch.Tensor)
            assert relative_error(own_value, value) < 100 * TOLERANCE, (name, key)
