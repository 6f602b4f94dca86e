"""`trimtab bench`: measure what the README quotes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trimtab.cli.options import need_extra, positive


def add(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure what the README quotes", description="Measure Trimtab.")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    runtime = benches.add_parser(
        "runtime",
        help="step time of the runtime: static, trimtab, balanced, and transformers' own expert parallelism",
        description="Time one micro-step (forward, backward, complete gradients) of a 4-layer MoE on local ranks: "
        "static and trimtab on skewed routing; trimtab and transformers' own all-to-all on even routing.",
        epilog="example: trimtab bench runtime --json out/bench-runtime.json",
    )
    runtime.add_argument("--ranks", type=positive, default=2, metavar="N", help="local ranks (default: 2)")
    runtime.add_argument("--tokens", type=positive, default=2048, metavar="N", help="tokens of a rank (default: 2048)")
    runtime.add_argument("--rounds", type=positive, default=40, metavar="N", help="alternating rounds (default: 40)")
    runtime.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    runtime.set_defaults(run=run_runtime)


def run_runtime(options: argparse.Namespace) -> None:
    need_extra("torch", "transformers")
    from trimtab.benchmarks.runtime import RuntimeBenchmark, run_benchmark
    from trimtab.planner import Placement
    from trimtab.runtime.launch import launch

    settings = RuntimeBenchmark(options.tokens, options.rounds, options.json)
    Placement.contiguous(settings.layers, settings.experts, options.ranks)
    launch(run_benchmark, (settings,), ranks=options.ranks)
