"""Comparison of balancers: one step of a trace, planned by each of them and simulated on the same cluster."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import StepCosts
from trimtab.cluster.operations import OperationCosts, moved_bytes
from trimtab.cluster.parallel_layout import GRANULARITIES
from trimtab.planner import Placement, Schedule, SequenceCounts, StepPlan, Workload, pack_by_length
from trimtab.planner.plan.prediction import cross_node_rows
from trimtab.planner.plan.step_times import moving_seconds
from trimtab.planner.schedule.time_packing import pack_by_time
from trimtab.policies import POLICIES, Policy, make_view
from trimtab.policies.policy import chosen_constants, with_choices
from trimtab.policies.trimtab import Trimtab
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.expert_time import Balance, summarise_balance
from trimtab.simulator.memory import RankLoad, mirror_bytes, rank_memory, replica_pool_bytes, state_bytes
from trimtab.simulator.step import SimulatedStep, mean_step, simulate_step
from trimtab.timeline.recorded_operations import Operations


@dataclass(frozen=True, eq=False)
class Outcome:
    """Result of a balancer. Seconds and bytes are those of the whole model, also if the trace has fewer layers.

    Attributes:
        name: key in `POLICIES`, or the variant's name.
        policy: with the best of its choices of constants, if it has several.
        plan, workload: of the last step.
        simulated: mean seconds of the measured steps, without first moves; load and operations are those of the last.
        step_times_s: of each measured step.
        first_moves_s: seconds of the first move of homes of every layer, in any step of the case. They are paid once.
        balance: over the instances of all measured steps.
        migration_bytes: weights and optimizer state of homes that moved again, mean of a step.
        plan_us: planning time measured on this machine, microseconds per instance, without numba compilation.
        cross_node_fraction: fraction of rows computed on another node than the token's, mean of the steps.
        replicas_per_instance: mean of the steps.
        memory: bytes of the rank that needs most in any measured step, by purpose.
        mirror_bytes: host memory of the node with the largest mirror of expert weights.
        load: of every rank in the step with the most memory, for memory with other settings.
        drawn_s: step time in a resampled case: as resampled, and from each half of the prompts; else empty.
        slots_s: seconds of a step by number of slots, if the balancer had a choice: of `trimtab` as predicted when it
            chose, of others as simulated with estimated transfers of tokens.
    """

    name: str
    policy: Policy
    plan: StepPlan
    workload: Workload
    simulated: SimulatedStep
    step_times_s: tuple[float, ...]
    first_moves_s: float
    balance: Balance
    migration_bytes: int
    plan_us: float
    cross_node_fraction: float
    replicas_per_instance: float
    memory: dict[str, int]
    mirror_bytes: int
    load: RankLoad
    drawn_s: tuple[float, ...] = ()
    slots_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """Of a balancer that predicts, the part of its replicas that got rows in the last step; None for others."""
        return json.loads(self.plan.settings).get("hit_rate") if self.plan.settings else None

    @property
    def peak_bytes(self) -> int:
        """Bytes of the rank that needs most."""
        return sum(self.memory.values())


def simulate_policy(case: ComparisonCase, name: str, variant: Policy | None = None) -> Outcome:
    """Plan the measured steps with a balancer of `POLICIES`, or with a variant named `name`, and simulate them.

    A balancer with several choices of its constants, or several numbers of slots, has the fastest of all pairs, where
    transfers of tokens are estimated. `trimtab` chooses a number by its first plan. In a resampled case, seconds are
    those without the skew that resampling adds, also by part: 2 f(all) - f(half), with the mean of both halves.
    """
    policy = variant or POLICIES[name]
    best = _with_own_slots(case, name, policy) if isinstance(policy, Trimtab) else _best(case, name, policy)
    halves = [simulate_steps(with_slots_of(half, best), name, best.policy).simulated for half in case.halves]
    return _without_excess(best, halves) if halves else best


def with_slots_of(case: ComparisonCase, outcome: Outcome) -> ComparisonCase:
    """The case with the slots that an outcome has, if it had a choice."""
    return case.with_slots(outcome.plan.slots_per_rank) if outcome.slots_s else case


def _with_own_slots(case: ComparisonCase, name: str, policy: Trimtab) -> Outcome:
    """With the number of slots that its first plan chooses, fewer if that does not fit."""
    numbers = () if case.equal_terms else case.slots
    while True:
        outcome = simulate_steps(case, name, replace(policy, slots=numbers))
        chosen = outcome.plan.slots_per_rank
        if not numbers or fits(case, outcome) or chosen == numbers[0]:
            return replace(outcome, policy=policy)
        numbers = tuple(number for number in numbers if number < chosen)


def _best(case: ComparisonCase, name: str, policy: Policy) -> Outcome:
    """With the best of its choices, and of the case's numbers of slots."""
    choices, numbers = with_choices(policy), () if case.equal_terms else case.slots
    if len(choices) == 1 and not numbers:
        return simulate_steps(case, name, policy)
    estimated, found = replace(case, traces=()), []
    for choice in choices:
        for number in numbers or [case.cluster.slots_per_rank]:
            found.append(simulate_steps(estimated.with_slots(number), name, choice))
            if found[-1].plan.slots_per_rank != number:
                # It has none, or takes as many as it needs.
                numbers = ()
                break
    fitting = [outcome for outcome in found if fits(case, outcome)]
    best = min(fitting or found, key=lambda outcome: outcome.simulated.step_time_s)
    mine = [outcome for outcome in found if outcome.policy is best.policy and numbers]
    slots_s = {outcome.plan.slots_per_rank: outcome.simulated.step_time_s for outcome in mine}
    if case.traces:
        best = simulate_steps(case.with_slots(best.plan.slots_per_rank) if numbers else case, name, best.policy)
    return replace(best, slots_s=slots_s)


