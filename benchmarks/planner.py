"""`python -m benchmarks.planner`: all balancers on the same steps, with their own settings and with equal settings.

Plan synthetic steps with every balancer, on its own recipe and on equal terms (same homes, schedule and slots), and
compare the plans with LP bounds.

A case is a step of synthetic routing, the step before it, and a cluster.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks import planner_bounds as bounds
from benchmarks.harness import Figures, main, show
from benchmarks.plan_bounds import gap_to_bound
from benchmarks.tables import Cell, Columns, figure_table, quantity
from trimtab.array_type import Array
from trimtab.cli.options import add_options, given, positive
from trimtab.cli.parser import Parser
from trimtab.cluster import QWEN3_30B, ClusterSpec, StepCosts
from trimtab.planner import (
    Placement,
    PlanSettings,
    Schedule,
    SequenceCounts,
    StepPlan,
    Workload,
    pack_by_length,
    plan_sequences,
)
from trimtab.planner.plan.prediction import cross_node_rows, dense_times, plan_parts, predict
from trimtab.planner.plan.rank_work import even_work
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.policies import POLICIES, Llep, Policy, Taot, UltraEp, View, make_view
from trimtab.policies.trimtab import Trimtab
from trimtab.report.number_text import bytes_text, seconds
from trimtab.simulator.yardstick import yardstick
from trimtab.trace import PRESETS, synthesize_preset

RANKS_PER_NODE = 8
MICRO_STEPS = 8
TOKENS_PER_RANK = 4096
# At most a quarter of a rank's tokens, so that it has at least four sequences.
LONGEST = TOKENS_PER_RANK // 4
MEAN_LENGTH = 512
TOP_K = 8
# Token budget over the mean tokens per rank, as a fraction.
SLACK = 0.1
TIMED_ROUNDS = 5
# On equal terms all balancers have Trimtab's smallest share, and no threshold below which they don't balance.
EQUAL_TERMS: dict[str, Policy] = {
    "ultraep": UltraEp(smallest_quota=bounds.SMALLEST_SHARE),
    "taot": Taot(smallest_share=bounds.SMALLEST_SHARE),
    "llep": Llep(max_tokens_factor=1.0, min_tokens_per_gemm=bounds.SMALLEST_SHARE, gate=1.0),
}
CASE = "{ranks}/{experts} {trace}"
BALANCERS: Columns = {
    "policy": "{policy}",
    "max/mean": "{max_over_mean_mean:.3f}",
    "p99": "{max_over_mean_p99:.3f}",
    "gap": lambda row: "" if row["gap_to_bound_mean"] is None else f"{row['gap_to_bound_mean']:.1%}",
    "replicas": "{replicas_per_instance:.1f}",
    "far": "{far_replicas_per_instance:.1f}",
    "crossing": "{cross_node_token_fraction:.1%}",
    "predicted": quantity("predicted_ms_per_instance", seconds, 1e-3),
    "planning": quantity("us_per_instance", seconds, 1e-6),
}
SCHEDULES: Columns = {
    "case": CASE,
    "time saved": "{expert_time_saved:.1%}",
    "threshold": "{threshold}",
    "replicas by length": "{replicas_by_length:.2f}",
    "by routing": "{replicas_by_routing:.2f}",
    "search": quantity("seconds", seconds),
}


def _bytes(curve: str) -> Cell:
    def cell(row: Any) -> str:
        nbytes = row["bytes_per_instance"][curve]
        return "never" if nbytes is None else bytes_text(nbytes)

    return cell


FRONTIER: Columns = {
    "case": CASE,
    **{name: _bytes(name) for name in ("trimtab", *bounds.RIVALS)},
    **{f"above {name}": f"{{trimtab_above[{name}]:+.4f}}" for name in bounds.RIVALS},
}


@dataclass(frozen=True)
class PlannerBenchmark:
    """Cases to compare.

    Attributes:
        sizes: (ranks, experts) of each case.
        presets: routing of each case.
        slots: slots per rank that each case is planned with.
        policies: names of the balancers.
        layers: MoE layers.
        sampled: number of instances, evenly spread, whose LP bound is solved.
        sampled_milp: number of instances whose fewest replicas are solved, at the first size only.
        seed: of the routing.
    """

    sizes: tuple[tuple[int, int], ...] = ((8, 128), (16, 128), (32, 128), (64, 256))
    presets: tuple[str, ...] = ("qwen3-30b-math", "qwen3-30b-mixed")
    slots: tuple[int, ...] = (1, 2)
    policies: tuple[str, ...] = tuple(POLICIES)
    layers: int = 8
    sampled: int = 16
    sampled_milp: int = 24
    seed: int = 0


EXAMPLES = ("--sizes 8/128 --preset qwen3-30b-mixed --json out/bench-planner.json",)


def add_to(parser: Parser) -> None:
    """Add the options."""
    option = partial(add_options, parser, of=PlannerBenchmark)
    sizes = [f"{ranks}/{experts}" for ranks, experts in PlannerBenchmark.sizes]
    option("--sizes", type=_size, nargs="+", metavar="SIZE", unset=" ".join(sizes), help="cases, as ranks/experts")
    option("--preset", nargs="+", dest="presets", choices=tuple(PRESETS))
    option("--slots", type=positive, nargs="+")
    option("--policy", nargs="+", dest="policies", choices=tuple(POLICIES), unset="all")
    option("--layers", "--seed")
    add_options(parser, "--frontier", type=Path, help="draw balance against bytes to FILE (.svg)")


def _size(text: str) -> tuple[int, int]:
    ranks, _, experts = text.partition("/")
    try:
        return positive(ranks), positive(experts)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} should be ranks/experts, such as 8/128") from None


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
    settings = PlannerBenchmark(**given(options, PlannerBenchmark))
    for ranks, experts in settings.sizes:
        Placement.contiguous(1, experts, ranks)
    figures = run_benchmark(settings, frontier=options.frontier is not None)
    if options.frontier:
        bounds.draw_frontier(figures["frontier"], options.frontier)
    show(figures, print_figures, options.json)


def run_benchmark(settings: PlannerBenchmark, *, frontier: bool) -> Figures:
    """All figures, as `--json` writes them; those of the frontier only if asked for."""
    sizes = {"micro_steps": MICRO_STEPS, "tokens_per_rank": TOKENS_PER_RANK, "longest": LONGEST, "slack": SLACK}
    lists = ("cases", "schedule", "milp", "frontier", "frontier_compared")
    figures: Figures = {
        "schema": "trimtab-bench-planner-1",
        "yardstick": yardstick(),
        "settings": asdict(settings) | sizes,
        **{name: [] for name in lists},
    }
    cases = [(*size, preset) for size in settings.sizes for preset in settings.presets]
    with Progress(transient=True) as progress:
        task = progress.add_task("bench planner", total=len(cases) * len(settings.slots) * len(settings.policies) * 2)
        for ranks, experts, preset in cases:
            case = build_case(ranks, experts, preset, layers=settings.layers, seed=settings.seed)
            figures["schedule"] += bounds.schedule_figures(case)
            if (ranks, experts) == settings.sizes[0] and settings.sampled_milp:
                for homes in ("contiguous", "own"):
                    figures["milp"].append(bounds.milp_figures(case, homes, settings.sampled_milp))
            if frontier:
                points = bounds.frontier_points(case)
                figures["frontier"] += points
                figures["frontier_compared"].append(case.key | bounds.compare_curves(points))
            for slots in settings.slots:
                for equal_terms in (False, True):
                    for name in settings.policies:
                        figures["cases"].append(balancer_figures(case, name, slots, equal_terms, settings.sampled))
                        progress.advance(task)
    return figures


@dataclass(frozen=True, eq=False)
class PlannerCase:
    """One case of the benchmark.

    Attributes:
        ranks, experts: sizes.
        preset: of the routing.
        sequences: of the step to plan.
        schedule: of the step, packed by length.
        workload_before: of the last step, packed by length.
        contiguous: contiguous homes.
        warm: the homes that Trimtab's plan of the last step leaves.
        token_budget: most tokens of a rank in a micro-step.
        mini_batch: `[S]` mini-batch of each sequence.
        past_counts_PLE: `[1, L, E]` int64, the last step's tokens by layer and expert.
    """

    ranks: int
    experts: int
    preset: str
    sequences: SequenceCounts
    schedule: Schedule
    workload_before: Workload
    contiguous: Placement
    warm: Placement
    token_budget: int
    mini_batch: Array
    past_counts_PLE: Array

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the case in figures."""
        return {"ranks": self.ranks, "experts": self.experts, "trace": self.preset}

    def cluster(self, slots: int) -> ClusterSpec:
        """The cluster with `slots` slots per rank."""
        return ClusterSpec(self.ranks, min(self.ranks, RANKS_PER_NODE), slots)

    def workload(self, schedule: Schedule) -> Workload:
        """The step's workload under a schedule."""
        return Workload.from_sequences(self.sequences, schedule)

    def view(self, policy: Policy, placement: Placement, slots: int, *, equal_terms: bool) -> View:
        """The input of a policy that starts from `placement`."""
        return make_view(
            policy, self.sequences, self.schedule, placement, self.cluster(slots), token_budget=self.token_budget,
            mini_batch=self.mini_batch, equal_terms=equal_terms, past_counts_PLE=self.past_counts_PLE,
        )  # fmt: skip


