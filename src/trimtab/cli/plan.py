"""`trimtab plan`: plan one step of a trace for a cluster, and show the balance before and after."""

from __future__ import annotations

import argparse
from typing import Any

from trimtab.api.plan import plan
from trimtab.cli.options import add_output
from trimtab.cli.run_command import add_command, called, show
from trimtab.report.tables import balance_tables, terminal_facts

# A plan is of one step, as recorded.
UNUSED = ("tp", "pp", "cp", "mini_batches", "sharding", "steps", "step_tokens", "sampled")


def add(commands: Any) -> None:
    examples = [
        "trimtab plan out/demo/routing/step-00000.parquet --ranks 8 --slots 2",
        "trimtab plan out/math.parquet --ranks 16 --ranks-per-node 8 --max-rows-per-rank 70000",
    ]
    parser = add_command(commands, "plan", plan, run=run, examples=examples, unused=UNUSED, outputs=["--json"])
    add_output(parser, "the plan (.npz)", required=False)


def run(options: argparse.Namespace) -> None:
    result = called(plan, options)
    if options.output:
        result.plan.save(options.output)
    balance = balance_tables(result.trace, result.loads_before_MLR, result.loads_after_MLR)
    show(options, result, terminal_facts(result.facts, result.title), balance)