def _without_excess(outcome: Outcome, halves: Sequence[SimulatedStep]) -> Outcome:
    """The outcome of a resampled case, with seconds of a step without the skew that resampling adds."""
    step, half = outcome.simulated, mean_step(halves)

    def less(name: str) -> dict[str, float]:
        return {part: 2 * seconds - getattr(half, name)[part] for part, seconds in getattr(step, name).items()}

    corrected = replace(
        step,
        step_time_s=2 * step.step_time_s - half.step_time_s,
        parts_s=less("parts_s"),
        causes_s=less("causes_s"),
    )
    drawn_s = (step.step_time_s, *(each.step_time_s for each in halves))
    return replace(outcome, simulated=corrected, drawn_s=drawn_s)


def simulate_steps(case: ComparisonCase, name: str, policy: Policy) -> Outcome:
    """Plan steps one after another with a balancer as it is, each from the homes that it reaches in those before it.

    All steps are planned by who moves homes, else those that are measured. The first move of a layer's homes is paid
    once, and later ones in the step that makes them.
    """
    model, cluster = case.model, case.cluster
    costs = StepCosts.of(
        cluster,
        model,
        moe_layers=case.sequences.num_layers,
        groups=case.settings.groups,
        recompute=case.settings.recompute,
        checkpointing=case.settings.checkpointing,
        ring_layers=case.settings.ring_layers,
        sharding=case.settings.sharding,
        layout=case.settings.layout,
    )
    past = [part.counts_SLE.sum(axis=0, dtype=np.int64) for part in case.earlier]
    placement = Placement.contiguous(case.sequences.num_layers, case.sequences.num_experts, cluster.ranks)

    def plan_one(part: SequenceCounts, seen: list[Array], homes: Placement) -> tuple[StepPlan, float]:
        view = make_view(
            policy, part, packed(part, case, policy, costs), homes, cluster,
            token_budget=case.token_budget,
            mini_batch=case.mini_batch_of(part),
            equal_terms=case.equal_terms,
            past_counts_PLE=np.stack(seen) if seen else None,
            costs=costs,
        )  # fmt: skip
        begin = time.perf_counter()
        plan = policy.plan(view)
        return plan, time.perf_counter() - begin

    first = len(case.steps) - case.measured
    if not (policy.traits.relocates and not case.equal_terms and first):
        # Untimed run on a few sequences, so that numba compilation is not timed.
        few = np.arange(min(case.steps[first].num_sequences, cluster.ranks))
        plan_one(case.steps[first].select(few), past[:first], placement)
        skipped = first
    else:
        skipped = 0
    done: list[Outcome] = []
    slots_s: dict[int, float] = {}
    has_moved_L, first_moves_s = np.zeros(case.sequences.num_layers, np.bool_), 0.0
    for number in range(skipped, len(case.steps)):
        plan, seconds = plan_one(case.steps[number], past[:number], placement)
        if isinstance(policy, Trimtab) and policy.slots:
            # Chosen at the first plan of a run.
            predicted_s = json.loads(plan.settings)["slots_s"]
            slots_s = {int(slots): each_s * case.scale for slots, each_s in predicted_s.items()}
            policy, cluster = replace(policy, slots=()), replace(cluster, slots_per_rank=plan.slots_per_rank)
            case = case.with_slots(plan.slots_per_rank)
        # Moves of layers whose homes have moved before.
        before = Placement(np.where(has_moved_L[:, None], placement.home, plan.home))
        first_moves_s += _moving_seconds(case, plan, placement) - _moving_seconds(case, plan, before)
        if number >= first:
            done.append(_outcome_of_step(case, name, policy, number, plan, before, seconds))
        has_moved_L |= (placement.home != plan.home).any(axis=1)
        placement = plan.placement
    return replace(_mean(done), slots_s=slots_s, first_moves_s=first_moves_s)


