"""`trimtab simulate`: what would each balancer give on a cluster?"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from trimtab.cli.options import add_trace, check_model, check_outputs, positive, progress_bar, whole, write_json
from trimtab.cluster import ClusterSpec, ModelSpec, load_cluster, load_model, model_like
from trimtab.errors import InputError
from trimtab.planner import SequenceCounts
from trimtab.policies import POLICIES
from trimtab.report.html import write_html
from trimtab.report.perfetto import check_name, write_perfetto
from trimtab.report.simulation import simulation_report, timelines
from trimtab.report.tables import simulation_tables, sweep_table
from trimtab.simulator.comparison import (
    Outcome,
    Situation,
    budget_for,
    figures,
    simulate_policy,
    step_of,
    trace_hash,
)
from trimtab.simulator.step import StepSettings
from trimtab.trace import RoutingTrace, TraceReader

# The baseline, one of each kind of rival, ours, and the ideal; see `trimtab simulate --help` for all.
DEFAULT_POLICIES = ("static", "eplb_oracle", "llep", "ultraep", "feplb", "relibra", "trimtab", "balanced")
# What is compared with everything: in every run, asked for or not.
NEEDED = ("static", "balanced")


@dataclass(frozen=True)
class Case:
    """One cluster and micro-step size of a sweep."""

    ranks: int
    slots: int
    micro_steps: int | None

    @property
    def text(self) -> str:
        size = f", {self.micro_steps} micro-steps" if self.micro_steps else ""
        return f"{self.ranks} ranks, {self.slots} slots{size}"


@dataclass(frozen=True, eq=False)
class Result:
    """What came of a case."""

    case: Case
    situation: Situation
    outcomes: dict[str, Outcome]


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        description="Plan one step of a routing trace with several balancers, run every plan through an event "
        "simulation of the cluster, and show how long the step takes and where the time goes.",
        epilog="example: trimtab simulate out/mixed.parquet --cluster h100x8 --ranks 16 --html out/report.html; "
        f"balancers: {', '.join(POLICIES)}",
    )
    add_trace(parser)
    parser.add_argument(
        "--policies", nargs="+", choices=tuple(POLICIES), default=DEFAULT_POLICIES, metavar="NAME",
        help=f"balancers ({' '.join(DEFAULT_POLICIES)}); 'static' and 'balanced' always run",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", default="h100x8", metavar="NAME", help="kind of nodes: a preset or a TOML file (h100x8)"
    )
    parser.add_argument("--model", metavar="NAME", help="a preset, config.json or checkpoint (default: as the trace)")
    parser.add_argument(
        "--ranks",
        type=positive,
        nargs="+",
        default=[16],
        metavar="N",
        help="ranks of a group; several for a sweep (16)",
    )
    parser.add_argument("--ranks-per-node", type=positive, metavar="N", help="ranks of a node (default: the cluster's)")
    parser.add_argument(
        "--slots", type=whole, nargs="+", default=[2], metavar="N", help="replicas a rank has room for (2)"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--micro-steps", type=positive, nargs="+", metavar="N", help="micro-steps of the step (8)")
    size.add_argument("--token-budget", type=positive, metavar="N", help="most tokens a rank and micro-step instead")
    parser.add_argument("--mini-batches", type=positive, default=1, metavar="N", help="optimizer steps (1)")
    parser.add_argument("--groups", type=positive, default=1, metavar="N", help="expert-parallel groups (1)")
    parser.add_argument(
        "--groups-meet", choices=("layer", "step"), default="step", help="where groups wait for each other (step)"
    )
    parser.add_argument(
        "--equal-terms", action="store_true", help="same homes, schedule and slots for all, instead of own recipes"
    )
    parser.add_argument(
        "--no-recompute", action="store_true", help="update alone, with the rollout's log-probabilities"
    )
    parser.add_argument("--step", type=whole, metavar="N", help="RL step of the trace (default: the last)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page to show, one file")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="also write a micro-step's timeline (.json, .json.gz)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_outputs(options.json, options.html, options.perfetto)
    if options.perfetto:
        check_name(options.perfetto)
    reader = TraceReader(options.trace)
    if not reader.facts.lengths.any():
        raise InputError(f"{reader.name}: the trace is empty; there is nothing to simulate")
    trace, earlier = step_of(reader.read(), options.step)
    model = load_model(options.model) if options.model else model_like(trace.num_experts, trace.top_k, trace.num_layers)
    _check_fits(reader.name, trace, model, options.ranks)
    micro_steps = options.micro_steps or [None if options.token_budget else 8]
    cases = [Case(*case) for case in itertools.product(options.ranks, options.slots, micro_steps)]
    names = [name for name in POLICIES if name in (*options.policies, *NEEDED)]
    clusters = [
        load_cluster(
            options.cluster, ranks=case.ranks, slots_per_rank=case.slots, ranks_per_node=options.ranks_per_node
        )
        for case in cases
    ]
    console = Console(highlight=False)
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bar(*columns) as progress:
        task = progress.add_task("counting", total=len(cases) * len(names))
        counted, before = SequenceCounts.from_trace(trace), tuple(map(SequenceCounts.from_trace, earlier))
        for case, cluster in zip(cases, clusters, strict=True):
            situation = _situation(case, cluster, model, counted, before, options)
            outcomes = {}
            for name in names:
                progress.update(task, description=name)
                outcomes[name] = simulate_policy(situation, name)
                progress.advance(task)
            results.append(Result(case, situation, outcomes))
    first = results[0]
    if options.json:
        write_json(options.json, _json(options, reader.name, trace, results))
    if options.html:
        write_html(simulation_report(reader.name, trace, first.situation, first.outcomes), options.html)
    if options.perfetto:
        write_perfetto(timelines(first.situation, first.outcomes), options.perfetto)
    console.print(*simulation_tables(reader.name, trace, first.situation, first.outcomes))
    if len(results) > 1:
        console.print(sweep_table([(result.case.text, result.outcomes) for result in results]))
    if options.html:
        console.print(f"page: {options.html}")
    if options.perfetto:
        console.print(f"timeline: {options.perfetto} (for the Perfetto viewer or chrome://tracing)")


def _check_fits(name: str, trace: RoutingTrace, model: ModelSpec, ranks_of_cases: list[int]) -> None:
    check_model(name, trace, model)
    for ranks in ranks_of_cases:
        if trace.num_experts % ranks:
            raise InputError(f"--ranks {ranks} doesn't divide the {trace.num_experts} experts of {name}")


def _situation(
    case: Case,
    cluster: ClusterSpec,
    model: ModelSpec,
    counted: SequenceCounts,
    before: tuple[SequenceCounts, ...],
    options: argparse.Namespace,
) -> Situation:
    budget = options.token_budget
    if case.micro_steps:
        budget = budget_for((counted, *before), case.ranks * options.groups, case.micro_steps)
    return Situation(
        cluster=cluster,
        model=model,
        sequences=counted,
        earlier=before,
        token_budget=budget,
        mini_batches=options.mini_batches,
        equal_terms=options.equal_terms,
        settings=StepSettings(groups=options.groups, meet=options.groups_meet, recompute=not options.no_recompute),
    )


def _json(options: argparse.Namespace, name: str, trace: RoutingTrace, results: list[Result]) -> dict[str, Any]:
    situation = results[0].situation
    content = {
        "schema": "trimtab-simulate-1",
        "trace_hash": trace_hash(trace),
        # Nothing here is random, beyond the searches' own fixed seeds.
        "seed": 0,
        "settings": {
            "trace": name,
            "step": int(trace.steps[0]),
            "token_budget": situation.token_budget,
            "mini_batches": situation.mini_batches,
            "equal_terms": situation.equal_terms,
            **asdict(situation.settings),
        },
        "cluster": asdict(situation.cluster),
        "model": asdict(situation.model),
        "policies": figures(results[0].outcomes, situation.model),
    }
    if len(results) > 1:
        content["sweep"] = [
            asdict(result.case)
            | {"token_budget": result.situation.token_budget, "policies": figures(result.outcomes, situation.model)}
            for result in results
        ]
    return content
