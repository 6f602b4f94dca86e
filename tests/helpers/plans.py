"""Plans of a training loop: random ones or the session's own; other ids and suspension between steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from helpers.loop import SEQUENCES, Loop, Options, action, make_loop, zero_gradients
from helpers.planned_steps import rows_in
from helpers.random_plans import random_group_plans, random_plan, random_schedule, random_trace
from helpers.random_slices import as_header, random_slices
from trimtab.array_type import Array
from trimtab.planner import Placement, PlannedStep, Schedule, Workload
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.runtime import Session, step_planner
from trimtab.trace import RoutingTrace
from trimtab.trace.numbering import Numbering, random_orders


def start(seed: int = 3, **options: Any) -> Loop:
    """A new model in a new session, with a first plan."""
    loop = make_loop(Options.of(**{"verify_weights": False} | options), seed)
    plan(loop, seed)
    return loop


def plan(loop: Loop, seed: int, mode: str | None = None, rows: str | None = None) -> None:
    """Another trace, and a plan for it.

    Args:
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
        planned = session.plan_sequences(recorded(loop, trace.select(own), seed), token_budget=16)
        schedule = planned.schedule
    mine = recorded(loop, trace.select(schedule.sequences_of(loop.data_rank)), seed)
    if loop.is_live:
        pass
    elif planner == "random":
        session.apply_step_plan(_random_plans(loop, trace, schedule, rng), mine)
    elif planner == "sequences":
        session.apply_plan(planned, mine)
    elif planner == "own" and rows != "unread":
        session.plan(mine, schedule)
    else:
        _plan_micro_steps(loop, trace, schedule, unread_T, seed, planner)
    # Nothing reads them any more.
    mine.expert_ids[:] = 0
    loop.trace, loop.schedule, loop.unread_T, loop.kind = trace, schedule, unread_T, rows
    loop.tokens, loop.labels = (torch.from_numpy(rng.integers(0, 11, trace.num_tokens)) for _ in range(2))
    loop.changes = loop.changes._replace(plans=loop.changes.plans + 1)
    if loop.compares:
        loop.compare()


def _random_plans(loop: Loop, trace: RoutingTrace, schedule: Schedule, rng: np.random.Generator) -> Any:
    """The plan of this rank's group."""
    session, plans = loop.session, []
    for group in range(session.topology.groups):
        of_group, group_schedule = schedule.of_group(group, session.num_ranks)
        workload = Workload.from_trace(trace.select(of_group).with_repeats_unknown()[0], group_schedule)
        plans.append(
            random_plan(
                rng, workload, group_schedule, slots=session.slots_per_rank, placement=session.placement,
                ranks_per_node=session.topology.ranks_per_node,
            )
        )  # fmt: skip
    return plans[session.topology.group]


def _plan_micro_steps(
    loop: Loop, trace: RoutingTrace, schedule: Schedule, unread_T: Array, seed: int, planner: str
) -> None:
    """Plan this rank's rows of each micro-step."""
    session, plan_rng = loop.session, np.random.default_rng((seed, 1))

    def random_planned(
        loads: StepLoads, schedule: Schedule, placement: Placement, *_: Any, **chosen: Any
    ) -> PlannedStep:
        assert not chosen["may_move"]
        per_node, slots = session.topology.ranks_per_node, session.slots_per_rank
        planned = random_group_plans(plan_rng, loads, schedule, placement, per_node, slots)
        if planner == "micro-steps" or not chosen["sliced"]:
            return planned
        return as_header(planned, slots=slots, waits=planner in ("in time", "fails"))

    micro_steps = range(schedule.num_micro_steps)
    rows_M = [rows_in(trace, schedule, index, loop.data_rank).numpy() for index in micro_steps]
    unread = [unread_T[rows] for rows in rows_M] if unread_T.any() else None
    tagged = recorded(loop, trace, seed)
    with ExitStack() as stack:
        if planner != "own":
            stack.enter_context(mock.patch.object(step_planner, "plan_schedule", random_planned))
            stack.enter_context(random_slices(loop.delay))
        report = session.plan_micro_steps(
            [tagged.expert_ids[rows].astype(np.int64) for rows in rows_M], unread=unread,
            numbering=tagged.numbering,
        )  # fmt: skip
    is_unknown_TL = (trace.with_repeats_unknown()[0].expert_ids == trace.no_route).any(axis=2) & ~unread_T[:, None]
    rank_T, micro_step_T = (np.repeat(each, trace.sequence_lengths) for each in (schedule.rank, schedule.micro_step))
    of_group = rank_T // session.num_ranks == session.topology.group
    mixed = sum(is_unknown_TL[of_group & (micro_step_T == index)].any(axis=0).sum() for index in micro_steps)
    assert report.mixed_instances == mixed