def _mean(steps: Sequence[Outcome]) -> Outcome:
    """One outcome of several steps; what is no mean is that of the last step, and memory that of the largest."""

    def mean(attribute: str) -> float:
        return math.fsum(getattr(step, attribute) for step in steps) / len(steps)

    largest = max(steps, key=lambda step: step.peak_bytes)
    return replace(
        steps[-1],
        simulated=mean_step([step.simulated for step in steps]),
        step_times_s=tuple(step.simulated.step_time_s for step in steps),
        balance=summarise_balance(np.concatenate([step.simulated.work.loads_MLR for step in steps])),
        migration_bytes=round(mean("migration_bytes")),
        plan_us=mean("plan_us"),
        cross_node_fraction=mean("cross_node_fraction"),
        replicas_per_instance=mean("replicas_per_instance"),
        memory=largest.memory,
        mirror_bytes=max(step.mirror_bytes for step in steps),
        load=largest.load,
    )


def _outcome_of_step(
    case: ComparisonCase,
    name: str,
    policy: Policy,
    number: int,
    plan: StepPlan,
    before: Placement,
    seconds: float,
) -> Outcome:
    """Of one step alone, whose moves start from the homes `before`, and which took so many seconds to plan."""
    sequences, model, settings = case.steps[number], case.model, case.settings
    workload = Workload.from_sequences(sequences, plan.schedule)
    plan.check(workload)
    simulated = _simulated(case, policy, number, plan, workload, before=before)
    tokens_MR = np.zeros((plan.num_micro_steps, plan.num_ranks), np.int64)
    np.add.at(tokens_MR, (plan.micro_step, plan.rank), sequences.lengths)
    near_L, far_L = before.moves(plan.placement, case.cluster.ranks_per_node)
    load = RankLoad(
        layers=plan.num_layers,
        homes_R=np.bincount(plan.home.ravel(), minlength=plan.num_ranks),
        tokens_MR=tokens_MR,
        rows_MLR=simulated.work.loads_MLR,
        pool_R=replica_pool_bytes(plan, model, policy.traits, settings.ring_layers),
        pool_has_layers=policy.traits.copies != "shared slots",
    )
    instances = plan.num_micro_steps * plan.num_layers
    home_bytes = moved_bytes(model, settings.sharding, settings.groups)
    return Outcome(
        name=name,
        policy=policy,
        plan=plan,
        workload=workload,
        simulated=simulated,
        step_times_s=(simulated.step_time_s,),
        first_moves_s=0.0,
        balance=summarise_balance(simulated.work.loads_MLR),
        migration_bytes=round(int(near_L.sum() + far_L.sum()) * home_bytes * case.scale),
        plan_us=seconds / instances * 1e6,
        cross_node_fraction=int(cross_node_rows(plan, workload).sum()) / max(1, workload.num_rows),
        replicas_per_instance=plan.num_replicas / instances,
        memory=rank_memory(
            load,
            model,
            groups=settings.groups,
            sharding=settings.sharding,
            checkpointing=settings.checkpointing,
            layout=settings.layout,
        ),
        mirror_bytes=mirror_bytes(plan, model, policy.traits),
        load=load,
    )