def build_case(ranks: int, experts: int, preset: str, *, layers: int, seed: int) -> PlannerCase:
    """Draw two steps of a preset: 8 micro-steps of 4,096 tokens per rank on average, at least 4 sequences each.

    In the spike preset every block of sequences is a mini-batch, so that every micro-step is one block.
    """
    per_step = ranks * MICRO_STEPS * TOKENS_PER_RANK // MEAN_LENGTH
    trace = synthesize_preset(
        PRESETS[preset], num_sequences=per_step, mean_length=MEAN_LENGTH, max_length=LONGEST, num_layers=layers,
        num_experts=experts, top_k=TOP_K, num_steps=2, seed=seed,
    )  # fmt: skip
    counted = SequenceCounts.from_trace(trace)
    before, sequences = (counted.select(np.flatnonzero(trace.steps == step)) for step in (0, 1))
    most = max(int(part.lengths.sum()) for part in (before, sequences))
    token_budget = math.ceil(most / (ranks * MICRO_STEPS) * (1 + SLACK))
    mini_batch = np.zeros(per_step, np.int64)
    if PRESETS[preset].spikes:
        mini_batch = np.arange(per_step) * MICRO_STEPS // per_step
        token_budget = math.ceil(token_budget * (1 + SLACK))
    contiguous = Placement.contiguous(layers, experts, ranks)
    cluster = ClusterSpec(ranks, min(ranks, RANKS_PER_NODE))
    planned = plan_sequences(before, contiguous, cluster, token_budget=token_budget, mini_batch=mini_batch)

    def packed(counts: SequenceCounts) -> Schedule:
        return pack_by_length(counts.lengths, num_ranks=ranks, token_budget=token_budget, mini_batch=mini_batch)

    return PlannerCase(
        ranks, experts, preset, sequences, packed(sequences),
        workload_before=Workload.from_sequences(before, packed(before)), contiguous=contiguous, warm=planned.placement,
        token_budget=token_budget, mini_batch=mini_batch,
        past_counts_PLE=before.counts_SLE.sum(axis=0, dtype=np.int64)[None],
    )  # fmt: skip


