"""`trimtab.plan`: a plan of one step of a trace, with the balance before and after."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from trimtab.analysis.trace_counts import DEFAULT_BUDGET
from trimtab.api.arguments import (
    ModelSource,
    Overrides,
    check_choice,
    check_run,
    model_or_none,
    nodes_of,
    ranks_of,
    recomputed,
)
from trimtab.api.plan_result import PlanResult
from trimtab.cluster import ClusterSpec, StepCosts
from trimtab.cluster.specs import AUTO, slot_numbers
from trimtab.errors import InputError
from trimtab.planner import Placement, PlanSettings, SequenceCounts, StepPlan, Workload, budget_for, pack_by_length
from trimtab.policies import POLICIES, Policy, View, make_view
from trimtab.policies.trimtab import Trimtab
from trimtab.trace import RoutingTrace, TraceReader
from trimtab.trace.store import Source, open_trace


def plan(
    trace: RoutingTrace | Source,
    *,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    groups: int = 1,
    slots: int | str = AUTO,
    token_budget: int | None = None,
    micro_steps: int | None = None,
    step: int | None = None,
    policy: str = "trimtab",
    max_rows_per_rank: int | None = None,
    exact: bool = False,
    cluster: str | os.PathLike[str] = "h100x8",
    dispatcher: str | None = None,
    model: ModelSource | None = None,
    overrides: Overrides = (),
    recompute: bool = True,
    checkpointing: bool | str = False,
) -> PlanResult:
    """Returns a plan of one step of a routing trace for a cluster, as `trimtab plan` does.

    Args:
        trace: a `RoutingTrace`, a path (file, folder or pattern), or a list of paths.
        ranks, ranks_per_node, groups, slots, token_budget, micro_steps, cluster, dispatcher, recompute, checkpointing:
            as in `simulate`, one value each. The step is planned as recorded, with contiguous homes before it.
        step: RL step to plan; by default the last in the trace.
        policy: the balancer, a name of `trimtab.policies.POLICIES`.
        max_rows_per_rank: rows that no rank may exceed in any layer of a micro-step; with `trimtab` only.
        exact: true: no rank gets more rows of a layer than the mean, rounded up; with `trimtab` only.
        model: for bytes and seconds: a `ModelSpec`, a preset's name or hub id, a config.json or a checkpoint; by
            default the model that the trace names, else a preset like the trace, if there is one.
        overrides: keys of the model's config with other values, such as `{"num_hidden_layers": 24}`.

    Raises:
        InputError: one line, if an argument is out of range or the trace can't be read, is empty, has no such step, is
            not of the model, or does not fit the ranks or the token budget.
    """
    check_run(locals())
    check_choice("policy", policy, sorted(POLICIES))
    balancer = POLICIES[policy]
    numbers = slot_numbers(slots) if slots == AUTO else ()
    if max_rows_per_rank is not None or exact:
        if policy != "trimtab":
            raise InputError(f"max_rows_per_rank and exact are for policy trimtab; the policy is {policy}")
        balancer = Trimtab(PlanSettings(max_rows_per_rank=max_rows_per_rank, exact=exact))
    if isinstance(balancer, Trimtab):
        balancer = replace(balancer, slots=numbers)
    reader = open_trace(trace)
    ranks = ranks_of(reader.empty, reader.name, ranks)
    nodes = nodes_of(cluster, ranks, slots, ranks_per_node, dispatcher)
    step_trace = _one_step(reader, step)
    spec = model_or_none(reader.name, step_trace, model, overrides)
    costs = None
    if spec:
        costs = StepCosts.of(
            nodes, spec, moe_layers=step_trace.num_layers, groups=groups, recompute=recompute,
            checkpointing=recomputed(checkpointing) is True,
        )  # fmt: skip
    homes = Placement.contiguous(step_trace.num_layers, step_trace.num_experts, nodes.ranks)
    # Untimed, so that compiling is not timed: a few sequences, in several micro-steps.
    few = step_trace.part(0, min(step_trace.num_sequences, 4 * nodes.ranks))
    longest = max(1, int(few.sequence_lengths.max()))
    budget = longest if token_budget is None else min(token_budget, longest)
    _plan(balancer if numbers else POLICIES[policy], SequenceCounts.from_trace(few), homes, nodes, budget, costs)
    start = time.perf_counter()
    sequences = SequenceCounts.from_trace(step_trace)
    counting_ended = time.perf_counter()
    if micro_steps is not None:
        token_budget = budget_for([sequences.lengths], nodes.ranks * groups, micro_steps)
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