def operations(case: ComparisonCase, outcome: Outcome, micro_step: int) -> Operations:
    """Operations of every rank in the last step's update of one micro-step, in the layers of the trace."""
    last = len(case.earlier)
    return _simulated(case, outcome.policy, last, outcome.plan, outcome.workload, show=micro_step).operations


def _simulated(
    case: ComparisonCase,
    policy: Policy,
    number: int,
    plan: StepPlan,
    workload: Workload,
    *,
    before: Placement | None = None,
    show: int | None = None,
) -> SimulatedStep:
    from_end = number - len(case.steps)
    step = simulate_step(
        plan,
        workload,
        case.steps[number].lengths,
        _operation_costs(case, plan),
        case.cluster,
        policy.traits,
        before=before,
        settings=case.settings,
        model=case.model,
        show=show,
        trace=case.traces[from_end] if -from_end <= len(case.traces) else None,
        order_LE=case.order_LE,
    )
    return replace(
        step,
        step_time_s=step.step_time_s * case.scale,
        parts_s={part: seconds * case.scale for part, seconds in step.parts_s.items()},
        causes_s={cause: seconds * case.scale for cause, seconds in step.causes_s.items()},
        hidden_planning_s=step.hidden_planning_s * case.scale,
    )


def _operation_costs(case: ComparisonCase, plan: StepPlan) -> OperationCosts:
    settings = case.settings
    return OperationCosts.of(
        case.cluster, case.model, moe_layers=plan.num_layers, groups=settings.groups, sharding=settings.sharding,
        checkpointing=settings.checkpointing, layout=settings.layout,
    )  # fmt: skip


def _moving_seconds(case: ComparisonCase, plan: StepPlan, before: Placement) -> float:
    """Of the moves from the homes `before` to those of a plan, in the whole model. Pipeline stages move their own."""
    seconds = moving_seconds(before.home, plan.home, plan.ranks_per_node, _operation_costs(case, plan))
    return seconds * case.scale / case.settings.layout.pp


