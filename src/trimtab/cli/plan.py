"""`trimtab plan`: plan one step of a trace for a cluster, and show the balance before and after."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from trimtab.api.plan import plan
from trimtab.cli.options import add_options, add_output, given, positive
from trimtab.cli.output import write_figures
from trimtab.cli.run_options import add_recompute_granularity, add_run
from trimtab.policies import POLICIES
from trimtab.report.tables import balance_tables, terminal_facts


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        description="Plan one step of a routing trace for a cluster and print the balance before and after.",
        examples=[
            "trimtab plan out/demo/routing/step-00000.parquet --ranks 8 --slots 2",
            "trimtab plan out/math.parquet --ranks 16 --ranks-per-node 8 --max-rows-per-rank 70000",
        ],
    )
    add_run(parser, of=plan, what_for=", for seconds")
    option = partial(add_options, parser, of=plan)
    option("--slots")
    option("--policy", choices=tuple(POLICIES))
    option("--max-rows-per-rank", type=positive, unset="none", help="most rows of a rank in a layer of a micro-step")
    option("--exact", action="store_true", help="spread rows of every layer evenly over ranks, to the row")
    add_recompute_granularity(parser, of=plan)
    add_output(parser, "the plan (.npz)", required=False)
    add_options(parser, "--json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    result = plan(**given(options, plan))
    if options.output:
        result.plan.save(options.output)
    console = write_figures(options, result.figures())
    console.print(terminal_facts(result.facts, result.title))
    console.print(balance_tables(result.trace, result.loads_before_MLR, result.loads_after_MLR))
