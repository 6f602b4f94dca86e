"""`trimtab.plan`: a plan of one step of a trace, with the balance before and after."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

from trimtab.analysis.trace_counts import DEFAULT_BUDGET
from trimtab.api.plan_result import PlanResult
from trimtab.api.run import Run, checked
from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, ModelSpec, StepCosts
from trimtab.cluster.specs import AUTO, slot_numbers
from trimtab.errors import InputError
from trimtab.kinds import choice, positive, switch
from trimtab.planner import Placement, PlanSettings, SequenceCounts, StepPlan, Workload, budget_for, pack_by_length
from trimtab.policies import POLICIES, Policy, View, make_view
from trimtab.policies.trimtab import Trimtab
from trimtab.trace import RoutingTrace, TraceReader
from trimtab.trace.store import Source, open_trace


def plan(
    trace: RoutingTrace | Source,
    run: Run = Run(),  # noqa: B008
    *,
    policy: Annotated[str, choice(*POLICIES)] = "trimtab",
    max_rows_per_rank: Annotated[int | None, positive] = None,
    exact: Annotated[bool, switch] = False,
) -> PlanResult:
    """Plan one step of a routing trace for a cluster, with the balance before and after.

    The step is planned as recorded, with contiguous homes before it. Seconds are those of the whole model.

    Args:
        trace: as in `simulate`.
        run: the run; without a model that is known there are no seconds.
        policy: balancer.
        max_rows_per_rank: most rows of a rank in a layer of a micro-step, with the balancer trimtab; by default none.
        exact: spread rows of every layer evenly over ranks, to the row, with the balancer trimtab.

    Raises:
        InputError: one line, if an argument is out of range or the trace can't be read, is empty, has no such step, is
            not of the model, or does not fit the ranks or the token budget.
    """
    given = {"policy": policy, "max_rows_per_rank": max_rows_per_rank, "exact": exact}
    max_rows_per_rank = checked(plan, given)["max_rows_per_rank"]
    balancer = POLICIES[policy]
    numbers = slot_numbers(run.slots) if run.slots == AUTO else ()
    if max_rows_per_rank is not None or exact:
        if policy != "trimtab":
            raise InputError(f"max_rows_per_rank and exact are for policy trimtab; the policy is {policy}")
        balancer = Trimtab(PlanSettings(max_rows_per_rank=max_rows_per_rank, exact=exact))
    if isinstance(balancer, Trimtab):
        balancer = replace(balancer, slots=numbers)
    reader = open_trace(trace)
    run = run.on_ranks(reader)
    nodes, groups, token_budget = run.nodes, run.groups, run.token_budget
    step_trace = _one_step(reader, run.step)
    spec = run.model_or_none(reader)
    costs = _costs(run, spec, step_trace.num_layers)
    homes = Placement.contiguous(step_trace.num_layers, step_trace.num_experts, nodes.ranks)
    # Untimed, so that compiling is not timed: a few sequences, in several micro-steps.
    few = step_trace.part(0, min(step_trace.num_sequences, 4 * nodes.ranks))
    longest = max(1, int(few.sequence_lengths.max()))
    budget = longest if token_budget is None else min(token_budget, longest)
    _plan(balancer if numbers else POLICIES[policy], SequenceCounts.from_trace(few), homes, nodes, budget, costs)
    start = time.perf_counter()
    sequences = SequenceCounts.from_trace(step_trace)
    counting_ended = time.perf_counter()
    if run.micro_steps is not None:
        token_budget = budget_for([sequences.lengths], nodes.ranks * groups, run.micro_steps)
    elif token_budget is None:
        token_budget = max(DEFAULT_BUDGET, int(sequences.lengths.max()))
    view, planned = _plan(balancer, sequences, homes, nodes, token_budget, costs)
    planning_ended = time.perf_counter()
    workload = Workload.from_sequences(sequences, planned.schedule)
    planned.check(workload)
    return PlanResult(
        source=reader.name,
        trace=step_trace,
        policy=policy,
        cluster=replace(nodes, slots_per_rank=planned.slots_per_rank),
        token_budget=token_budget,
        plan=planned,
        static_plan=POLICIES["static"].plan(view),
        workload_before=Workload.from_sequences(sequences, view.schedule),
        workload_after=workload,
        model=spec,
        counting_s=counting_ended - start,
        planning_s=planning_ended - counting_ended,
        costs=costs,
        groups=groups,
    )


def planned_loads(sequences: SequenceCounts, run: Run, model: ModelSpec | None) -> tuple[Array, Array]:
    """Rows `[M, L, R]` of each rank in each instance of a step, without a plan and with one, as `plan` finds them.

    Args:
        run: with ranks and a token budget.
        model: None if it is not known.
    """
    homes = Placement.contiguous(sequences.num_layers, sequences.num_experts, run.nodes.ranks)
    costs, budget = _costs(run, model, sequences.num_layers), run.token_budget or DEFAULT_BUDGET
    view, planned = _plan(POLICIES["trimtab"], sequences, homes, run.nodes, budget, costs)
    before = Workload.from_sequences(sequences, view.schedule)
    after = Workload.from_sequences(sequences, planned.schedule)
    return before.home_loads(POLICIES["static"].plan(view).home), planned.rank_loads(after)


def _costs(run: Run, model: ModelSpec | None, layers: int) -> StepCosts | None:
    if model is None:
        return None
    return StepCosts.of(
        run.nodes, model, moe_layers=layers, groups=run.groups, recompute=run.recompute,
        checkpointing=run.recompute_granularity == "full",
    )  # fmt: skip


def _plan(
    policy: Policy,
    sequences: SequenceCounts,
    homes: Placement,
    cluster: ClusterSpec,
    token_budget: int,
    costs: StepCosts | None,
) -> tuple[View, StepPlan]:
    schedule = pack_by_length(sequences.lengths, num_ranks=cluster.ranks, token_budget=token_budget)
    view = make_view(policy, sequences, schedule, homes, cluster, token_budget=token_budget, costs=costs)
    return view, policy.plan(view)


def _one_step(reader: TraceReader, step: int | None) -> RoutingTrace:
    if not reader.facts.lengths.any():
        raise InputError(f"{reader.name}: the trace is empty; there is nothing to plan")
    return reader.read(int(reader.facts.steps[reader.facts.lengths > 0].max()) if step is None else step)
