"""`trimtab renumber`: a checkpoint with experts in an order that balances ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trimtab.api.renumber import renumber_checkpoint, undo_renumbering
from trimtab.api.run import Run
from trimtab.cli.options import add_options
from trimtab.cli.output import write_figures
from trimtab.cli.signatures import add_arguments, described, given
from trimtab.figures import plural
from trimtab.report.number_text import seconds
from trimtab.report.tables import Row, TableData, first_lines, terminal_facts, terminal_table


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "renumber",
        description=described(renumber_checkpoint),
        examples=[
            "trimtab renumber models/qwen3 --trace out/rollout.parquet --ranks 32 -o models/qwen3-ep32",
            "trimtab renumber models/qwen3-ep32 --undo -o models/qwen3-again",
        ],
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder with config.json and safetensors files")
    add_options(parser, "--output", dest="folder", type=Path, required=True, metavar="FOLDER", help="folder to write")
    source = parser.add_mutually_exclusive_group(required=True)
    add_options(
        source, "--trace", type=Path, nargs="+", default=argparse.SUPPRESS, unset="none", help="routing of the model"
    )
    add_options(source, "--undo", action="store_true", help="write it with its first ids instead")
    add_arguments(parser, Run, without=("model", "overrides", "mini_batches", "step", "steps"))
    add_arguments(parser, renumber_checkpoint)
    add_options(parser, "--json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.undo:
        undo_renumbering(output=options.folder, **given(options, undo_renumbering))
        write_figures(options, {"schema": "trimtab-renumber-1", "output": str(options.folder)}).print(
            f"{options.folder}: experts have their first ids"
        )
        return
    result = renumber_checkpoint(
        output=options.folder,
        run=Run(**{**given(options, Run), "model": None}),
        **given(options, renumber_checkpoint),
    )
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
