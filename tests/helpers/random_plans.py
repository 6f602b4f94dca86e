"""Random steps and random valid plans for them: any replicas and any quotas that keep the invariants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, PlannedStep, Schedule, StepPlan, Workload
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.strategy import NOTHING
from trimtab.timeline import PARTS
from trimtab.trace import RoutingTrace


def random_trace(
    rng: np.random.Generator, *, num_sequences: int, max_length: int, num_layers: int, num_experts: int, top_k: int,
    unknown: float = 0.0,
) -> RoutingTrace:  # fmt: skip
    """Sequences of 1 to `max_length` tokens, with some experts hotter than others.

    Args:
        unknown: share of (token, layer) pairs whose route is unknown.
    """
    skew_LE = rng.gumbel(size=(num_layers, num_experts)) * rng.uniform(0, 2)
    sequences = []
    for _ in range(num_sequences):
        length = int(rng.integers(1, max_length + 1))
        scores = rng.gumbel(size=(length, num_layers, num_experts)) + skew_LE
        sequences.append(np.argsort(-scores, axis=-1)[:, :, :top_k])
    trace = RoutingTrace.from_sequences(
        sequences, num_experts=num_experts, sequence_hashes=rng.integers(1, 1 << 60, num_sequences)
    )
    if unknown:
        trace.expert_ids[rng.random(trace.expert_ids.shape[:2]) < unknown] = trace.no_route
    return trace


def random_schedule(rng: np.random.Generator, num_sequences: int, *, num_ranks: int, num_micro_steps: int) -> Schedule:
    """A random schedule, in which some ranks are idle in some micro-steps."""
    return Schedule(
        micro_step=rng.integers(0, num_micro_steps, num_sequences).astype(np.int32),
        rank=rng.integers(0, num_ranks, num_sequences).astype(np.int32),
        mini_batch_of_micro_step=np.zeros(num_micro_steps, np.int32),
        num_ranks=num_ranks,
    )


def random_placement(rng: np.random.Generator, num_layers: int, num_experts: int, num_ranks: int) -> Placement:
    """Random homes, with equally many experts on every rank."""
    contiguous = Placement.contiguous(num_layers, num_experts, num_ranks)
    return Placement(rng.permuted(contiguous.home, axis=1))


def random_plan(
    rng: np.random.Generator,
    workload: Workload,
    schedule: Schedule,
    *,
    slots: int,
    placement: Placement | None = None,
    ranks_per_node: int | None = None,
) -> StepPlan:
    """Random replicas away from home, on random paths, with random quotas, some 0 and some all tokens."""
    if placement is None:
        placement = Placement.contiguous(workload.num_layers, workload.num_experts, workload.num_ranks)
    replicas, quotas = [], []
    for micro_step in range(workload.num_micro_steps):
        for layer in range(workload.num_layers):
            left_RE = workload.token_counts_MLRE[micro_step, layer].astype(np.int64)
            home_E = placement.home[layer]
            chosen: list[tuple[int, int]] = []
            free = np.full(workload.num_ranks, slots)
            pairs = [(e, r) for e in range(workload.num_experts) for r in range(workload.num_ranks) if home_E[e] != r]
            rng.shuffle(pairs)
            wanted = int(rng.integers(0, workload.num_ranks * slots + 1))
            for expert, rank in pairs:
                if len(chosen) < wanted and free[rank] > 0:
                    chosen.append((int(expert), int(rank)))
                    free[rank] -= 1
            quotas_PR = np.zeros((len(chosen), workload.num_ranks), np.int64)
            for p, (expert, _) in enumerate(chosen):
                for source in range(workload.num_ranks):
                    some = rng.integers(0, left_RE[source, expert] + 1)
                    quotas_PR[p, source] = rng.choice([0, some, left_RE[source, expert]])
                    left_RE[source, expert] -= quotas_PR[p, source]
            replicas.append(np.array(chosen, np.int64).reshape(-1, 2))
            quotas.append(quotas_PR)
    plan = StepPlan.from_instances(
        schedule,
        placement,
        replicas,
        quotas,
        mixed_ML=workload.mixed_ML,
        cluster=ClusterSpec(workload.num_ranks, ranks_per_node or workload.num_ranks, slots),
    )
    return replace(plan, replica_paths=rng.integers(0, 2, plan.num_replicas).astype(np.uint8))


def all_counts(loads: StepLoads) -> list[Workload]:
    """The whole load of each group that is planned here."""
    return loads.count(np.arange(loads.num_micro_steps), np.arange(loads.num_layers))


def random_group_plans(
    rng: np.random.Generator,
    loads: StepLoads,
    schedule: Schedule,
    placement: Placement,
    ranks_per_node: int,
    slots: int = 2,
) -> PlannedStep:
    """Random plans of the groups that are planned here, with these homes."""
    plans = tuple(
        random_plan(rng, load, part, slots=slots, placement=placement, ranks_per_node=ranks_per_node)
        for part, load in zip(loads.schedules, all_counts(loads), strict=True)
    )
    return PlannedStep(schedule, plans, NOTHING, {"nothing": 1.0}, dict.fromkeys(PARTS, 1.0))
