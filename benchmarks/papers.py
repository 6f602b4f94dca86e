"""`python -m benchmarks.papers`: simulated step time of all balancers in cases drawn at random, and a lower bound.

Draw cases from all combinations of five kinds of nodes, six models, 8 to 256 ranks, 1 to 32 micro-steps, 1 to 4 slots,
skewed and mild routing, permuted expert ids and both kinds of dispatcher; and others with drift, group-limited routers,
128 to 512 experts and top-1 to top-10. Simulate steps of each with every balancer, on its own recipe, with the best of
its constants and with planning, moves and transfers charged, and compare trimtab with the best other one that fits.
Where the dispatcher sends tokens, their transfers are estimated from counts of rows at first; then the balancers that
could be the best are simulated again with every token's transfers counted.

Weights and sharded training state of the models fit ranks of 80 GB with pipeline stages of 4 layers, so memory is that
of one stage with the layers of the trace. Step time is that of all layers; pipelining is not simulated.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path

import numpy as np
from rich.progress import Progress

from benchmarks.harness import Figures, main, settings_of, show
from benchmarks.papers_summary import BALANCED, TRIMTAB, page_blocks, print_figures, summarise
from benchmarks.step_bound import bound_step
from experiments.page_tables import replace_tables
from trimtab.cli.options import add_options, given, positive, whole
from trimtab.cli.parser import Parser
from trimtab.cluster import ModelSpec, load_cluster, load_model
from trimtab.cluster.operations import OperationCosts
from trimtab.cores import usable_cores
from trimtab.errors import InputError
from trimtab.planner import SequenceCounts, budget_for
from trimtab.policies import POLICIES
from trimtab.policies.policy import chosen_constants
from trimtab.simulator.comparison import Outcome, simulate_policy, simulate_steps
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.memory import rank_memory, replica_pool_bytes
from trimtab.simulator.step import StepSettings
from trimtab.simulator.yardstick import yardstick
from trimtab.trace import PRESETS, RoutingTrace, synthesize_preset

SCHEMA = "trimtab-bench-step-time-3"
RESULTS = Path(__file__).parents[1] / "docs" / "results.md"
# Values of a case. Each combination is one, if the ranks divide the experts and the step has at most `MOST_PLACES`
# places (ranks times micro-steps), so that traces stay small.
GRID: Mapping[str, Sequence[object]] = {
    "cluster": ("h100x8", "b200x8", "h20x8", "mi300x8", "gb200-nvl72"),
    "model": ("qwen3-30b-a3b", "gpt-oss-120b", "glm-4.5-air", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"),
    "ranks": (8, 16, 32, 64, 128, 256),
    "micro_steps": (1, 2, 4, 8, 16, 32),
    "slots": (1, 2, 4),
    "preset": ("qwen3-30b-math", "nemotron-3-nano-text"),
    "permuted": (False, True),
    "forwards": (False, True),
}
# Those in which hot experts change between steps.
DRIFT: Mapping[str, Sequence[object]] = {
    **GRID,
    "model": ("qwen3-30b-a3b", "deepseek-v3", "kimi-k2", "llama-4-maverick", "qwen3-next-80b-a3b"),
    "preset": ("drift",),
}
MOST_PLACES, RACK = 256, 64
# Estimated step times of balancers are compared within less than this part of the best one.
ESTIMATE_OFF = 0.03
# Balancers whose ratio to trimtab the tables show.
SHOWN = ("static", "scheduled", "eplb")
# Of the draw of cases. It was never changed.
DRAW = 0


@dataclass(frozen=True)
class PapersCase:
    """One case.

    Attributes:
        cluster: kind of nodes.
        model: name of a model preset; the trace has its experts and its `top_k`.
        ranks: of the expert-parallel group.
        micro_steps: of a step.
        slots: replica slots of a rank.
        preset: skew of the routing.
        permuted: whether the experts of every layer are in random order.
        forwards: whether the dispatcher sends a token to a node once, or every row to its rank.
    """

    cluster: str
    model: str
    ranks: int
    micro_steps: int
    slots: int
    preset: str
    permuted: bool
    forwards: bool

    @property
    def name(self) -> str:
        """Its name in tables, figures and `--only`, such as h100x8-qwen3-30b-a3b-8-m4-s1-math-permuted-rows."""
        kind = {"nemotron-3-nano-text": "mild", "drift": "drift"}.get(self.preset, "skewed")
        permuted = "-permuted" if self.permuted else ""
        sent = "tokens" if self.forwards else "rows"
        return f"{self.cluster}-{self.model}-{self.ranks}-m{self.micro_steps}-s{self.slots}-{kind}{permuted}-{sent}"


@dataclass(frozen=True)
class TraceSizes:
    """Sizes of all traces.

    Attributes:
        layers: sampled MoE layers, which represent all of the model.
        mean_length, max_length: tokens of a sequence.
        tokens_per_rank: mean tokens of a rank in a micro-step.
        steps: of a trace. All but the first are simulated, and their mean is the result.
    """

    layers: int = 4
    mean_length: int = 2048
    max_length: int = 8192
    tokens_per_rank: int = 8192
    steps: int = 7


@dataclass(frozen=True)
class PapersBenchmark:
    """Cases to simulate.

    Attributes:
        seeds: of the routing. Trimtab's planner was tuned on other seeds than the default ones.
        count: cases to draw.
        drifting: cases to draw of those in which hot experts change between steps.
        only: part of the names of the cases to run; all of them if empty.
        processes: cases simulated at the same time.
        sizes: of the traces.
    """

    seeds: tuple[int, ...] = (100, 101, 102, 103)
    count: int = 36
    drifting: int = 12
    only: str = ""
    processes: int = 2
    sizes: TraceSizes = field(default_factory=TraceSizes)

    def cases(self) -> list[PapersCase]:
        """The cases to run. Raises InputError if no name contains `only`."""
        every = draw_cases(self.count) + draw_cases(self.drifting, DRIFT)
        chosen = [case for case in every if self.only in case.name]
        if not chosen:
            raise InputError(f"no case has {self.only!r} in its name; the first is {every[0].name}")
        return chosen


EXAMPLES = ("--json docs/benchmarks/step-time.json --pages", "--seeds 100 --only deepseek-v3")


def add_to(parser: Parser) -> None:
    """Add the options."""
    option = partial(add_options, parser, of=PapersBenchmark)
    option("--seeds", type=whole, nargs="+", help="random seeds of the routing")
    option("--count", type=positive, help="cases to draw; a smaller number are the first of them")
    option("--drifting", type=whole, help="cases to draw in which hot experts change between steps")
    option("--only", unset="all", help="run the cases that have NAME in their name")
    option("--processes", type=positive, help="cases simulated at the same time, at most one on each core")
    add_options(parser, "--pages", action="store_true", help="put the tables into docs/results.md")


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
    figures = run_benchmark(PapersBenchmark(**given(options, PapersBenchmark)))
    show(figures, print_figures, options.json)
    if options.pages:
        replace_tables(page_blocks(figures), RESULTS)


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


def draw_cases(count: int, grid: Mapping[str, Sequence[object]] = GRID) -> list[PapersCase]:
    """The first cases of a whole grid in random order, always the same."""
    every = [PapersCase(*values) for values in product(*grid.values())]  # type: ignore[arg-type]
    fitting = [
        case
        for case in every
        if load_model(case.model).num_experts % case.ranks == 0 and case.ranks * case.micro_steps <= MOST_PLACES
    ]
    random.Random(DRAW).shuffle(fitting)
    return fitting[:count]


def _simulate(cases: Sequence[PapersCase], seeds: Sequence[int], settings: PapersBenchmark) -> list[Figures]:
    """Figures of every case and seed, in any order."""
    # The longest first, so that all processes end at about the same time.
    todo = sorted(product(cases, seeds), key=lambda each: -each[0].ranks * each[0].micro_steps)
    processes = max(1, min(settings.processes, usable_cores(), len(todo)))
    rows: list[Figures] = []
    with (
        Progress(transient=True) as progress,
        # An interrupt stops this process, which ends its workers.
        ProcessPoolExecutor(
            processes, get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
        ) as pool,
    ):
        task = progress.add_task("bench papers", total=len(todo))
        try:
            for future in as_completed([pool.submit(_run_case, case, seed, settings.sizes) for case, seed in todo]):
                rows.append(future.result())
                progress.update(task, completed=len(rows))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise
    return rows


def _run_case(case: PapersCase, seed: int, sizes: TraceSizes) -> Figures:
    return case_figures(case, seed, comparison_case(case, draw(case, seed, sizes)))


def case_figures(case: PapersCase, seed: int, compared: ComparisonCase) -> Figures:
    """Figures of one case and seed. Seconds are means of a step of the whole model.

    `step_s` has all balancers, `chosen` their constants; parts and plan are those of `trimtab`, of the best other one
    that fits, and of the best one with no more slots than `trimtab`. `estimated` has the balancers whose transfers are
    not counted. `does_not_fit` has the balancers that need more memory than a rank has, as one pipeline stage.
    """
    outcomes = {name: simulate_policy(replace(compared, traces=()), name) for name in POLICIES}
    too_large = [name for name in POLICIES if _stage_bytes(compared, outcomes[name]) > compared.cluster.device_bytes]
    real = [name for name in POLICIES if name not in (TRIMTAB, BALANCED)]
    others = [name for name in real if name not in too_large] or real
    alike = [name for name in others if outcomes[name].plan.slots_per_rank <= compared.cluster.slots_per_rank]
    counted: set[str] = set()
    if compared.cluster.dispatch_forwards and compared.traces:
        counted = {TRIMTAB, *SHOWN, *_could_be_best(outcomes, others), *_could_be_best(outcomes, alike)}
        outcomes |= {n: simulate_steps(compared, n, outcomes[n].policy) for n in POLICIES if n in counted}
    else:
        counted = set(POLICIES)
    step_s = {name: outcome.simulated.step_time_s for name, outcome in outcomes.items()}
    best, best_alike = (min(counted.intersection(names), key=lambda name: step_s[name]) for names in (others, alike))
    first_moves_s = {name: outcome.first_moves_s for name, outcome in outcomes.items()}
    bound_s = _bound(compared, outcomes[TRIMTAB])
    return {
        "case": case.name,
        "seed": seed,
        **asdict(case),
        "nodes": compared.cluster.nodes,
        "best_other": best,
        "best_with_our_slots": best_alike,
        "chosen": {name: chosen_constants(outcome.policy) for name, outcome in outcomes.items()},
        "step_s": _rounded(step_s),
        "estimated": [name for name in POLICIES if name not in counted],
        "first_moves_s": _rounded({name: seconds for name, seconds in first_moves_s.items() if seconds}),
        "does_not_fit": too_large,
        "plans": {name: _plan_figures(outcomes[name]) for name in dict.fromkeys((TRIMTAB, best, best_alike))},
        "predicted": _predicted(compared, outcomes[TRIMTAB]),
        "above_bound": outcomes[TRIMTAB].step_times_s[-1] / sum(bound_s.values()) - 1,
    }


def _could_be_best(outcomes: Mapping[str, Outcome], names: Sequence[str]) -> list[str]:
    step_s = {name: outcomes[name].simulated.step_time_s for name in names}
    return [name for name in names if step_s[name] <= (1 + ESTIMATE_OFF) * min(step_s.values())]


def _stage_bytes(compared: ComparisonCase, outcome: Outcome) -> int:
    """Memory of the rank that needs most, in a pipeline stage with the layers of the trace."""
    plan, settings = outcome.plan, compared.settings
    stage = pipeline_stage(compared.model, plan.num_layers)
    pool_R = replica_pool_bytes(plan, stage, outcome.policy.traits, settings.ring_layers)
    load = replace(outcome.load, pool_R=pool_R)
    return sum(rank_memory(load, stage, sharding=settings.sharding, checkpointing=settings.checkpointing).values())


def _predicted(compared: ComparisonCase, outcome: Outcome) -> float:
    """The planner's prediction of the last step over its simulated time, minus 1."""
    facts = json.loads(outcome.plan.settings)
    return facts["predicted_s"][facts["strategy"]] * compared.scale / outcome.step_times_s[-1] - 1


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


