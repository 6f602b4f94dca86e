"""`trimtab plan`: plan one step of a trace for a cluster, and show the balance before and after."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from trimtab.api.plan import plan
from trimtab.api.steps import DISPATCHERS
from trimtab.cli.options import (
    DEFAULT_RANKS,
    DEFAULT_SIZE,
    add_model,
    add_options,
    add_output,
    add_settings,
    add_trace,
    given,
    positive,
)
from trimtab.cli.output import write_figures
from trimtab.policies import POLICIES
from trimtab.report.tables import balance_tables, facts


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        description="Plan one step of a routing trace for a cluster and print the balance before and after.",
        examples=[
            "trimtab plan out/demo/routing/step-00000.parquet --ranks 8 --slots 2",
            "trimtab plan out/math.parquet --ranks 16 --ranks-per-node 8 --max-rows-per-rank 70000",
        ],
    )
    add_trace(parser)
    add_settings(parser)
    option = partial(add_options, parser, of=plan)
    option("--ranks", unset=DEFAULT_RANKS)
    option("--ranks-per-node", unset="the cluster's")
    option("--groups", type=positive, help="expert-parallel groups, for seconds")
    option("--slots")
    size = partial(add_options, parser.add_mutually_exclusive_group(), of=plan)
    size("--token-budget", unset=DEFAULT_SIZE)
    size("--micro-steps", unset="as the token budget gives")
    option("--step", unset="the last of the trace")
    option("--cluster")
    option("--dispatcher", choices=tuple(DISPATCHERS), unset="the cluster's", help="what is sent to a node")
    option("--policy", choices=tuple(POLICIES))
    option("--max-rows-per-rank", type=positive, unset="none", help="most rows of a rank in a layer of a micro-step")
    option("--exact", action="store_true", help="spread rows of every layer evenly over ranks, to the row")
    add_model(parser, of=plan, unset="the trace's, else a preset like the trace")
    option("--no-recompute", action="store_false", dest="recompute", help="update alone, for seconds")
    option("--checkpointing", action="store_true", help="checkpoint activations, for seconds")
    add_output(parser, "the plan (.npz)", required=False)
    add_options(parser, "--json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    result = plan(**given(options, plan))
    if options.output:
        result.plan.save(options.output)
    console = write_figures(options, result.figures())
    console.print(facts(result.facts, result.title))
    console.print(balance_tables(result.trace, result.loads_before_MLR, result.loads_after_MLR))
