"""Bounds of the planner's choices, one idea each, and the curves of balance against replica bytes.

* Replicas of Trimtab's plans compared with the fewest possible.
* Sequences grouped by routing compared with sequences packed by length.
* One curve of balance against bytes per balancer, with one point per threshold, and its picture.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.plan_bounds import evenly_spread, fewest_replicas
from benchmarks.tables import picture
from trimtab.array_type import Array
from trimtab.cluster import QWEN3_30B
from trimtab.planner import Placement, PlanSettings, Schedule, plan_step
from trimtab.planner.placement.home_swaps import place_experts
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.schedule.grouping import group_by_routing
from trimtab.policies import Llep, Policy, UltraEp
from trimtab.policies.trimtab import Trimtab

if TYPE_CHECKING:
    from benchmarks.planner import PlannerCase

SLOTS = 2
SMALLEST_SHARE = 128
MILP_THRESHOLD = 1.02
SCHEDULE_THRESHOLDS = (1.005, 1.02)
RIVALS = ("ultraep", "llep")
CURVES = ("trimtab", *RIVALS)
CURVE_THRESHOLDS = (1.002, 1.005, 1.01, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3)
# max/mean at which the curves' bytes are compared.
COMPARED_BALANCE = 1.05
STYLES: dict[str, dict[str, Any]] = {
    "trimtab": {"color": "#0f766e", "marker": "o", "linewidth": 2},
    "ultraep": {"color": "#d97706", "marker": "^"},
    "llep": {"color": "#9333ea", "marker": "v"},
}


def milp_figures(case: PlannerCase, homes: str, sampled: int) -> dict[str, Any]:
    """Replicas of the planner, and the fewest that reach the same max/mean at the same homes, solved as a MILP.

    Args:
        homes: "own" (those that Trimtab's last plan left) or "contiguous".
        sampled: number of instances that are solved.
    """
    workload = case.workload(case.schedule)
    settings = PlanSettings(threshold=MILP_THRESHOLD, smallest_share=SMALLEST_SHARE)
    placement = case.warm if homes == "own" else case.contiguous
    plan = plan_step(workload, case.schedule, placement, case.cluster(SLOTS), settings)
    loads_IR = plan.rank_loads(workload).reshape(-1, plan.num_ranks)
    replicas = fewest = solved = 0
    for instance in evenly_spread(len(loads_IR), sampled):
        micro_step, layer = divmod(instance, plan.num_layers)
        counts_E = workload.token_counts_MLRE[micro_step, layer].sum(axis=0, dtype=np.int64)
        limit = int(counts_E.sum() * MILP_THRESHOLD / plan.num_ranks)
        least = fewest_replicas(counts_E, plan.home[layer], plan.num_ranks, SLOTS, limit, SMALLEST_SHARE)
        if least is not None and loads_IR[instance].max() <= limit:
            solved += 1
            fewest += least
            replicas += len(plan.replicas_of(micro_step, layer))
    return {
        **case.key,
        "homes": homes,
        "threshold": MILP_THRESHOLD,
        "sampled": sampled,
        "solved": solved,
        "replicas": replicas,
        "fewest": fewest,
    }


def schedule_figures(case: PlannerCase) -> list[dict[str, Any]]:
    """Expert time and replicas under both schedules, with the same homes, micro-steps and token budget.

    Homes are placed by the sums of the whole step, which favours neither schedule.
    """
    packed, cluster = case.schedule, case.cluster(SLOTS)
    totals_LE = case.sequences.counts_SLE.sum(axis=0, dtype=np.int64)
    home = [
        place_experts(totals_E[None], home_E, cluster.ranks, cluster.ranks_per_node)
        for totals_E, home_E in zip(totals_LE, case.contiguous.home, strict=True)
    ]
    homes = Placement(np.stack(home))
    start = time.perf_counter()
    grouped = group_by_routing(case.sequences, packed, homes, case.token_budget)
    seconds = time.perf_counter() - start

    def busiest(schedule: Schedule) -> int:
        return int(case.workload(schedule).home_loads(homes.home).max(axis=-1).sum())

    def replicas(schedule: Schedule, threshold: float) -> float:
        plan = plan_step(case.workload(schedule), schedule, homes, cluster, PlanSettings(threshold=threshold))
        return plan.num_replicas / (plan.num_micro_steps * plan.num_layers)

    return [
        {
            **case.key,
            "micro_steps": [packed.num_micro_steps, grouped.num_micro_steps],
            "expert_time_saved": 1 - busiest(grouped) / busiest(packed),
            "threshold": threshold,
            "replicas_by_length": replicas(packed, threshold),
            "replicas_by_routing": replicas(grouped, threshold),
            "seconds": seconds,
        }
        for threshold in SCHEDULE_THRESHOLDS
    ]


def frontier_points(case: PlannerCase) -> list[dict[str, Any]]:
    """Returns one point per curve and threshold: max/mean, averaged over instances, and replica bytes per instance.

    All on equal terms: they plan only replicas and split. Ranks have two slots.
    """
    points = []
    for curve, threshold in itertools.product(CURVES, CURVE_THRESHOLDS):
        policy = _policy(curve, threshold)
        plan = policy.plan(case.view(policy, case.contiguous, SLOTS, equal_terms=True))
        replicas = plan.num_replicas / (plan.num_micro_steps * plan.num_layers)
        points.append(
            {
                **case.key,
                "curve": curve,
                "threshold": threshold,
                "max_over_mean_mean": float(max_over_mean(plan.rank_loads(case.workload(plan.schedule))).mean()),
                "replica_bytes_per_instance": replicas * QWEN3_30B.expert_bytes,
            }
        )
    return points


def _policy(curve: str, threshold: float) -> Policy:
    if curve == "ultraep":
        return replace(UltraEp(smallest_quota=SMALLEST_SHARE), threshold=threshold)
    if curve == "llep":
        return Llep(max_tokens_factor=threshold, min_tokens_per_gemm=SMALLEST_SHARE, gate=1.0)
    return Trimtab(PlanSettings(threshold=threshold))


def compare_curves(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns replica bytes of every curve at `COMPARED_BALANCE`, and Trimtab's max/mean minus rivals' at equal bytes.

    Returns:
        `balance`; `bytes_per_instance` by curve, None if it never reaches that balance; `trimtab_above` by rival:
        largest value of Trimtab's max/mean minus the rival's, at equal bytes; positive means that Trimtab is worse
        there.
    """
    curves: dict[str, tuple[Array, Array]] = {}
    for name in CURVES:
        mine = [(p["replica_bytes_per_instance"], p["max_over_mean_mean"]) for p in points if p["curve"] == name]
        curves[name] = tuple(np.array(sorted(mine)).T)  # type: ignore[assignment]

    def bytes_at(name: str) -> float | None:
        nbytes, balance = curves[name]
        # np.interp needs ascending x. The minimum falls with more bytes, so both arrays are reversed.
        ascending_balance, needed = np.minimum.accumulate(balance)[::-1], nbytes[::-1]
        if ascending_balance[0] > COMPARED_BALANCE:
            return None
        return float(np.interp(COMPARED_BALANCE, ascending_balance, needed))

    def above(name: str) -> float:
        own_bytes, own_balance = curves["trimtab"]
        nbytes, balance = curves[name]
        difference = np.interp(nbytes, own_bytes, own_balance) - balance
        return float(difference[nbytes >= own_bytes[0]].max(initial=-np.inf))

    return {
        "balance": COMPARED_BALANCE,
        "bytes_per_instance": {name: bytes_at(name) for name in curves},
        "trimtab_above": {name: above(name) for name in RIVALS},
    }


def draw_frontier(points: list[dict[str, Any]], path: Path) -> None:
    """Write the picture of all curves as SVG, one panel per case. Lower left is better."""
    panels = list(dict.fromkeys((point["ranks"], point["experts"], point["trace"]) for point in points))
    columns = min(2, len(panels))
    with picture(path, -(-len(panels) // columns), columns, (5.5, 3.4)) as axes:
        for axis, panel in zip(axes.flat, panels, strict=False):
            ranks, experts, trace = panel
            for name, style in STYLES.items():
                mine = [p for p in points if (p["ranks"], p["experts"], p["trace"]) == panel and p["curve"] == name]
                megabytes = [point["replica_bytes_per_instance"] / 1e6 for point in mine]
                axis.plot(megabytes, [point["max_over_mean_mean"] for point in mine], label=name, markersize=4, **style)
            axis.set_title(f"{ranks} ranks, {experts} experts, {trace}", fontsize=10)
            axis.set_xlim(left=0)
        for axis in axes[-1]:
            axis.set_xlabel("replica weights moved, MB per instance")
        for axis in axes[:, 0]:
            axis.set_ylabel("max/mean rank load")
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        axes.flat[0].legend(fontsize=8)
