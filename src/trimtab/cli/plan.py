"""`trimtab plan`: plan one step of a trace for a cluster, and show the balance before and after."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from trimtab.api.plan import plan
from trimtab.cli.options import add_trace, check_outputs, positive, whole
from trimtab.files import write_json
from trimtab.policies import POLICIES
from trimtab.report.tables import balance_tables, facts


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        description="Plan one step of a routing trace for a cluster and print the balance before and after.",
        epilog="example: trimtab plan out/demo/routing/step-00000.parquet --ranks 8 --slots 2",
    )
    add_trace(parser)
    parser.add_argument("--ranks", type=positive, required=True, metavar="N", help="ranks of the expert-parallel group")
    parser.add_argument("--ranks-per-node", type=positive, metavar="N", help="ranks that share a node (default: all)")
    parser.add_argument("--slots", type=whole, default=2, metavar="N", help="replicas a rank has room for (default: 2)")
    parser.add_argument(
        "--token-budget", type=positive, default=8192, metavar="N", help="most tokens a rank and micro-step (8192)"
    )
    parser.add_argument("--step", type=whole, metavar="N", help="RL step to plan (default: the first in the trace)")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="trimtab", help="balancer (default: trimtab)")
    parser.add_argument("--model", metavar="NAME", help="a preset, config.json or checkpoint, to count bytes moved")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="save the plan (.npz)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_outputs(options.output, options.json)
    result = plan(
        options.trace,
        ranks=options.ranks,
        ranks_per_node=options.ranks_per_node,
        slots=options.slots,
        token_budget=options.token_budget,
        step=options.step,
        policy=options.policy,
        model=options.model or None,
    )
    if options.output:
        result.plan.save(options.output)
    if options.json:
        write_json(options.json, result.figures())
    console = Console(highlight=False)
    console.print(facts(result.facts, result.title))
    console.print(balance_tables(result.trace, result.loads_before_MLR, result.loads_after_MLR))
