"""`trimtab bench`: names the commands that measure Trimtab; they are in the repository, not in the package."""

from __future__ import annotations

import shlex
import sys
from typing import Any, NoReturn

from trimtab.cli.parser import Parser

BENCHMARKS = {
    "runtime": "step time of the runtime: static, trimtab, balanced, and transformers' own expert parallelism",
    "planner": "balance, bytes, gap to the bound and planning time of every balancer",
    "advice": "how near scaled parts of steps come to whole steps, and how good advice is in the steps after",
    "papers": "simulated step time of every balancer in 48 cases, and the distance to a lower bound",
    "step": "time and memory of planning a whole step, and how they grow",
    "megatron": "step time of a Megatron-core model with and without Trimtab",
    "planning": "what planning in the background adds to the time of a step",
    "live": "balancing without recorded routing: stragglers as in FEPLB's tables, and step time",
    "t-ppo": "PPO, GRPO and T-PPO on long, uneven responses: decode steps, accuracy, time",
    "bind": "what binding micro-steps to their plan costs the training thread, and its upload",
    "transfer": "cost of weight transfers, and expert compute saved by a plan, on one device",
    "traces": "time, memory and size of importing and analyzing a large dump",
    "payload": "size and speed of packed routing, beside int32, int16 and zstd",
    "observe": "what observing a run costs its training thread, in time and memory",
    "capture": "cost of recording the routing of a forward and a generation in transformers",
}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        description="The benchmarks are in the repository, not in the package. Run `python -m benchmarks.NAME` in its "
        "root, in the environment that its Makefile makes; `make bench` runs all of them.",
        examples=["python -m benchmarks.planner --json out/bench-planner.json"],
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCHMARK", parser_class=_Moved)
    for name, about in BENCHMARKS.items():
        benches.add_parser(name, help=f"{command_of(name)}: {about}", examples=[command_of(name)])


def command_of(name: str) -> str:
    """The command that runs a benchmark."""
    return f"python -m benchmarks.{name.replace('-', '_')}"


class _Moved(Parser):
    """The parser of a benchmark's former command: an error of one line with the new command, whatever the options."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> NoReturn:
        name = self.prog.split()[-1]
        words = [*command_of(name).split(), *(sys.argv[1:] if args is None else args)]
        self.exit(2, f"{self.prog}: run this in a clone of the repository instead: {shlex.join(words)}\n")
