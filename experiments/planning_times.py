"""`python -m experiments.planning_times`: the planning times that balancers are charged.

Measure planning times of Trimtab and of our implementations of other balancers, all in one run. The simulator charges
them.
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.harness import Figures, main
from benchmarks.tables import Columns, Row, figure_table
from trimtab.array_type import Array
from trimtab.cli.options import add_options
from trimtab.cli.parser import Parser
from trimtab.cluster import QWEN3_30B, ClusterSpec, StepCosts
from trimtab.planner import Placement, Schedule, SequenceCounts, budget_for, pack_by_length
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.step_planning import StepPlanning
from trimtab.planner.plan.strategy import STEP
from trimtab.planner.plan.strategy_choice import MOVE_PENALTY, choose_strategy
from trimtab.planner.replicas.paths import choose_paths
from trimtab.planner.replicas.replica_table import ReplicaTable, starts_of
from trimtab.planner.schedule.time_packing import pack_by_time
from trimtab.policies import POLICIES, Policy, View, make_view
from trimtab.policies.planning_time import MEASURED, TimeAtSize
from trimtab.policies.rivals.eplb import EplbOracle, place_copies
from trimtab.policies.rivals.foremoe import ForeMoe
from trimtab.policies.rivals.greedy import replicate
from trimtab.policies.rivals.lpt_homes import level_homes
from trimtab.policies.rivals.relibra import ReLibra
from trimtab.policies.rivals.routepack import RoutePack
from trimtab.policies.trimtab import Trimtab
from trimtab.trace import PRESETS, synthesize_preset

EXAMPLES = ("--json src/trimtab/policies/planning_times.json",)
SCHEMA = "trimtab-planning-times-2"
PRESET, TOKENS_PER_RANK, MEAN_LENGTH, SLOTS, RANKS_PER_NODE = "qwen3-30b-math", 4096, 1024, 2, 8
OWN_SLOTS = 8
SIZES = ((8, 128), (16, 128), (32, 128), (64, 256), (128, 256))
"""Ranks and experts."""
MICRO_STEPS, LAYERS = (4, 16), (8, 16)
"""Each of a small and of a large step; Trimtab's sample is as large in both."""
COUNTED_LENGTH = 8192
"""Tokens of the sequence whose counting is timed."""


@dataclass(frozen=True, eq=False)
class Step:
    """A step to plan, after an earlier one."""

    cluster: ClusterSpec
    sequences: SequenceCounts
    earlier: SequenceCounts
    token_budget: int

    @classmethod
    def draw(cls, ranks: int, experts: int, micro_steps: int, layers: int) -> Step:
        """A step of the preset, with about 4,096 tokens per rank and micro-step."""
        trace = synthesize_preset(
            PRESETS[PRESET],
            num_sequences=ranks * micro_steps * TOKENS_PER_RANK // MEAN_LENGTH,
            mean_length=MEAN_LENGTH,
            max_length=4 * MEAN_LENGTH,
            num_layers=layers,
            num_experts=experts,
            num_steps=2,
        )
        counted = SequenceCounts.from_trace(trace)
        earlier, sequences = (counted.select(np.flatnonzero(trace.steps == step)) for step in (0, 1))
        cluster = ClusterSpec(ranks, min(ranks, RANKS_PER_NODE), SLOTS)
        budget = budget_for((sequences.lengths, earlier.lengths), ranks, micro_steps)
        return cls(cluster, sequences, earlier, budget)

    def view(self, policy: Policy) -> View:
        """The input of a policy. Trimtab and others that move homes start from contiguous ones.

        Trimtab has most work: rows are sent one by one, and there are many slots.
        """
        cluster = self.cluster
        if isinstance(policy, Trimtab):
            cluster = replace(cluster, slots_per_rank=OWN_SLOTS, dispatch_forwards=False)
        schedule = pack_by_length(self.sequences.lengths, num_ranks=self.cluster.ranks, token_budget=self.token_budget)
        homes = Placement.contiguous(self.sequences.num_layers, self.sequences.num_experts, self.cluster.ranks)
        past_PLE = self.earlier.counts_SLE.sum(axis=0, dtype=np.int64)[None]
        return make_view(
            policy,
            self.sequences,
            schedule,
            homes,
            cluster,
            token_budget=self.token_budget,
            past_counts_PLE=past_PLE,
        )


