"""`trimtab bench planner`: every balancer on the same steps, on its own recipe and on equal terms."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trimtab.array_type import Array
from trimtab.benchmarks.planner_cases import LONGEST, MICRO_STEPS, SLACK, TOKENS_PER_RANK, PlannerCase, build_case
from trimtab.cluster import QWEN3_30B, ClusterSpec, CostModel
from trimtab.planner import Placement, PlanSettings, Schedule, StepPlan, Workload, plan_step
from trimtab.planner.placement.home_swaps import place_experts
from trimtab.planner.plan.bounds import evenly_spread, fewest_replicas, gap_to_bound
from trimtab.planner.plan.prediction import predict
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.planner.schedule.grouping import group_by_routing
from trimtab.policies import POLICIES, Policy, make_view
from trimtab.policies.rivals.llep import Llep
from trimtab.policies.rivals.ultraep import UltraEp
from trimtab.policies.trimtab import Trimtab

TIMED_ROUNDS = 5
SMALLEST_SHARE = 128
# On equal terms rivals get our smallest share, and no gate that keeps them from balancing.
EQUAL_TERMS: dict[str, Policy] = {
    "ultraep": UltraEp(smallest_quota=SMALLEST_SHARE),
    "llep": Llep(max_tokens_factor=1.0, min_tokens_per_gemm=SMALLEST_SHARE, gate=1.0),
}
MILP_THRESHOLD = 1.02
# Balance at which the frontier's curves are compared in bytes.
COMPARED_BALANCE = 1.05
OWN = "trimtab, own homes and schedule"
SWEEP = (1.002, 1.005, 1.01, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3)


@dataclass(frozen=True)
class PlannerBenchmark:
    """What to compare.

    Attributes:
        sizes: (ranks, experts) of each case.
        sampled: instances, evenly spread, whose LP bound is solved.
        sampled_milp: instances whose fewest replicas are solved, at the first size only.
    """

    sizes: tuple[tuple[int, int], ...] = ((8, 128), (16, 128), (32, 128), (64, 256))
    presets: tuple[str, ...] = ("rl-math", "rl-mixed")
    slots: tuple[int, ...] = (1, 2)
    policies: tuple[str, ...] = tuple(POLICIES)
    layers: int = 8
    sampled: int = 16
    sampled_milp: int = 24
    seed: int = 0


def run_benchmark(settings: PlannerBenchmark, *, frontier: bool) -> dict[str, Any]:
    """All figures, as written to the JSON file; the frontier's only if asked for."""
    figures: dict[str, Any] = {
        "schema": "trimtab-bench-planner-1",
        "settings": asdict(settings)
        | {"micro_steps": MICRO_STEPS, "tokens_per_rank": TOKENS_PER_RANK, "longest": LONGEST, "slack": SLACK},
        "cases": [],
        "schedule": [],
        "milp": [],
        "frontier": [],
        "frontier_compared": [],
    }
    cases = [(*size, preset) for size in settings.sizes for preset in settings.presets]
    with Progress(transient=True) as progress:
        task = progress.add_task("bench planner", total=len(cases) * len(settings.slots) * len(settings.policies) * 2)
        for ranks, experts, preset in cases:
            situation = build_case(ranks, experts, preset, layers=settings.layers, seed=settings.seed)
            figures["schedule"] += _schedule_figures(situation)
            if (ranks, experts) == settings.sizes[0] and settings.sampled_milp:
                figures["milp"] += [
                    _milp_figures(situation, homes, settings.sampled_milp) for homes in ("contiguous", "own")
                ]
            if frontier:
                points = _frontier(situation)
                figures["frontier"] += points
                figures["frontier_compared"].append(_compare_curves(points))
            for slots in settings.slots:
                for equal_terms in (False, True):
                    for name in settings.policies:
                        figures["cases"].append(_case(situation, name, slots, equal_terms, settings.sampled))
                        progress.advance(task)
    return figures