def balancer_figures(case: PlannerCase, name: str, slots: int, equal_terms: bool, sampled: int) -> Figures:
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


def print_figures(figures: Figures, console: Console) -> None:
    """Print one table per case and terms, and those of schedules, frontier and fewest replicas."""
    console.print(f"presets, other balancers and planning times of yardstick {figures['yardstick']}")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in figures["cases"]:
        key = tuple(case[name] for name in ("ranks", "experts", "trace", "slots", "terms"))
        groups.setdefault(key, []).append(case)
    for (ranks, experts, trace, slots, terms), cases in groups.items():
        recipe = "each on its own recipe" if terms == "own" else "equal terms: same homes, schedule and slots"
        title = f"{ranks} ranks, {experts} experts, {trace}, slots per rank: {slots}; {recipe}"
        caption = (
            "gap: over the LP bound; far: replicas on other nodes; crossing: rows between nodes; "
            "predicted, planning: time of the instance and of its planning; all per instance"
        )
        console.print(figure_table(title, BALANCERS, cases, bold="trimtab", caption=caption))
    title = "Sequences grouped by routing against packed by length, at the same homes"
    console.print(figure_table(title, SCHEDULES, figures["schedule"]))
    if figures["frontier_compared"]:
        title = f"Replica weights for max/mean {bounds.COMPARED_BALANCE}, per instance; two slots per rank"
        caption = "above: the largest excess of trimtab's max/mean over the rival's at the same bytes"
        console.print(figure_table(title, FRONTIER, figures["frontier_compared"], caption=caption))
    for milp in figures["milp"]:
        over = milp["replicas"] / milp["fewest"] - 1 if milp["fewest"] else 0.0
        text = (
            "{ranks}/{experts} {trace}, {homes} homes: {replicas} replicas for max/mean {threshold}, {fewest} are the "
            "fewest ({over:+.1%}; {solved} of {sampled} instances)"
        )
        console.print(text.format(**milp, over=over))


if __name__ == "__main__":
    main("benchmarks.planner")