@dataclass
class Parts:
    """Microseconds of processor time by part of planning, of one planned step."""

    us: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the time of its block. Time of a processor, so that other processes of the machine don't count."""
        start = time.process_time()
        yield
        self.us[part] += (time.process_time() - start) * 1e6


class Planned(NamedTuple):
    """A planned step: schedule, homes `[L, E]`, and the replicas of every micro-step, if a balancer has some."""

    schedule: Schedule
    home_LE: Array
    rounds: list[ReplicaTable]


def plan_trimtab(policy: Trimtab, view: View, parts: Parts) -> Planned:
    """Plans a step as the runtime does, by parts."""
    sequences, cluster, budget = view.sequences, view.cluster, view.token_budget
    costs = StepCosts.of(cluster, QWEN3_30B)
    with parts.timed("schedule"):
        packed = pack_by_length(sequences.lengths, num_ranks=cluster.ranks, token_budget=budget)
        schedule = pack_by_time(packed, sequences.lengths, sequences.top_k, cluster, costs, budget)
    loads = StepLoads.of_sequences(sequences, schedule, cluster.ranks)
    planning = StepPlanning(loads, view.placement, cluster, policy.settings, costs, view.past_counts_PLE, threads=1)
    with parts.timed("choice"):
        choice = choose_strategy(planning, may_move=True)
    # Homes are improved, whatever the choice.
    strategy = replace(choice.strategy, homes=STEP, move_penalty=MOVE_PENALTY)
    with parts.timed("homes"):
        homes = planning.homes(strategy, planning.micro_steps, planning.layers)

    def plan_slice(micro_step: int, layers: Array) -> ReplicaTable:
        mine = [homes[layer] for layer in layers]
        (table,) = planning.plan(strategy, np.array([micro_step]), layers, homes=mine).replicas
        return table

    return Planned(schedule, np.stack(homes), plan_rounds(plan_slice, schedule, np.stack(homes), cluster, parts))


def plan_relibra(policy: ReLibra, view: View, parts: Parts) -> Planned:
    with parts.timed("homes"):
        placement = policy.reorder(view)
    return plan_greedy_rounds(policy, view, placement, parts, within_node=True)


def plan_foremoe(policy: ForeMoe, view: View, parts: Parts) -> Planned:
    cluster, loads_LE = view.cluster, view.sequences.counts_SLE.sum(axis=0, dtype=np.int64)
    with parts.timed("homes"):
        home_LE = level_homes(
            loads_LE, view.placement.home, cluster.ranks, cluster.ranks_per_node, policy.smallest_gain or 0.0
        )
    return plan_greedy_rounds(policy, view, Placement(home_LE), parts, within_node=False)


def plan_eplb(policy: EplbOracle, view: View, parts: Parts) -> Planned:
    """Homes and copies only: the split of tokens over copies follows the live routing and is not planned."""
    loads_LE = view.sequences.counts_SLE.sum(axis=0, dtype=np.int64)
    with parts.timed("homes"):
        placement, _ = place_copies(view, loads_LE)
    return Planned(view.schedule, placement.home, [])


def plan_routepack(policy: RoutePack, view: View, parts: Parts) -> Planned:
    ranks, loads_LE = view.cluster.ranks, view.sequences.counts_SLE.sum(axis=0, dtype=np.int64)
    with parts.timed("homes"):
        placement = Placement(level_homes(loads_LE, view.placement.home, ranks, ranks, policy.smallest_gain))
    with parts.timed("schedule"):
        schedule = policy.pack(view, placement)
    return Planned(schedule, placement.home, [])


PLANNERS: dict[str, Callable[[Any, View, Parts], Planned]] = {
    "trimtab": plan_trimtab,
    "relibra": plan_relibra,
    "foremoe": plan_foremoe,
    "eplb_oracle": plan_eplb,
    "routepack": plan_routepack,
}
"""Plans a step with a balancer, and times the parts of planning that it has."""


