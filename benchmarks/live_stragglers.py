"""Stragglers of balancers that choose from live counts, as in FEPLB's tables: in tokens, and in seconds of products.

The straggler of an instance is what the busiest rank has above the mean of all ranks; of several instances, the sum of
these divided by the sum of the means. A cut of 60% means that the rest is 40% of the straggler without balancing.

For the products, ranks run one after another on one thread; the time is the thread's CPU time, so that other processes
hardly change it. Each rank runs the experts of its homes, and then those of its replicas. Balancers:

* `fastermoe`: shadows of FasterMoE, from the counts of the layer; its own recipe, without a limit of memory.
* `feplb`, `quota`: the live policies of the runtime, from the counts of the layer.
* `feplb, fixed`: the same as `feplb`, with the first experts of every rank as dynamic ones, not the hottest of the
  micro-step before.
* `foresight`: Trimtab's plan from the whole step's recorded routing: schedule, homes, replicas and split.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.planner import PlannerCase, build_case
from benchmarks.tables import Columns, figure_table, interval, quantity
from trimtab.array_type import Array
from trimtab.calibration.measurement import random_experts, run_experts
from trimtab.cluster import QWEN3_30B, ModelSpec
from trimtab.planner import PlanSettings, StepPlan
from trimtab.policies import FasterMoe
from trimtab.policies.policy import Policy
from trimtab.policies.trimtab import Trimtab
from trimtab.report.number_text import bytes_text
from trimtab.runtime import RowGroups
from trimtab.runtime.live.balancer import LiveBalancer, LivePolicy
from trimtab.runtime.program.physical_experts import InstanceReplicas
from trimtab.runtime.state.home_experts import HomeExperts

if TYPE_CHECKING:
    from benchmarks.live import LiveBenchmark

LIVE: tuple[LivePolicy, ...] = ("feplb", "quota")
BEFORE = "before"
FIXED = "feplb, fixed"
# The least of so many times is used.
REPEATS = 3
# FEPLB's abstract and tables, over EP 2 to 8.
PUBLISHED = {"token_straggler_cut": (0.51, 0.70), "gemm_straggler_cut": (0.50, 0.68)}
STRAGGLERS: Columns = {
    "ranks": "{ranks}",
    "balancer": "{policy}",
    "tokens before": "{token_straggler_before:.1%}",
    "after": "{token_straggler:.1%}",
    "cut": "{token_straggler_cut:.0%}",
    "of all cases": interval("token_straggler_cut_range", "{:.0%}"),
    "GEMM before": "{gemm_straggler_before:.1%}",
    "after ": "{gemm_straggler:.1%}",
    "cut ": "{gemm_straggler_cut:.0%}",
    "of all cases ": interval("gemm_straggler_cut_range", "{:.0%}"),
}
TRAFFIC: Columns = {
    "ranks": "{ranks}",
    "balancer": "{policy}",
    "replicas": "{replicas:.1f}",
    "weights": quantity("weight_bytes", bytes_text),
    "rows": lambda row: f"{row['row_bytes'] / 1e6:+.0f} MB",
}
KNOWN = (
    "fastermoe (our reimplementation, without a limit of memory), feplb and quota choose from the counts of the layer; "
    "foresight plans the whole step from recorded routing. Straggler: the busiest rank above the mean of ranks, as a "
    "part of the mean."
)
REASONS = (
    "Reasons: the published figures are of the authors' own training routing, whose skew, rows of a micro-step and "
    "fewest rows of a move are not published. Here routing is synthetic, and dynamic experts are the hottest of the "
    "micro-step before, which stay hot; with fixed ones (feplb, fixed) cuts are smaller. GEMM stragglers include the "
    "time of smaller and additional products, and noise of some percent, which limits cuts where ranks differ little."
)


@dataclass(frozen=True, eq=False)
class ChosenInstance:
    """The replicas of one instance, whatever chose them.

    Attributes:
        counts_RE: `[R, E]` int64 rows by source rank and expert.
        home_E: `[E]` home ranks.
        replicas: with their rows by source rank.
        moves: whether rows of replicas are sent from their homes, after the dispatch.
    """

    counts_RE: Array
    home_E: Array
    replicas: InstanceReplicas
    moves: bool = False

    @property
    def computed_RE(self) -> Array:
        """`[R, E]` int64, rows of each expert that each rank computes."""
        computed_RE = np.zeros_like(self.counts_RE)
        experts, ranks = self.replicas.experts, self.replicas.ranks
        tokens_P = self.replicas.quotas_PR.sum(axis=1)
        computed_RE[self.home_E, np.arange(len(self.home_E))] = self.counts_RE.sum(axis=0)
        np.subtract.at(computed_RE, (self.home_E[experts], experts), tokens_P)
        np.add.at(computed_RE, (ranks, experts), tokens_P)
        return computed_RE

    @property
    def sent_rows(self) -> int:
        """Rows that the dispatch sends to another rank, and those that leave their home again."""
        experts, ranks, quotas_PR = self.replicas.experts, self.replicas.ranks, self.replicas.quotas_PR
        at_home_RE = self.home_E == np.arange(len(self.counts_RE))[:, None]
        sent = int(self.counts_RE[~at_home_RE].sum())
        if self.moves:
            return sent + int(quotas_PR.sum())
        # A replica's rows are sent to it at once.
        away_PR = ranks[:, None] != np.arange(len(self.counts_RE))
        from_home_PR = self.home_E[experts][:, None] != np.arange(len(self.counts_RE))
        return sent + int(quotas_PR[away_PR].sum()) - int(quotas_PR[from_home_PR].sum())


def choose_all(case: PlannerCase, settings: LiveBenchmark) -> dict[str, list[ChosenInstance]]:
    """The instances of a step by balancer, and `before` without any.

    The first micro-step is left out: it is the past of `feplb`.
    """
    counts_MLRE = case.workload(case.schedule).token_counts_MLRE.astype(np.int64)
    chosen = {BEFORE: _live(case, counts_MLRE, "off", settings), "fastermoe": _planned(case, FasterMoe(), settings)}
    chosen |= {policy: _live(case, counts_MLRE, policy, settings) for policy in LIVE}
    chosen[FIXED] = _live(case, counts_MLRE, "feplb", settings, forgets=True)
    chosen["foresight"] = _planned(case, Trimtab(), settings)
    return chosen


def slots_of(policy: str, settings: LiveBenchmark) -> int | None:
    """Slots of a rank; None without a limit."""
    special = {BEFORE: 0, "fastermoe": None, "feplb": settings.feplb_slots, FIXED: settings.feplb_slots}
    return special.get(policy, settings.slots)


def _live(
    case: PlannerCase, counts_MLRE: Array, policy: LivePolicy, settings: LiveBenchmark, *, forgets: bool = False
) -> list[ChosenInstance]:
    """The choices of the runtime, micro-step by micro-step; `forgets`: without a past."""
    slots = settings.feplb_slots if policy == "feplb" else settings.slots
    limits = PlanSettings().limits(case.cluster(slots))
    home_LE = case.contiguous.home
    layers = layers_of(home_LE)
    balancer = LiveBalancer(policy, layers, limits)
    chosen = []
    for micro_step, counts_LRE in enumerate(counts_MLRE):
        if forgets:
            balancer = LiveBalancer(policy, layers, limits)
        for layer, counts_RE in enumerate(counts_LRE):
            call = balancer.choose(layer, counts_RE)
            if micro_step:
                chosen.append(ChosenInstance(counts_RE, home_LE[layer], call.replicas, call.moves))
    return chosen


def layers_of(home_LE: Array) -> list[HomeExperts]:
    """Layers on rank 0 with these homes, and experts of one number."""

    def layer_of(index: int, home_E: Array) -> HomeExperts:
        weights = [torch.nn.Parameter(torch.zeros(int(np.count_nonzero(home_E == 0)), 1))]
        return HomeExperts(index, lambda: weights, rank=0, home_E=home_E)

    return [layer_of(index, home_E) for index, home_E in enumerate(home_LE)]


def _planned(case: PlannerCase, policy: Policy, settings: LiveBenchmark) -> list[ChosenInstance]:
    """The instances of a policy's plan, on its own recipe."""
    placement = case.warm if policy.traits.relocates else case.contiguous
    plan: StepPlan = policy.plan(case.view(policy, placement, settings.slots, equal_terms=False))
    counts_MLRE = case.workload(plan.schedule).token_counts_MLRE.astype(np.int64)
    return [
        ChosenInstance(counts_RE, plan.home[layer], InstanceReplicas.of(plan, micro_step, layer))
        for micro_step, counts_LRE in enumerate(counts_MLRE)
        for layer, counts_RE in enumerate(counts_LRE)
        if micro_step
    ]


