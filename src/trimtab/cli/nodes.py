"""`trimtab nodes`: run a command on several emulated nodes on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from trimtab.cli.options import need_extra, positive


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "nodes",
        description="Run a command once for every rank, as torchrun would, on nodes that are network namespaces of "
        "this machine, joined by links of limited rate. Needs Linux and root.",
        epilog="example: trimtab nodes --link-mbit 500 -- trimtab train --out out/nodes",
    )
    parser.add_argument("--nodes", type=positive, default=2, metavar="N", help="nodes (default: 2)")
    parser.add_argument("--ranks-per-node", type=positive, default=2, metavar="N", help="ranks of a node (default: 2)")
    parser.add_argument(
        "--link-mbit", type=positive, default=500, metavar="N", help="Mbit/s into and out of a node (default: 500)"
    )
    parser.add_argument("line", nargs="+", metavar="WORD", help="the command, after --")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    need_extra("torch")
    from trimtab.launch import run_on_nodes

    run_on_nodes(options.line, nodes=options.nodes, ranks_per_node=options.ranks_per_node, link_mbit=options.link_mbit)
