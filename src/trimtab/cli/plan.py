"""`trimtab plan`: plan one step of a trace for a cluster, and show the balance before and after."""

from __future__ import annotations

import argparse
from typing import Any

from trimtab.api.plan import plan
from trimtab.cli.options import add_option, add_output, add_trace
from trimtab.cli.output import write_figures
from trimtab.policies import POLICIES
from trimtab.report.tables import balance_tables, facts


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        description="Plan one step of a routing trace for a cluster and print the balance before and after.",
        examples=["trimtab plan out/demo/routing/step-00000.parquet --ranks 8 --slots 2"],
    )
    add_trace(parser)
    add_option(parser, "--ranks", required=True)
    add_option(parser, "--ranks-per-node", unset="all")
    add_option(parser, "--slots", default=2)
    add_option(parser, "--token-budget", default=8192)
    add_option(parser, "--step", unset="the first of the trace")
    add_option(parser, "--policy", choices=tuple(POLICIES), default="trimtab")
    add_option(parser, "--model", unset="none; transferred bytes are not counted")
    add_output(parser, "the plan (.npz)", required=False)
    add_option(parser, "--json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    result = plan(
        options.trace,
        ranks=options.ranks,
        ranks_per_node=options.ranks_per_node,
        slots=options.slots,
        token_budget=options.token_budget,
        step=options.step,
        policy=options.policy,
        model=options.model,
    )
    if options.output:
        result.plan.save(options.output)
    console = write_figures(options, result.figures())
    console.print(facts(result.facts, result.title))
    console.print(balance_tables(result.trace, result.loads_before_MLR, result.loads_after_MLR))