def straggler_cases(settings: LiveBenchmark) -> list[dict[str, Any]]:
    """Figures by number of ranks, preset, seed and balancer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    for ranks, preset, seed in track(settings.straggler_routings, "bench live: stragglers", transient=True):
        case = build_case(ranks, settings.experts, preset, layers=settings.straggler_layers, seed=seed)
        chosen = choose_all(case, settings)
        tokens = {name: straggler([each.computed_RE.sum(axis=1) for each in all_]) for name, all_ in chosen.items()}
        gemms = gemm_stragglers(chosen, settings)
        sent_before = statistics.fmean([each.sent_rows for each in chosen[BEFORE]])
        for name, instances in chosen.items():
            if name == BEFORE:
                continue
            figures = {
                "ranks": ranks,
                "preset": preset,
                "seed": seed,
                "policy": name,
                "slots": slots_of(name, settings),
            }
            for kind, stragglers in (("token", tokens), ("gemm", gemms)):
                figures |= {
                    f"{kind}_straggler_before": stragglers[BEFORE],
                    f"{kind}_straggler": stragglers[name],
                    f"{kind}_straggler_cut": 1 - stragglers[name] / stragglers[BEFORE],
                }
            found.append(figures | _traffic(instances, sent_before))
    torch.set_num_threads(threads)
    return found


def straggler(loads: Sequence[Array]) -> float:
    """What the busiest ranks have above the mean, as a part of the mean, over instances `[R]`."""
    return float(sum(load_R.max() - load_R.mean() for load_R in loads) / sum(load_R.mean() for load_R in loads))


def gemm_stragglers(chosen: Mapping[str, Sequence[ChosenInstance]], settings: LiveBenchmark) -> dict[str, float]:
    """Stragglers in CPU seconds of expert products, over some instances, the balancers in turn."""
    model = ModelSpec("bench-live", settings.experts, 1, settings.gemm_hidden, settings.gemm_width)
    stacks = random_experts(model, settings.experts, torch.float32, torch.device("cpu"))
    most = max(int(each.computed_RE.sum(axis=1).max()) for all_ in chosen.values() for each in all_)
    rows = torch.randn(most, settings.gemm_hidden)
    seconds: dict[str, list[Array]] = {name: [] for name in chosen}
    for sample in range(settings.gemm_instances):
        taken = {name: all_[sample * len(all_) // settings.gemm_instances] for name, all_ in chosen.items()}
        times = {name: np.full((REPEATS, len(each.counts_RE)), np.inf) for name, each in taken.items()}
        _rank_seconds(taken[BEFORE], stacks, rows)
        for repeat in range(REPEATS):
            for name, each in taken.items():
                times[name][repeat] = _rank_seconds(each, stacks, rows)
        for name, times_NR in times.items():
            seconds[name].append(times_NR.min(axis=0))
    return {name: straggler(loads) for name, loads in seconds.items()}


def _rank_seconds(instance: ChosenInstance, stacks: list[torch.Tensor], rows: torch.Tensor) -> Array:
    """CPU seconds `[R]` of each rank's products, the ranks one after another."""
    computed_RE = instance.computed_RE
    seconds_R = np.empty(len(computed_RE))
    for rank, computed_E in enumerate(computed_RE):
        at_home = instance.home_E == rank
        parts = [computed_E[at_home], computed_E[~at_home & (computed_E > 0)]]
        start = time.thread_time()
        for counts_G in parts:
            if len(counts_G):
                groups = RowGroups.on_host(counts_G)
                run_experts([stack[: len(counts_G)] for stack in stacks], rows[: counts_G.sum()], groups)
        seconds_R[rank] = time.thread_time() - start
    return seconds_R


