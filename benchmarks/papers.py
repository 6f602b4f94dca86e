"""`python -m benchmarks.papers`: simulated step time of all balancers, and Trimtab's distance to a lower bound.

Simulate steps of five models on 8 to 128 ranks with every balancer, on its own recipe and with planning charged, and
compare trimtab with the best other one and with a lower bound.

Weights and sharded training state of the models fit ranks of 80 GB with pipeline stages of 8 layers or fewer, so memory
is that of one stage with the 8 layers of the trace. Step time is that of all layers; pipelining is not simulated.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from multiprocessing import active_children, get_context
from typing import NamedTuple

import numpy as np
from rich.progress import Progress

from benchmarks.harness import Figures, main, settings_of, show
from benchmarks.papers_summary import BALANCED, TRIMTAB, print_figures, summarise
from trimtab.cli.options import add_options, given, positive, whole
from trimtab.cli.parser import Parser
from trimtab.cluster import ModelSpec, load_cluster, load_model
from trimtab.cluster.operations import OperationCosts
from trimtab.cores import usable_cores
from trimtab.errors import InputError
from trimtab.planner import SequenceCounts
from trimtab.policies import POLICIES
from trimtab.simulator.comparison import ComparisonCase, Outcome, budget_for, simulate_policy
from trimtab.simulator.memory import rank_memory, replica_pool_bytes
from trimtab.simulator.step import StepSettings
from trimtab.simulator.step_bound import bound_step
from trimtab.simulator.yardstick import yardstick
from trimtab.trace import PRESETS, synthesize_preset

SCHEMA = "trimtab-bench-step-time-1"
PAIRS = (
    ("qwen3-30b-a3b", 8),
    ("qwen3-30b-a3b", 16),
    ("qwen3-30b-a3b", 32),
    ("gpt-oss-120b", 8),
    ("gpt-oss-120b", 16),
    ("glm-4.5-air", 16),
    ("glm-4.5-air", 32),
    ("qwen3-235b-a22b", 32),
    ("qwen3-235b-a22b", 64),
    ("qwen3-235b-a22b", 128),
    ("deepseek-v3", 64),
    ("deepseek-v3", 128),
)


class TraceKey(NamedTuple):
    """What a trace depends on. Cases with the same key share it."""

    preset: str
    experts: int
    top_k: int
    tokens: int
    seed: int


@dataclass(frozen=True)
class PapersCase:
    """One case.

    Attributes:
        model: name of a model preset; the trace has its experts and its `top_k`.
        ranks: of the expert-parallel group.
        tokens: of a step.
        preset: skew of the routing.
        slots: replica slots of a rank.
    """

    model: str
    ranks: int
    tokens: int
    preset: str
    slots: int

    @property
    def name(self) -> str:
        """Its name in tables, figures and `--only`, such as qwen3-30b-a3b-8-0.5M-qwen3-30b-math-s1."""
        return f"{self.model}-{self.ranks}-{self.tokens / 1e6:g}M-{self.preset}-s{self.slots}"

    def trace(self, seed: int) -> TraceKey:
        """The key of its trace."""
        model = load_model(self.model)
        return TraceKey(self.preset, model.num_experts, model.top_k, self.tokens, seed)


@dataclass(frozen=True)
class TraceSizes:
    """Sizes of all traces.

    Attributes:
        layers: sampled MoE layers, which represent all of the model.
        mean_length, max_length: tokens of a sequence.
        tokens_per_rank: mean tokens of a rank in a micro-step.
        steps: of a trace. The last one is simulated. Balancers that move homes start it from those that they reach by
            planning the earlier steps one after another, whose loads are the past loads.
    """

    layers: int = 8
    mean_length: int = 2048
    max_length: int = 8192
    tokens_per_rank: int = 8192
    steps: int = 3


@dataclass(frozen=True)
class PapersBenchmark:
    """Cases to simulate.

    Attributes:
        seeds: of the routing. Trimtab's planner was tuned on other seeds than the default ones.
        only: part of the names of the cases to run; all of them if empty.
        processes: cases simulated at the same time.
        pairs: model and ranks of the cases.
        tokens: of a step; every pair has a case with each of them and each preset.
        presets: skewed and mild routing.
        cluster: kind of nodes.
        sizes: of the traces.
    """

    seeds: tuple[int, ...] = (100, 101, 102, 103, 104)
    only: str = ""
    processes: int = 2
    pairs: tuple[tuple[str, int], ...] = PAIRS
    tokens: tuple[int, ...] = (500_000, 8_000_000)
    presets: tuple[str, ...] = ("qwen3-30b-math", "nemotron-3-nano-text")
    cluster: str = "h100x8"
    sizes: TraceSizes = field(default_factory=TraceSizes)

    def cases(self) -> list[PapersCase]:
        """The cases to run. Raises InputError if no name contains `only`."""
        every = make_cases(self.pairs, self.tokens, self.presets)
        chosen = [case for case in every if self.only in case.name]
        if not chosen:
            raise InputError(f"no case has {self.only!r} in its name; the first is {every[0].name}")
        return chosen


EXAMPLES = ("--json out/bench-step-time.json", "--seeds 100 --only deepseek-v3-64")


def add_to(parser: Parser) -> None:
    """Add the options."""
    option = partial(add_options, parser, of=PapersBenchmark)
    option("--seeds", type=whole, nargs="+", help="random seeds of the routing")
    option("--only", unset="all", help="run the cases that have NAME in their name")
    option("--processes", type=positive, help="cases simulated at the same time, at most one on each core")


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
    show(run_benchmark(PapersBenchmark(**given(options, PapersBenchmark))), print_figures, options.json)


def run_benchmark(settings: PapersBenchmark) -> Figures:
    """All figures, as `--json` writes them.

    Raises:
        InputError: if no case is chosen.
    """
    cases, seeds = settings.cases(), tuple(dict.fromkeys(settings.seeds))
    rows = _simulate(cases, seeds, settings)
    order = {case.name: number for number, case in enumerate(cases)}
    rows.sort(key=lambda row: (order[row["case"]], row["seed"]))
    return {
        "schema": SCHEMA,
        "yardstick": yardstick(),
        "seeds": list(seeds),
        "settings": settings_of(settings, "seeds", "processes"),
        "summary": summarise(rows),
        "cases": rows,
    }


def _simulate(cases: Sequence[PapersCase], seeds: Sequence[int], settings: PapersBenchmark) -> list[Figures]:
    """Figures of every case and seed, in any order. A worker process draws a trace and runs all its cases."""
    by_trace: dict[TraceKey, list[PapersCase]] = {}
    for seed in seeds:
        for case in cases:
            by_trace.setdefault(case.trace(seed), []).append(case)
    # The longest first, so that all processes end at about the same time.
    todo = sorted(by_trace, key=lambda key: -key.tokens * (1 + len(by_trace[key])))
    processes = max(1, min(settings.processes, usable_cores(), len(todo)))
    rows: list[Figures] = []
    with (
        Progress(transient=True) as progress,
        # An interrupt stops this process, which ends its workers.
        ProcessPoolExecutor(
            processes, get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
        ) as pool,
    ):
        task = progress.add_task("bench papers", total=len(cases) * len(seeds))
        try:
            for future in as_completed(
                [pool.submit(_run_trace, key, by_trace[key], settings.sizes, settings.cluster) for key in todo]
            ):
                rows += future.result()
                progress.update(task, completed=len(rows))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise
    return rows


def _run_trace(key: TraceKey, cases: Sequence[PapersCase], sizes: TraceSizes, cluster: str) -> list[Figures]:
    """Figures of all cases of a trace."""
    steps = draw(key, sizes)
    return [case_figures(case, key.seed, comparison_case(case, steps, sizes, cluster)) for case in cases]


def case_figures(case: PapersCase, seed: int, compared: ComparisonCase) -> Figures:
    """Figures of one case and seed. Seconds are those of the whole model.

    `step_s` and `planning_s` have all balancers; parts and plan are those of `trimtab` and of the two best others,
    with the charged planning time and without it. `does_not_fit` has the balancers that need more memory than a rank
    has, as one pipeline stage.
    """
    outcomes = {name: simulate_policy(compared, name) for name in POLICIES}
    step_s = {name: outcome.simulated.step_time_s for name, outcome in outcomes.items()}
    planning_s = {name: outcome.simulated.parts_s["planning"] for name, outcome in outcomes.items()}
    others = [name for name in POLICIES if name not in (TRIMTAB, BALANCED)]
    best = min(others, key=lambda name: step_s[name])
    best_unplanned = min(others, key=lambda name: step_s[name] - planning_s[name])
    device_bytes = compared.cluster.device_bytes
    return {
        "case": case.name,
        "seed": seed,
        **asdict(case),
        "micro_steps": outcomes[TRIMTAB].plan.num_micro_steps,
        "best_other": best,
        "best_other_without_planning": best_unplanned,
        "step_s": _rounded(step_s),
        "planning_s": _rounded({name: seconds for name, seconds in planning_s.items() if seconds}),
        "does_not_fit": [name for name in POLICIES if _stage_bytes(compared, outcomes[name]) > device_bytes],
        "plans": {name: _plan_figures(outcomes[name]) for name in dict.fromkeys((TRIMTAB, best, best_unplanned))},
        "bound_parts_s": _rounded(_bound(compared, outcomes[TRIMTAB])),
    }


def _stage_bytes(compared: ComparisonCase, outcome: Outcome) -> int:
    """Memory of the rank that needs most, in a pipeline stage with the layers of the trace."""
    plan, settings = outcome.plan, compared.settings
    stage = pipeline_stage(compared.model, plan.num_layers)
    pool_R = replica_pool_bytes(plan, stage, outcome.policy.traits, settings.ring_layers)
    load = replace(outcome.load, pool_R=pool_R)
    return sum(rank_memory(load, stage, sharding=settings.sharding, checkpointing=settings.checkpointing).values())


def _plan_figures(outcome: Outcome) -> Figures:
    plan = outcome.plan
    settings = json.loads(plan.settings) if plan.settings else {}
    return {
        "strategy": settings.get("strategy"),
        "max_over_mean": round(outcome.balance.mean, 4),
        "cross_node_token_fraction": round(outcome.cross_node_fraction, 4),
        "replicas_per_instance": round(plan.num_replicas / (plan.num_micro_steps * plan.num_layers), 2),
        "parts_s": _rounded(outcome.simulated.parts_s),
    }


def _bound(compared: ComparisonCase, outcome: Outcome) -> dict[str, float]:
    """The bound for all plans with the schedule of an outcome and the slots of the case."""
    plan, cluster = outcome.plan, compared.cluster
    parts_s = bound_step(
        plan.schedule, outcome.workload, compared.sequences.lengths,
        OperationCosts.of(cluster, compared.model, moe_layers=plan.num_layers),
        ranks_per_node=cluster.ranks_per_node, slots=cluster.slots_per_rank, settings=compared.settings,
    )  # fmt: skip
    return {part: compared.scale * seconds for part, seconds in parts_s.items()}


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    """Seven significant digits."""
    return {name: float(f"{value:.7g}") for name, value in seconds.items()}


def make_cases(
    pairs: tuple[tuple[str, int], ...], tokens: tuple[int, ...], presets: tuple[str, ...]
) -> list[PapersCase]:
    """Every pair of model and ranks with all tokens and presets; one slot and two slots alternate."""
    return [
        PapersCase(model, ranks, tokens[t], presets[p], 1 + (i + t + p) % 2)
        for i, (model, ranks) in enumerate(pairs)
        for t, p in product(range(len(tokens)), range(len(presets)))
    ]


def draw(key: TraceKey, sizes: TraceSizes) -> tuple[SequenceCounts, ...]:
    """Counted sequences of every step, in the order of steps. The expert ids are not kept."""
    trace = synthesize_preset(
        PRESETS[key.preset], num_sequences=max(1, key.tokens // sizes.mean_length), mean_length=sizes.mean_length,
        max_length=sizes.max_length, num_layers=sizes.layers, num_experts=key.experts, top_k=key.top_k,
        num_steps=sizes.steps, seed=key.seed,
    )  # fmt: skip
    counted = SequenceCounts.from_trace(trace)
    return tuple(counted.select(np.flatnonzero(trace.steps == step)) for step in range(sizes.steps))


def comparison_case(
    case: PapersCase, steps: tuple[SequenceCounts, ...], sizes: TraceSizes, cluster: str
) -> ComparisonCase:
    """The last of the steps with the model on a cluster, recomputed and checkpointed."""
    micro_steps = max(1, round(case.tokens / case.ranks / sizes.tokens_per_rank))
    return ComparisonCase(
        cluster=load_cluster(cluster, ranks=case.ranks, slots_per_rank=case.slots),
        model=load_model(case.model),
        sequences=steps[-1],
        earlier=steps[:-1],
        token_budget=budget_for(steps, case.ranks, micro_steps),
        settings=StepSettings(checkpointing=True),
    )


def pipeline_stage(model: ModelSpec, layers: int) -> ModelSpec:
    """The model with so many of its MoE layers, with embedding and output head, and without dense layers."""
    return replace(
        model, moe_layers=layers, moe_layer_indices=(), dense_layers=0, attention=(),
        attention_parameters=round(model.moe_attention.parameters),
    )  # fmt: skip


if __name__ == "__main__":
    main("benchmarks.papers")