def draw(case: PapersCase, seed: int, sizes: TraceSizes) -> tuple[RoutingTrace, ...]:
    """The routing of every step, in the order of steps."""
    model = load_model(case.model)
    tokens = case.ranks * case.micro_steps * sizes.tokens_per_rank
    trace = synthesize_preset(
        PRESETS[case.preset], num_sequences=tokens // sizes.mean_length, mean_length=sizes.mean_length,
        max_length=sizes.max_length, num_layers=sizes.layers, num_experts=model.num_experts, top_k=model.top_k,
        num_steps=sizes.steps, seed=seed, expert_groups=model.expert_groups, groups_per_token=model.groups_per_token,
    )  # fmt: skip
    return tuple(trace.select(np.flatnonzero(trace.steps == step)) for step in range(sizes.steps))


def comparison_case(case: PapersCase, traces: tuple[RoutingTrace, ...]) -> ComparisonCase:
    """All steps but the first with the model on the cluster, recomputed and checkpointed."""
    steps = tuple(map(SequenceCounts.from_trace, traces))
    # Groups use a part of a rack that divides them.
    per_node = min(case.ranks, RACK) if case.cluster.endswith("nvl72") else None
    nodes = load_cluster(case.cluster, ranks=case.ranks, slots_per_rank=case.slots, ranks_per_node=per_node)
    compared = ComparisonCase(
        cluster=replace(nodes, dispatch_forwards=case.forwards),
        model=load_model(case.model),
        sequences=steps[-1],
        earlier=steps[:-1],
        token_budget=budget_for([step.lengths for step in steps], case.ranks, case.micro_steps),
        settings=StepSettings(checkpointing=True),
        measured=len(steps) - 1,
        traces=traces[1:] if case.forwards else (),
    )
    return compared.with_permuted_experts(0) if case.permuted else compared


def pipeline_stage(model: ModelSpec, layers: int) -> ModelSpec:
    """The model with so many of its MoE layers, with embedding and output head, and without dense layers."""
    return replace(
        model, moe_layers=layers, moe_layer_indices=(), dense_layers=0, attention=(),
        attention_parameters=round(model.moe_attention.parameters),
    )  # fmt: skip


if __name__ == "__main__":
    main("benchmarks.papers")
