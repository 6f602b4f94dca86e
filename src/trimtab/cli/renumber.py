"""`trimtab renumber`: a checkpoint with experts in an order that balances ranks."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.api.arguments import DISPATCHERS
from trimtab.api.renumber import renumber_checkpoint, undo_renumbering
from trimtab.cli.options import add_options, given, positive
from trimtab.cli.output import write_figures
from trimtab.cli.run_options import DEFAULT_RANKS, DEFAULT_SIZE, add_recompute_granularity
from trimtab.cluster.parallel_layout import SHARDINGS
from trimtab.figures import plural
from trimtab.report.number_text import seconds
from trimtab.report.tables import Row, TableData, first_lines, terminal_facts, terminal_table


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "renumber",
        description="Write a checkpoint with the experts of each layer in another order, so that the ranks of a run "
        "have even loads: the experts, the rows of the router and all else that is indexed by expert. The model "
        "computes the same function, under the same names, in every framework. The order is made from the first steps "
        "of the trace, and its gain simulated in the last ones; below 1% nothing is written.",
        examples=[
            "trimtab renumber models/qwen3 --trace out/rollout.parquet --ranks 32 -o models/qwen3-ep32",
            "trimtab renumber models/qwen3-ep32 --undo -o models/qwen3-again",
        ],
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder with config.json and safetensors files")
    add_options(parser, "--output", dest="folder", type=Path, required=True, metavar="FOLDER", help="folder to write")
    option = partial(add_options, parser, of=renumber_checkpoint)
    source = parser.add_mutually_exclusive_group(required=True)
    add_options(
        source, "--trace", type=Path, nargs="+", default=argparse.SUPPRESS, unset="none", help="routing of the model"
    )
    add_options(source, "--undo", action="store_true", help="write it with its first ids instead")
    option("--cluster")
    option("--ranks", unset=DEFAULT_RANKS)
    option("--ranks-per-node", unset="the cluster's")
    option("--groups", type=positive, help="expert-parallel groups")
    option("--slots")
    size = partial(add_options, parser.add_mutually_exclusive_group(), of=renumber_checkpoint)
    size("--micro-steps", unset="as the token budget gives")
    size("--token-budget", unset=DEFAULT_SIZE)
    option("--dispatcher", choices=tuple(DISPATCHERS), unset="the cluster's", help="what is sent to a node")
    option("--no-recompute", action="store_false", dest="recompute", help="update alone")
    option("--sharding", choices=SHARDINGS, help="training state that data ranks share out")
    option("--tp", "--pp", "--cp")
    add_recompute_granularity(parser, of=renumber_checkpoint)
    scale = partial(add_options, parser.add_mutually_exclusive_group(), of=renumber_checkpoint)
    scale("--step-tokens", "--sampled", unset="the trace's")
    option(
        "--pattern", type=str, action="append", metavar="NAME",
        help="tensors that are indexed by expert, searched behind the layer's number; its group is the number of an "
        "expert whose tensors are single; may be repeated (default: names of the known model types)",
    )  # fmt: skip
    add_options(parser, "--json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.undo:
        undo_renumbering(output=options.folder, **given(options, undo_renumbering))
        write_figures(options, {"schema": "trimtab-renumber-1", "output": str(options.folder)}).print(
            f"{options.folder}: experts have their first ids"
        )
        return
    result = renumber_checkpoint(output=options.folder, **given(options, renumber_checkpoint))
    console = write_figures(options, result.figures())
    rows = [
        Row(name, (seconds(before), seconds(after), f"{1 - after / before:+.1%}"))
        for name, (before, after) in result.seconds.items()
    ]
    past, measured = result.steps
    facts = [
        ("experts", f"{result.changed:,} have another rank, in {plural(result.layers, 'layer')}"),
        ("made from", f"{plural(past, 'step')}; simulated in {plural(measured, 'later one')}"),
        ("traces", f"trimtab trace renumber TRACE --checkpoint {result.output} -o MAPPED"),
    ]
    console.print(*first_lines(" ".join(result.assumed)))
    console.print(terminal_table(TableData("Seconds of a step", ("with", "before", "renumbered", "gain"), tuple(rows))))
    console.print(terminal_facts(facts, str(result.output)))