def _case(situation: PlannerCase, name: str, slots: int, equal_terms: bool, sampled: int) -> dict[str, Any]:
    policy = EQUAL_TERMS.get(name, POLICIES[name]) if equal_terms else POLICIES[name]
    cluster = situation.cluster(slots)
    view = make_view(
        policy,
        situation.sequences,
        situation.schedule,
        situation.warm if name == "trimtab" and not equal_terms else situation.contiguous,
        cluster,
        token_budget=situation.token_budget,
        mini_batch=situation.mini_batch,
        equal_terms=equal_terms,
        past_counts_PLE=situation.past_counts_PLE,
    )
    policy.plan(view)  # compiles
    start = time.perf_counter()
    plan = policy.plan(view)
    plan_s = time.perf_counter() - start
    workload = situation.workload(plan.schedule)
    plan.check(workload)
    ratios = max_over_mean(plan.rank_loads(workload))
    prediction = predict(plan, workload, CostModel.of(cluster, QWEN3_30B), even=policy.traits.ideal)
    if policy.traits.ideal:
        ratios = np.ones_like(ratios)
    instances = plan.num_micro_steps * plan.num_layers
    us = kernel_us(plan, workload, policy.settings) if isinstance(policy, Trimtab) else plan_s / instances * 1e6
    return {
        "ranks": situation.ranks,
        "experts": situation.experts,
        "slots": slots,
        "trace": situation.preset,
        "policy": name,
        "terms": "equal" if equal_terms else "own",
        "us_per_instance": us,
        "published_us": policy.traits.published_us,
        "plan_s": plan_s,
        "max_over_mean_mean": float(ratios.mean()),
        "max_over_mean_p99": float(np.percentile(ratios, 99)),
        "gap_to_bound_mean": None if policy.traits.ideal else gap_to_bound(plan, workload, sampled),
        "slots_used": plan.slots_per_rank,
        "replicas_per_instance": plan.num_replicas / instances,
        "far_replicas_per_instance": float(prediction.far_ML.mean()),
        "replica_bytes_per_instance": plan.num_replicas / instances * QWEN3_30B.expert_bytes,
        "cross_node_token_fraction": float(prediction.far_rows_ML.sum() / workload.num_rows),
        "moved_homes": int(sum(part.sum() for part in view.placement.moves(plan.placement, cluster.ranks_per_node))),
        "predicted_ms_per_instance": float(prediction.seconds_ML.mean() * 1e3),
        "plan_hash": plan.hash,
    }


def kernel_us(plan: StepPlan, workload: Workload, settings: PlanSettings) -> float:
    """Microseconds an instance of replicas and split, source sums and CSR rows included: the median over layers."""
    per_layer: list[float] = []
    expected_MLR = workload.expected_loads(plan.home)
    limits = settings.limits(ClusterSpec(plan.num_ranks, plan.ranks_per_node, plan.slots_per_rank))
    for _ in range(TIMED_ROUNDS):
        for layer in range(plan.num_layers):
            start = time.perf_counter()
            plan_layer(workload.token_counts_MLRE, expected_MLR[:, layer], layer, plan.home[layer], limits)
            per_layer.append((time.perf_counter() - start) / plan.num_micro_steps)
    return statistics.median(per_layer) * 1e6


def _schedule_figures(situation: PlannerCase) -> list[dict[str, Any]]:
    """Grouping by routing against packing by length, at the same homes, micro-steps and budget.

    The homes are placed on the sums of the step, and so favour neither schedule.
    """
    packed = situation.schedule
    totals_LE = situation.sequences.counts_SLE.sum(axis=0, dtype=np.int64)
    cluster = situation.cluster(2)
    homes = Placement(
        np.stack(
            [
                place_experts(totals_LE[layer][None], home_E, cluster.ranks, cluster.ranks_per_node)
                for layer, home_E in enumerate(situation.contiguous.home)
            ]
        )
    )
    start = time.perf_counter()
    grouped = group_by_routing(situation.sequences, packed, homes, situation.token_budget)
    seconds = time.perf_counter() - start

    def busiest(schedule: Schedule) -> int:
        return int(situation.workload(schedule).home_loads(homes.home).max(axis=-1).sum())

    def replicas(schedule: Schedule, threshold: float) -> float:
        plan = plan_step(situation.workload(schedule), schedule, homes, cluster, PlanSettings(threshold=threshold))
        return plan.num_replicas / (plan.num_micro_steps * plan.num_layers)

    return [
        {
            "ranks": situation.ranks,
            "experts": situation.experts,
            "trace": situation.preset,
            "micro_steps": [packed.num_micro_steps, grouped.num_micro_steps],
            "expert_time_saved": 1 - busiest(grouped) / busiest(packed),
            "threshold": threshold,
            "replicas_by_length": replicas(packed, threshold),
            "replicas_by_routing": replicas(grouped, threshold),
            "seconds": seconds,
        }
        for threshold in (1.005, 1.02)
    ]


