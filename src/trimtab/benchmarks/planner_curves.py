"""Balance against replica bytes: one curve per balancer, one point per threshold."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.benchmarks.planner_cases import SMALLEST_SHARE, PlannerCase
from trimtab.cluster import QWEN3_30B
from trimtab.planner import PlanSettings
from trimtab.planner.plan.workload import max_over_mean
from trimtab.policies import Llep, Policy, UltraEp
from trimtab.policies.trimtab import Trimtab

RIVALS = ("ultraep", "llep")
CURVES = ("trimtab", *RIVALS)
THRESHOLDS = (1.002, 1.005, 1.01, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3)
SLOTS = 2
# max/mean at which the curves' bytes are compared.
COMPARED_BALANCE = 1.05


def frontier_points(case: PlannerCase) -> list[dict[str, Any]]:
    """Returns one point per curve and threshold: max/mean, averaged over instances, and replica bytes per instance.

    All on equal terms: they plan only replicas and split. Ranks have two slots.
    """
    points = []
    for curve, threshold in itertools.product(CURVES, THRESHOLDS):
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