def figures(case: ComparisonCase, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """All figures of `trimtab simulate`'s JSON, by balancer. Seconds and bytes are those of the whole model.

    known_at: the latest routing that its decisions see.
    within_node: whether copies stay inside the node of their home.
    planning_time: where the charged planning time comes from.
    slots_per_rank, micro_steps: of the plan.
    step_time_s_by_slots: by number of slots, if the balancer had a choice: of `trimtab` as predicted when it chose, of
        others as simulated with estimated transfers of tokens; else null.
    step_time_s: mean of the simulated steps.
    speedup_vs_static, speedup_vs_eplb: step time of the other divided by this one's; null if it did not run.
    fraction_of_balanced: step time of the ideal divided by this one's; null if it did not run.
    max_over_mean: of rank loads, over instances.
    step_times_s: of each simulated step.
    first_moves_s: of the first move of every layer's homes, in any step of the trace; paid once, and in no step time.
    chosen: constants of the balancer with which it is fastest, of its `choices`; null if it has no choice.
    replicas_per_instance: mean.
    weight_bytes_per_micro_step: replica weights, all ranks together.
    cross_node_token_fraction: rows that are computed on another node than the token's.
    exposed_transfer_s, exposed_planning_s: for which ranks wait.
    hidden_planning_s: of planning from recorded routing during rollout and step, for which no rank waits.
    migration_bytes_per_step: weights and optimizer state of homes that move again.
    plan_us_per_instance: planning time on this machine.
    replica_pool_bytes: of a rank.
    mirror_bytes_per_node: of the node with the largest mirror.
    peak_bytes_per_rank: of the rank that needs most.
    fits: whether the device has them.
    peak_tokens_per_rank: most rows of a rank in an instance.
    parts_s: seconds by part of the critical path.
    memory_bytes: of the rank that needs most, by purpose.
    state_bytes: parameters, gradients and optimizer state, of experts and dense parts.
    """
    static, eplb, ideal = (outcomes.get(name) for name in ("static", "eplb", "balanced"))
    eplb = None if case.is_too_small else eplb
    content: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        plan, step, traits, model = outcome.plan, outcome.simulated, outcome.policy.traits, case.model
        states = {name: state_bytes(outcome.memory, name) for name in ("expert", "dense")}
        others = {purpose: size for purpose, size in outcome.memory.items() if purpose.split()[0] not in states}
        content[name] = {
            "known_at": traits.known_at,
            "within_node": traits.within_node and not case.equal_terms,
            "planning_time": traits.planning.source,
            "slots_per_rank": plan.slots_per_rank,
            "step_time_s_by_slots": {str(number): step_s for number, step_s in outcome.slots_s.items()} or None,
            "step_time_s": step.step_time_s,
            "speedup_vs_static": static.simulated.step_time_s / step.step_time_s if static else None,
            "speedup_vs_eplb": eplb.simulated.step_time_s / step.step_time_s if eplb else None,
            "fraction_of_balanced": ideal.simulated.step_time_s / step.step_time_s if ideal else None,
            "max_over_mean": asdict(outcome.balance),
            "micro_steps": plan.num_micro_steps,
            "step_times_s": list(outcome.step_times_s),
            "first_moves_s": outcome.first_moves_s,
            "chosen": chosen_constants(outcome.policy),
            "replicas_per_instance": outcome.replicas_per_instance,
            "weight_bytes_per_micro_step": outcome.replicas_per_instance * model.expert_bytes * model.moe_layers,
            "cross_node_token_fraction": outcome.cross_node_fraction,
            "exposed_transfer_s": step.parts_s["transfers"],
            "exposed_planning_s": step.parts_s["planning"],
            "hidden_planning_s": step.hidden_planning_s,
            "migration_bytes_per_step": outcome.migration_bytes,
            "plan_us_per_instance": outcome.plan_us,
            "replica_pool_bytes": outcome.memory["replica pool"],
            "mirror_bytes_per_node": outcome.mirror_bytes,
            "peak_bytes_per_rank": outcome.peak_bytes,
            "fits": fits(case, outcome),
            "peak_tokens_per_rank": int(step.work.loads_MLR.max(initial=0)),
            "parts_s": step.parts_s,
            "causes_s": step.causes_s,
            "memory_bytes": {
                "experts": sum(states["expert"].values()), "dense parts": sum(states["dense"].values()), **others,
            },
            "state_bytes": {"experts": states["expert"], "dense parts": states["dense"]},
        }  # fmt: skip
    return content


def fits(case: ComparisonCase, outcome: Outcome) -> bool:
    """Whether the rank that needs most memory has it."""
    return outcome.peak_bytes <= case.cluster.device_bytes


def with_checkpointing(case: ComparisonCase) -> ComparisonCase:
    """The case with the least activation checkpointing with which `static` fits, and a sentence that says so; the same
    case if it fits without, or not at all."""
    load = simulate_policy(replace(case, halves=(), traces=()), "static").load
    for name, checkpointing in GRANULARITIES.items():
        settings = replace(case.settings, checkpointing=checkpointing)
        needs = rank_memory(
            load, case.model, groups=settings.groups, sharding=settings.sharding, checkpointing=checkpointing,
            layout=settings.layout,
        )  # fmt: skip
        if sum(needs.values()) <= case.cluster.device_bytes:
            if settings == case.settings:
                return case
            text = (
                f"Simulated with {name} activation checkpointing, since the step does not fit without; "
                "--recompute-granularity none simulates it without."
            )
            halves = tuple(replace(half, settings=settings) for half in case.halves)
            return replace(case, settings=settings, halves=halves, assumed=(*case.assumed, text))
    return case


def permuted_steps(case: ComparisonCase, outcomes: Mapping[str, Outcome], seed: int) -> dict[str, SimulatedStep]:
    """Steps of balancers, with the slots of their outcomes, if experts had their ids in random order in every layer."""
    permuted = case.with_permuted_experts(seed)
    return {name: simulate_policy(with_slots_of(permuted, each), name).simulated for name, each in outcomes.items()}


def packed(sequences: SequenceCounts, case: ComparisonCase, policy: Policy, costs: StepCosts) -> Schedule:
    """The schedule that a balancer is given: by time, as any framework could pack; by length on equal terms."""
    by_length = pack_by_length(
        sequences.lengths,
        num_ranks=case.cluster.ranks,
        token_budget=case.token_budget,
        mini_batch=case.mini_batch_of(sequences),
    )
    if case.equal_terms or policy.traits.packs_by_length:
        return by_length
    return pack_by_time(by_length, sequences.lengths, sequences.top_k, case.cluster, costs, case.token_budget)