def _milp_figures(situation: PlannerCase, homes: str, sampled: int) -> dict[str, Any]:
    """Replicas of the threshold planner against the fewest that reach max/mean 1.02, at the same homes."""
    workload = situation.workload(situation.schedule)
    settings = PlanSettings(threshold=MILP_THRESHOLD, smallest_share=SMALLEST_SHARE)
    placement = situation.warm if homes == "own" else situation.contiguous
    plan = plan_step(workload, situation.schedule, placement, situation.cluster(2), settings)
    loads_IR = plan.rank_loads(workload).reshape(-1, plan.num_ranks)
    ours = fewest = solved = 0
    for instance in evenly_spread(len(loads_IR), sampled):
        micro_step, layer = divmod(instance, plan.num_layers)
        counts_E = workload.token_counts_MLRE[micro_step, layer].sum(axis=0, dtype=np.int64)
        limit = int(counts_E.sum() * MILP_THRESHOLD / plan.num_ranks)
        least = fewest_replicas(counts_E, plan.home[layer], plan.num_ranks, 2, limit, SMALLEST_SHARE)
        if least is not None and loads_IR[instance].max() <= limit:
            solved += 1
            fewest += least
            ours += len(plan.replicas_of(micro_step, layer))
    return {
        "ranks": situation.ranks,
        "experts": situation.experts,
        "trace": situation.preset,
        "homes": homes,
        "threshold": MILP_THRESHOLD,
        "sampled": sampled,
        "solved": solved,
        "replicas": ours,
        "fewest": fewest,
    }


def _frontier(situation: PlannerCase) -> list[dict[str, Any]]:
    """Balance against replica bytes as the threshold rises, two slots a rank."""
    curves: dict[str, list[Policy]] = {
        OWN: [Trimtab(PlanSettings(threshold=t)) for t in SWEEP],
        "trimtab": [Trimtab(PlanSettings(threshold=t)) for t in SWEEP],
        "ultraep": [replace(UltraEp(smallest_quota=SMALLEST_SHARE), threshold=t) for t in SWEEP],
        "llep": [Llep(max_tokens_factor=t, min_tokens_per_gemm=SMALLEST_SHARE, gate=1.0) for t in SWEEP],
    }
    points = []
    for name, policies in curves.items():
        equal_terms = name != OWN
        for threshold, policy in zip(SWEEP, policies, strict=True):
            view = make_view(
                policy,
                situation.sequences,
                situation.schedule,
                situation.contiguous if equal_terms else situation.warm,
                situation.cluster(2),
                token_budget=situation.token_budget,
                mini_batch=situation.mini_batch,
                equal_terms=equal_terms,
                past_counts_PLE=situation.past_counts_PLE,
            )
            plan = policy.plan(view)
            loads = plan.rank_loads(situation.workload(plan.schedule))
            points.append(
                {
                    "ranks": situation.ranks,
                    "experts": situation.experts,
                    "trace": situation.preset,
                    "curve": name,
                    "threshold": threshold,
                    "max_over_mean_mean": float(max_over_mean(loads).mean()),
                    "replica_bytes_per_instance": plan.num_replicas
                    / (plan.num_micro_steps * plan.num_layers)
                    * QWEN3_30B.expert_bytes,
                }
            )
    return points