def plan_greedy_rounds(
    policy: ReLibra | ForeMoe, view: View, placement: Placement, parts: Parts, *, within_node: bool
) -> Planned:
    """Rounds of the balancers that place replicas by the incremental greedy."""
    loads = StepLoads.of_sequences(view.sequences, view.schedule, view.cluster.ranks)
    home_LE = placement.home.astype(np.int64)

    def plan_slice(micro_step: int, layers: Array) -> ReplicaTable:
        (load,) = loads.count(np.array([micro_step]), layers)
        replicas, quotas = [], []
        for place, layer in enumerate(layers):
            counts_RE = load.token_counts_MLRE[0, place].astype(np.int64)
            replicas_P2, quotas_PR = replicate(
                counts_RE, home_LE[layer], view.cluster,
                within_node=within_node, threshold=policy.threshold, smallest_share=policy.smallest_share,
            )  # fmt: skip
            used_P = quotas_PR.sum(axis=1) > 0
            replicas.append(replicas_P2[used_P])
            quotas.append(quotas_PR[used_P])
        return ReplicaTable.from_instances(replicas, quotas, view.cluster.ranks)

    tables = plan_rounds(plan_slice, view.schedule, placement.home, view.cluster, parts)
    return Planned(view.schedule, placement.home, tables)


