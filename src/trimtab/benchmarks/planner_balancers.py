"""Balance, bytes, distance to the LP bound and planning time of one balancer in one case."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.benchmarks.planner_cases import SMALLEST_SHARE, PlannerCase
from trimtab.cluster import QWEN3_30B, ClusterSpec, StepCosts
from trimtab.planner import PlanSettings, StepPlan, Workload
from trimtab.planner.plan.bounds import gap_to_bound
from trimtab.planner.plan.prediction import cross_node_rows, dense_times, plan_parts, predict
from trimtab.planner.plan.rank_work import even_work
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.policies import POLICIES, Llep, Policy, Taot, UltraEp
from trimtab.policies.trimtab import Trimtab

TIMED_ROUNDS = 5
# On equal terms all balancers have Trimtab's smallest share, and no threshold below which they don't balance.
EQUAL_TERMS: dict[str, Policy] = {
    "ultraep": UltraEp(smallest_quota=SMALLEST_SHARE),
    "taot": Taot(smallest_share=SMALLEST_SHARE),
    "llep": Llep(max_tokens_factor=1.0, min_tokens_per_gemm=SMALLEST_SHARE, gate=1.0),
}


def balancer_figures(case: PlannerCase, name: str, slots: int, equal_terms: bool, sampled: int) -> dict[str, Any]:
    """Figures of one balancer.

    Args:
        slots: slots per rank.
        equal_terms: same homes, schedule and slots for all balancers; else each uses its own.
        sampled: number of instances whose LP bound is solved.
    """
    policy = EQUAL_TERMS.get(name, POLICIES[name]) if equal_terms else POLICIES[name]
    cluster = case.cluster(slots)
    placement = case.warm if name == "trimtab" and not equal_terms else case.contiguous
    view = case.view(policy, placement, slots, equal_terms=equal_terms)
    policy.plan(view)  # compiles kernels
    start = time.perf_counter()
    plan = policy.plan(view)
    plan_s = time.perf_counter() - start
    workload = case.workload(plan.schedule)
    plan.check(workload)
    ratios = max_over_mean(plan.rank_loads(workload))
    costs = StepCosts.of(cluster, QWEN3_30B, moe_layers=plan.num_layers)
    predicted_s = predicted_seconds(plan, workload, policy, costs, case.sequences.lengths)
    if policy.traits.ideal:
        ratios = np.ones_like(ratios)
    instances = plan.num_micro_steps * plan.num_layers
    us = kernel_us(plan, workload, policy.settings) if isinstance(policy, Trimtab) else plan_s / instances * 1e6
    return {
        **case.key,
        "slots": slots,
        "policy": name,
        "terms": "equal" if equal_terms else "own",
        "us_per_instance": us,
        "charged_s": charged_seconds(policy, plan, workload, case.sequences.lengths, cluster),
        "plan_s": plan_s,
        "max_over_mean_mean": float(ratios.mean()),
        "max_over_mean_p99": float(np.percentile(ratios, 99)),
        "gap_to_bound_mean": None if policy.traits.ideal else gap_to_bound(plan, workload, sampled),
        "slots_used": plan.slots_per_rank,
        "replicas_per_instance": plan.num_replicas / instances,
        "far_replicas_per_instance": np.count_nonzero(plan.far_replicas) / instances,
        "replica_bytes_per_instance": plan.num_replicas / instances * QWEN3_30B.expert_bytes,
        "cross_node_token_fraction": int(cross_node_rows(plan, workload).sum()) / workload.num_rows,
        "moved_homes": int(sum(part.sum() for part in view.placement.moves(plan.placement, cluster.ranks_per_node))),
        "predicted_ms_per_instance": predicted_s / instances * 1e3,
        "plan_hash": plan.hash,
    }


def charged_seconds(policy: Policy, plan: StepPlan, workload: Workload, lengths: Array, cluster: ClusterSpec) -> float:
    """Planning for which ranks wait: in each layer if it is live, else before the first micro-step."""
    hidden = policy.traits.hidden_planning(plan, workload, lengths, cluster, plan.num_layers)
    return policy.traits.live_planning_seconds(cluster) + hidden.header_s + hidden.round_s


def predicted_seconds(plan: StepPlan, workload: Workload, policy: Policy, costs: StepCosts, lengths: Array) -> float:
    """Predicted seconds of the step; of the ideal run, with even work."""
    if not policy.traits.ideal:
        return predict([plan], [workload], costs, lengths=[lengths]).seconds
    work = even_work(workload.estimated_MLRE, plan.ranks_per_node, costs.operations)
    dense = dense_times(plan.schedule, lengths, costs)
    return float(plan_parts(plan, work, dense, costs).sum())


def kernel_us(plan: StepPlan, workload: Workload, settings: PlanSettings) -> float:
    """Microseconds per instance of Trimtab's replicas and split, with source sums and CSR rows: median over layers."""
    per_layer: list[float] = []
    expected_MLR = workload.expected_loads(plan.home)
    limits = settings.limits(ClusterSpec(plan.num_ranks, plan.ranks_per_node, plan.slots_per_rank))
    for _ in range(TIMED_ROUNDS):
        for layer in range(plan.num_layers):
            start = time.perf_counter()
            plan_layer(workload.token_counts_MLRE, expected_MLR[:, layer], layer, plan.home[layer], limits)
            per_layer.append((time.perf_counter() - start) / plan.num_micro_steps)
    return statistics.median(per_layer) * 1e6