def _compare_curves(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Replica bytes of every curve at one balance, and how far ours is above a rival's points at most."""
    curves: dict[str, tuple[Array, Array]] = {}
    for name in dict.fromkeys(point["curve"] for point in points):
        mine = [(p["replica_bytes_per_instance"], p["max_over_mean_mean"]) for p in points if p["curve"] == name]
        curves[name] = tuple(np.array(sorted(mine)).T)  # type: ignore[assignment]

    def bytes_at(name: str) -> float | None:
        moved, balance = curves[name]
        # From the right: as balance gets worse, fewer bytes are needed.
        falling, needed = np.minimum.accumulate(balance)[::-1], moved[::-1]
        return float(np.interp(COMPARED_BALANCE, falling, needed)) if falling[0] <= COMPARED_BALANCE else None

    def above(name: str) -> float:
        ours_moved, ours_balance = curves["trimtab"]
        moved, balance = curves[name]
        within = moved >= ours_moved[0]
        return float((np.interp(moved, ours_moved, ours_balance) - balance)[within].max(initial=-np.inf))

    first = points[0]
    return {
        "ranks": first["ranks"],
        "experts": first["experts"],
        "trace": first["trace"],
        "balance": COMPARED_BALANCE,
        "bytes_per_instance": {name: bytes_at(name) for name in curves},
        "trimtab_above": {name: above(name) for name in ("ultraep", "llep")},
    }


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Tables of all figures, for people."""
    cases = figures["cases"]
    keys = ("ranks", "experts", "trace", "slots", "terms")
    for key in dict.fromkeys(tuple(case[name] for name in keys) for case in cases):
        ranks, experts, trace, slots, terms = key
        recipe = "each on its own recipe" if terms == "own" else "equal terms: same homes, schedule and slots"
        console.print(
            _case_table(
                [case for case in cases if tuple(case[name] for name in keys) == key],
                f"{ranks} ranks, {experts} experts, {trace}, slots a rank: {slots}; {recipe}",
            )
        )
    console.print(_schedule_table(figures["schedule"]))
    if figures["frontier_compared"]:
        console.print(_frontier_table(figures["frontier_compared"]))
    for milp in figures["milp"]:
        over = milp["replicas"] / milp["fewest"] - 1 if milp["fewest"] else 0.0
        console.print(
            f"{milp['ranks']}/{milp['experts']} {milp['trace']}, {milp['homes']} homes: {milp['replicas']} replicas "
            f"for max/mean {milp['threshold']}, {milp['fewest']} are the fewest ({over:+.1%}; {milp['solved']} of "
            f"{milp['sampled']} instances)"
        )


def _case_table(cases: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("policy")
    for column in ("max/mean", "p99", "gap", "replicas", "far", "crossing", "ms", "us"):
        table.add_column(column, justify="right")
    for case in cases:
        gap = case["gap_to_bound_mean"]
        table.add_row(
            case["policy"],
            f"{case['max_over_mean_mean']:.3f}",
            f"{case['max_over_mean_p99']:.3f}",
            "" if gap is None else f"{gap:.1%}",
            f"{case['replicas_per_instance']:.1f}",
            f"{case['far_replicas_per_instance']:.1f}",
            f"{case['cross_node_token_fraction']:.1%}",
            f"{case['predicted_ms_per_instance']:.2f}",
            f"{case['us_per_instance']:.0f}",
            style="bold" if case["policy"] == "trimtab" else None,
        )
    table.caption = (
        "gap: over the LP bound; far: replicas on other nodes; crossing: rows between nodes; "
        "ms: predicted; us: planning; all of an instance"
    )
    return table


def _frontier_table(rows: list[dict[str, Any]]) -> Table:
    title = f"Replica weights for max/mean {COMPARED_BALANCE}, MB an instance; two slots a rank"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("case", "own homes", "trimtab", "ultraep", "llep", "above ultraep", "above llep"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        moved = [row["bytes_per_instance"][name] for name in (OWN, "trimtab", "ultraep", "llep")]
        table.add_row(
            f"{row['ranks']}/{row['experts']} {row['trace']}",
            *("never" if amount is None else f"{amount / 1e6:.0f}" for amount in moved),
            *(f"{row['trimtab_above'][name]:+.4f}" for name in ("ultraep", "llep")),
        )
    table.caption = "above: how much worse trimtab's max/mean is at the same bytes, where it is worst for trimtab"
    return table


def _schedule_table(rows: list[dict[str, Any]]) -> Table:
    title = "Sequences grouped by routing against packed by length, at the same homes"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("case", "time saved", "threshold", "replicas by length", "by routing", "search"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(
            f"{row['ranks']}/{row['experts']} {row['trace']}",
            f"{row['expert_time_saved']:.1%}",
            f"{row['threshold']}",
            f"{row['replicas_by_length']:.2f}",
            f"{row['replicas_by_routing']:.2f}",
            f"{row['seconds']:.2f} s",
        )
    return table
