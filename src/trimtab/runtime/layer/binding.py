"""`bind`: the call of a layer, with a layout from the plan if it has all rows, else after an exchange of counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.errors import InputError, RanksDisagreeError
from trimtab.runtime.autograd.torch_engine import running_backward
from trimtab.runtime.layer.layer_call import LayerCall, LayerCalls
from trimtab.runtime.layer.micro_step import BoundRoutes
from trimtab.runtime.live.balancer import LiveCall, LiveMicroStep
from trimtab.runtime.program.physical_experts import InstanceReplicas, PlannedRows
from trimtab.runtime.program.program import Layout, SecondPhase, place_rows
from trimtab.runtime.ranks.lockstep import COUNTS
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer.streams import download


def bind(
    calls: LayerCalls,
    homes: HomeExperts,
    expert_ids: torch.Tensor,
    routes: BoundRoutes | None,
    problem: Exception | None = None,
) -> LayerCall:
    """Create the call of a layer. Collective if rows are unknown on any rank, or may deviate from the plan.

    Args:
        expert_ids: `[T, K]`, expert ids of this rank's rows.
        problem: why this rank's ids can't be used, if they may deviate from the plan; raised on all ranks.

    Raises:
        InputError: on all ranks, if a rank has an id out of range.
        RuntimeError: on all ranks, if a rank has other rows than planned, or in backward than in forward.
    """
    program = None if routes is None else routes.program(homes.index)
    if program is not None and program.layout is not None:
        return LayerCall(calls, homes, program.layout, routes)
    positions = None if routes is None else routes.positions
    own_ids = expert_ids if positions is None else expert_ids.index_select(0, positions)
    if routes is not None and routes.live is not None:
        layout, choice = _balanced_layout(calls, homes, own_ids, routes.live)
        return LayerCall(calls, homes, layout, routes, choice)
    planned = None if program is None else program.planned
    if planned is None:
        calls.counters.live_calls += routes is None and calls.is_planned
        if torch.is_grad_enabled() and running_backward() is None:
            calls.accumulation.begin_forward()
        planned = PlannedRows.unknown(tuple(own_ids.shape), calls.experts)
    elif routes is not None:
        calls.counters.mixed_instances += routes.is_planned
    layout = _exchanged_layout(calls, homes, download(own_ids), planned, routes, problem)
    return LayerCall(calls, homes, layout, routes)


def _balanced_layout(
    calls: LayerCalls, homes: HomeExperts, own_ids: torch.Tensor, micro_step: LiveMicroStep
) -> tuple[Layout, LiveCall]:
    """The layout of an instance whose replicas are chosen now. The host waits for the ids that the router chose."""
    ids_NK = download(own_ids)
    counts_RE = _exchange_counts(calls, homes, ids_NK)
    rows_R = counts_RE.sum(axis=1)
    if homes.equal_tokens and (rows_R != rows_R[0]).any():
        raise RanksDisagreeError(
            f"MoE layer {homes.index}: ranks have {rows_R.tolist()} rows, and {homes.equal_tokens} needs the same "
            "number of tokens on all ranks"
        )
    call = micro_step.choose(homes.index, counts_RE)
    experts = calls.experts
    counts_E, arriving_RH = counts_RE[experts.rank], counts_RE[:, homes.home_experts]
    if not call.moves or not call.replicas.count:
        planned = PlannedRows.of(ids_NK, counts_E, arriving_RH, experts, call.replicas)
        return place_rows(planned, has_places=homes.sends_rows).on(homes.device), call
    nothing = InstanceReplicas.none(len(counts_RE))
    layout = place_rows(PlannedRows.of(ids_NK, counts_E, arriving_RH, experts, nothing), has_places=True)
    second = SecondPhase.of(experts, layout.home_groups.counts, call.replicas).on(homes.device)
    return replace(layout.on(homes.device), replicas=call.replicas, second=second), call


def _exchanged_layout(
    calls: LayerCalls,
    homes: HomeExperts,
    ids_NK: Array,
    planned: PlannedRows,
    routes: BoundRoutes | None,
    problem: Exception | None,
) -> Layout:
    """The layout of an instance in which a rank's rows may not be the planned ones: they are unknown, or deviate.

    The host has waited for the ids. The ranks exchange how many rows they send to each physical expert. Collective.
    """
    rows, deviating = planned, 0
    problem = problem or _problem_of(homes, ids_NK, planned)
    if problem is None:
        rows, deviating = planned.with_ids(ids_NK)
        problem = None if routes is None else _problem_of_rerun(homes, rows, routes)
    sent_RP = calls.lockstep.agree(COUNTS, layer=homes.index, values=rows.sent_P, problem=problem)
    if running_backward() is None:
        calls.counters.deviating_rows += deviating
    unknown_U = planned.unknown_tokens
    if len(unknown_U) and routes is not None and routes.record is not None and not torch.is_grad_enabled():
        routes.record(homes.index, unknown_U, ids_NK[unknown_U])
    return place_rows(rows.receiving(sent_RP), has_places=homes.sends_rows).on(homes.device)


def _exchange_counts(calls: LayerCalls, homes: HomeExperts, ids_NK: Array) -> Array:
    """Rows of every rank by expert, `[R, E]`. Collective."""
    num_experts, problem = homes.num_experts, _problem_of(homes, ids_NK)
    counts_E = np.zeros(0, np.int64) if problem else np.bincount(ids_NK.reshape(-1), minlength=num_experts)
    return calls.lockstep.agree(COUNTS, layer=homes.index, values=counts_E.tolist(), problem=problem)


def _problem_of(homes: HomeExperts, ids_NK: Array, planned: PlannedRows | None = None) -> Exception | None:
    """The error of a layer's ids, or None."""
    num_experts = homes.num_experts
    if planned is not None and ids_NK.shape != planned.ids_NK.shape:
        return RuntimeError(
            f"MoE layer {homes.index} was called with expert ids {list(ids_NK.shape)}; the micro-step was planned with "
            f"{list(planned.ids_NK.shape)}"
        )
    if not ids_NK.size or 0 <= ids_NK.min() <= ids_NK.max() < num_experts:
        return None
    wrong = ids_NK.min() if ids_NK.min() < 0 else ids_NK.max()
    return InputError(f"MoE layer {homes.index} was given expert id {wrong}; ids should be from 0 to {num_experts - 1}")


def _problem_of_rerun(homes: HomeExperts, rows: PlannedRows, routes: BoundRoutes) -> RuntimeError | None:
    """The error of a layer that checkpointing recomputes with other rows than in its forward, or None."""
    key = homes.index, hash(rows.physical_NK.tobytes())
    if running_backward() is None:
        routes.micro_step.forwards.add(key)
    elif key not in routes.micro_step.forwards:
        return RuntimeError(
            f"MoE layer {homes.index} was recomputed in backward with other expert ids than its forward had; keep the "
            "ids that the forward used, or choose them outside of what is checkpointed"
        )
    return None