def recorded(loop: Loop, trace: RoutingTrace, seed: int) -> RoutingTrace:
    """The trace by ids of now or of the start, and says which."""
    numbering = loop.session.numbering
    if numbering is None:
        return trace
    tagged = replace(trace, numbering=numbering)
    return tagged.in_numbering(Numbering()) if seed % 2 else tagged


@action
def suspend(loop: Loop, seed: int) -> None:
    """The session gives everything back, and is used again."""
    loop.session.suspend()
    plan(loop, seed)


@action
def renumber(loop: Loop, seed: int) -> None:
    """Experts get other ids, in the reference model, too."""
    session = loop.session
    order_LE = random_orders(len(session.layers), session.num_experts, seed)
    order_LE[: seed % 2] = np.arange(session.num_experts)
    if loop.told is not session:
        session.on_renumber(partial(_permute_own_averages, loop, session))
        loop.told = session
    zero_gradients(loop)
    session.renumber(order_LE)
    for layer, (block, order_E) in enumerate(zip(loop.reference.moe_blocks(), order_LE, strict=True)):
        _permute_averages(loop.averages[1], layer, order_E)
        state = loop.optimizers[0].state
        for tensor in (block.router.weight, block.gate_up, block.down):
            parts = [tensor] if isinstance(tensor, torch.nn.Parameter) else [*tensor]
            kept = [state[part] for part in parts if part in state]
            rows = [parts, *([of[key] for of in kept] for key in (kept[0] if kept else ()))]
            for each in rows:
                _permute_rows(each, order_E)
    # By other ids. A checkpoint would compute its block again by these, so that its backward is right.
    loop.saved = None
    loop.pending.clear()
    plan(loop, seed)


def _permute_rows(parts: Sequence[Any], order_E: Array) -> None:
    """Permute the rows of a stack, the only part, or the values of a list. Single numbers stay."""
    values: Any = parts[0].detach() if len(parts) == 1 else [part.detach() for part in parts]
    if parts[0].ndim:
        for value, now in zip(values, [values[old].clone() for old in order_E], strict=True):
            value.copy_(now)


def _averages(averages: dict[str, torch.Tensor], layer: int, name: str) -> list[torch.Tensor]:
    return [tensor for key, tensor in averages.items() if f"{key}.".startswith(f"blocks.{layer}.{name}.")]


def _permute_averages(averages: dict[str, torch.Tensor], layer: int, order_E: Array) -> None:
    for name in ("router.weight", "gate_up", "down"):
        _permute_rows(_averages(averages, layer, name), order_E)


def _permute_own_averages(loop: Loop, session: Session, layer: int, order_E: Array) -> None:
    """Permute the averages of a layer's router, and those of its experts over all ranks."""
    averages = loop.averages[0]
    _permute_rows(_averages(averages, layer, "router.weight"), order_E)
    homes = session.homes[layer]
    for name in ("gate_up", "down"):
        of_rows = _averages(averages, layer, name)
        own = of_rows[0] if len(of_rows) == 1 and of_rows[0].ndim > 2 else torch.stack(of_rows)
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(session.num_ranks)]
        dist.all_gather(parts, own.detach().contiguous(), group=session.topology.experts)
        whole = torch.cat(parts)[np.argsort(homes.places.experts_RH.reshape(-1))][order_E[homes.home_experts]]
        for row, value in zip(of_rows[0].detach() if own is of_rows[0] else of_rows, whole, strict=True):
            row.detach().copy_(value)
