"""`trimtab nodes`: run a command on several emulated nodes on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from trimtab.cli.options import add_options


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "nodes",
        description="Run a command once for every rank, as torchrun would, on nodes that are network namespaces of "
        "this machine, joined by links of limited rate. Needs Linux and root.",
        examples=["trimtab nodes --link-mbit 500 -- python -m recipes.rl.train -o out/nodes"],
    )
    add_options(parser, "--nodes", "--ranks-per-node", default=2)
    add_options(parser, "--link-mbit", default=500)
    parser.add_argument("line", nargs="+", metavar="WORD", help="the command, after --")
    parser.set_defaults(run=run, needs=("torch",))


def run(options: argparse.Namespace) -> None:
    from trimtab.launch import run_on_nodes

    run_on_nodes(options.line, nodes=options.nodes, ranks_per_node=options.ranks_per_node, link_mbit=options.link_mbit)