def _traffic(instances: Sequence[ChosenInstance], sent_before: float) -> dict[str, float]:
    """What a forward of an instance sends in addition, of all ranks, with the sizes of Qwen3-30B-A3B in bf16: means.

    Returns:
        `replicas`, and `used_replicas`, those with rows; `weight_bytes` of all replicas; `row_bytes`, of rows in
        dispatch and combine, below 0 if fewer rows leave their rank than without balancing.
    """
    used = statistics.fmean([int(np.count_nonzero(each.replicas.quotas_PR.sum(axis=1))) for each in instances])
    replicas = statistics.fmean([each.replicas.count for each in instances])
    extra_rows = statistics.fmean([each.sent_rows for each in instances]) - sent_before
    row_bytes = QWEN3_30B.hidden_size * QWEN3_30B.weight_bytes
    return {
        "replicas": replicas,
        "used_replicas": used,
        "weight_bytes": replicas * QWEN3_30B.expert_bytes,
        "row_bytes": 2 * extra_rows * row_bytes,
    }


def summarise_cases(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each number of ranks and balancer: medians, least and greatest cuts over presets and seeds."""
    names = (
        "token_straggler_before", "token_straggler", "token_straggler_cut", "gemm_straggler_before", "gemm_straggler",
        "gemm_straggler_cut", "replicas", "weight_bytes", "row_bytes",
    )  # fmt: skip
    rows = []
    for row, mine in _medians(cases, "policy", names):
        for name, (low, high) in PUBLISHED.items():
            values = [case[name] for case in mine]
            row[f"{name}_range"] = [min(values), max(values)]
            row[f"{name}_in_published_range"] = sum(low <= value <= high for value in values) / len(values)
        rows.append(row)
    return rows


def _medians(
    cases: Sequence[Mapping[str, Any]], kind: str, names: Sequence[str]
) -> Iterator[tuple[dict[str, Any], list[Mapping[str, Any]]]]:
    """For each number of ranks and value of `kind`: medians over presets and seeds, and the cases."""
    groups: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for case in cases:
        groups.setdefault((case["ranks"], case[kind]), []).append(case)
    for (ranks, value), mine in groups.items():
        medians = {name: statistics.median(case[name] for case in mine) for name in names}
        yield {"ranks": ranks, kind: value, **medians}, mine


def print_stragglers(figures: Mapping[str, Any], console: Console) -> None:
    """Print stragglers with what they cost, and where they differ from FEPLB's."""
    console.print(figure_table("Stragglers: medians over presets and seeds", STRAGGLERS, figures["summary"]))
    console.print(KNOWN)
    for line in differences(figures["summary"]):
        console.print(line)
    title = "In addition to a forward without balancing: of an instance, all ranks, Qwen3-30B-A3B in bf16"
    console.print(figure_table(title, TRAFFIC, figures["summary"]))


def differences(summary: list[dict[str, Any]]) -> list[str]:
    """Where the figures of `feplb` are not the published ones, and why."""
    lines = []
    by_key = {(row["ranks"], row["policy"]): row for row in summary}
    for (ranks, policy), row in by_key.items():
        if policy != "feplb":
            continue
        for name, (low, high) in PUBLISHED.items():
            value, kind = row[name], name.split("_")[0]
            if not low <= value <= high:
                side = "more" if value > high else "less"
                lines.append(
                    f"feplb at EP {ranks}: {kind} straggler cut by {value:.0%}, {side} than the published "
                    f"{low:.0%} to {high:.0%}"
                )
        if ranks == 8 and (8, "fastermoe") in by_key:
            ratio = row["token_straggler"] / by_key[8, "fastermoe"]["token_straggler"]
            lines.append(f"feplb at EP 8: {ratio:.2f} of the token straggler of fastermoe; published: 0.5")
    if lines:
        lines.append(REASONS)
    return lines