def plan_rounds(
    plan_slice: Callable[[int, Array], ReplicaTable],
    schedule: Schedule,
    home_LE: Array,
    cluster: ClusterSpec,
    parts: Parts,
) -> list[ReplicaTable]:
    """Replicas and split of every micro-step, in slices of as many layers as one rank plans; then they are joined.

    Args:
        plan_slice: from a micro-step and `[N]` layers to their replicas.
    """
    num_layers = len(home_LE)
    blocks = np.split(np.arange(num_layers), range(0, num_layers, -(-num_layers // cluster.ranks))[1:])
    tables = []
    for micro_step in range(schedule.num_micro_steps):
        with parts.timed("instance"):
            slices = [plan_slice(micro_step, layers) for layers in blocks]
        with parts.timed("join"):
            joined = join_slices(slices)
            choose_paths(home_LE, joined, cluster)
        tables.append(joined)
    return tables


def join_slices(slices: Sequence[ReplicaTable]) -> ReplicaTable:
    """The instances of several tables, one after another."""
    replica_starts, quota_starts = (
        starts_of(np.concatenate([np.diff(getattr(table, name)) for table in slices]))
        for name in ("replica_starts", "quota_starts")
    )
    experts, ranks, sources, tokens = (
        np.concatenate([getattr(table, name) for table in slices]) for name in ("experts", "ranks", "sources", "tokens")
    )
    return ReplicaTable(replica_starts, experts, ranks, quota_starts, sources, tokens)


def run_benchmark(rounds: int = 3, max_ranks: int = 128) -> dict[str, Any]:
    """Planning times of all balancers whose time is measured, as `--json` writes them.

    The times of `TimeAtSize` follow from four steps, with few and many micro-steps and layers. Times of a step's parts
    are medians of the rounds, in which balancers alternate.

    Args:
        rounds: timed plans of every step, after one that is not timed at every size.
        max_ranks: largest size.
    """
    names = [name for name, policy in POLICIES.items() if policy.traits.planning.source == MEASURED]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    chosen = [size for size in SIZES if size[0] <= max_ranks]
    for ranks, experts in track(chosen, "planning times", transient=True):
        # Microseconds of each part in every round, by micro-steps and layers.
        us: dict[str, dict[tuple[int, int], list[dict[str, float]]]] = {name: {} for name in names}
        for asked, layers in itertools.product(MICRO_STEPS, LAYERS):
            step = Step.draw(ranks, experts, asked, layers)
            untimed = 0 if us[names[0]] else 1
            for number, name in itertools.product(range(untimed + rounds), names):
                parts = Parts()
                planned = PLANNERS[name](POLICIES[name], step.view(POLICIES[name]), parts)
                if number >= untimed:
                    us[name].setdefault((planned.schedule.num_micro_steps, layers), []).append(parts.us)
        for name in names:
            medians = {
                size: {part: statistics.median(each[part] for each in every) for part in every[0]}
                for size, every in us[name].items()
            }
            found[name].append({"ranks": ranks} | fit_parts(medians))
    settings = {
        "preset": PRESET, "layers": LAYERS, "micro_steps": MICRO_STEPS, "tokens_per_rank": TOKENS_PER_RANK,
        "slots": SLOTS, "own_slots": OWN_SLOTS, "experts": dict(chosen), "rounds": rounds,
    }  # fmt: skip
    return {
        "schema": SCHEMA,
        "machine": _machine(),
        "settings": settings,
        "route_us": measure_counting(rounds),
        "policies": found,
    }


def measure_counting(rounds: int) -> float:
    """Microseconds to count one route of a finished sequence, the median of the rounds."""
    trace = synthesize_preset(
        PRESETS[PRESET], num_sequences=1, mean_length=COUNTED_LENGTH, max_length=COUNTED_LENGTH, num_layers=LAYERS[1]
    )
    SequenceCounts.from_trace(trace)
    found = []
    for _ in range(rounds):
        parts = Parts()
        with parts.timed("count"):
            SequenceCounts.from_trace(trace)
        found.append(parts.us["count"] / trace.expert_ids.size)
    return float(f"{statistics.median(found):.3g}")


# What the times of a step's parts are proportional to, by field of `TimeAtSize`.
AMOUNTS: dict[str, dict[str, Callable[[Array, Array], Array]]] = {
    "schedule": {"schedule": lambda m, _: m, "schedule_instance": lambda m, layers: m * layers},
    "homes": {"homes": lambda _, layers: layers, "homes_instance": lambda m, layers: m * layers},
    "choice": {"choice": lambda m, _: np.ones(len(m))},
    "instance": {"instance": lambda m, layers: m * layers},
    "join": {"join": lambda m, layers: m * layers},
}


def fit_parts(us: dict[tuple[int, int], dict[str, float]]) -> dict[str, float]:
    """The times of `TimeAtSize` that are nearest to the measured ones, by micro-steps and layers; none is negative."""
    micro_steps, layers = np.array(list(us), float).T
    times: dict[str, float] = {}
    for part in next(iter(us.values())):
        measured = np.array([each[part] for each in us.values()])
        amounts = {name: amount(micro_steps, layers) for name, amount in AMOUNTS[part].items()}
        times |= _fit_amounts(amounts, measured)
    return {name: round(value, 2) for name, value in times.items()}


def _fit_amounts(amounts: dict[str, Array], measured: Array) -> dict[str, float]:
    """Factors of amounts whose sum is nearest to the measured times, by relative error; none is negative."""
    found = dict.fromkeys(amounts, 0.0)
    least = math.inf
    for number in range(1, len(amounts) + 1):
        for names in itertools.combinations(amounts, number):
            parts = np.stack([amounts[name] for name in names], axis=1) / measured[:, None]
            factors, *_ = np.linalg.lstsq(parts, np.ones(len(measured)), rcond=None)
            error = float(np.square(parts @ factors - 1).sum())
            if (factors >= 0).all() and error < least - 1e-12:
                least = error
                found = dict.fromkeys(amounts, 0.0) | dict(zip(names, factors.tolist(), strict=True))
    return found


def _machine() -> str:
    return f"one core of {platform.machine()}, Python {platform.python_version()}"


def add_to(parser: Parser) -> None:
    """Add the options."""
    option = partial(add_options, parser, of=run_benchmark)
    option("--rounds")
    option("--max-ranks", type=int, help="largest number of ranks")


def print_figures(figures: Figures, console: Console) -> None:
    """Print the times of each balancer at each size."""
    fields = TimeAtSize._fields
    columns: Columns = {"balancer": "{policy}", **{field: partial(_cell, field) for field in fields}}
    rows = [{"policy": name, **size} for name, sizes in figures["policies"].items() for size in sizes]
    console.print(figure_table("Planning times, microseconds", columns, rows))


def _cell(field: str, row: Row) -> str:
    return f"{row.get(field, 0.0):,.4g}"


if __name__ == "__main__":
    main("experiments.planning_times")
