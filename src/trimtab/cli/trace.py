"""`trimtab trace`: look at routing traces."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from trimtab.cli.options import write_json
from trimtab.report.tables import facts, skew_table
from trimtab.trace import read_trace
from trimtab.trace.statistics import layer_skew, unknown_routes


def add(commands: Any) -> None:
    parser = commands.add_parser("trace", help="look at routing traces", description="Work with routing traces.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    info = actions.add_parser(
        "info",
        help="say what a trace holds and how skewed it is",
        description="Say what a routing trace holds and how unevenly its experts are used.",
        epilog="example: trimtab trace info out/demo/routing/step-00000.parquet",
    )
    info.add_argument("trace", type=Path, metavar="FILE", help="a routing trace (.parquet)")
    info.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    info.set_defaults(run=run_info)


def run_info(options: argparse.Namespace) -> None:
    trace = read_trace(options.trace)
    skew = layer_skew(trace)
    lengths = trace.sequence_lengths
    file_bytes = options.trace.stat().st_size
    unknown = unknown_routes(trace)
    steps = np.unique(trace.steps)
    console = Console(highlight=False)
    span = f"{lengths.min()} to {lengths.max()} tokens" if len(lengths) else "no tokens"
    console.print(
        facts(
            [
                ("model", f"{trace.model or 'unknown'}: {trace.shape_text}"),
                ("sequences", f"{trace.num_sequences:,} of {span}, {trace.num_tokens:,} tokens in all"),
                ("prompt tokens", f"{int(trace.prompt_lengths.sum()):,}"),
                ("RL steps", ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")),
                ("unknown routes", f"{unknown:,} of {trace.num_tokens * trace.num_layers:,} (token, layer) pairs"),
                ("size", f"{file_bytes / 1e6:.2f} MB; {trace.expert_ids.nbytes / 1e6:.2f} MB of expert ids"),
            ],
            str(options.trace),
        )
    )
    console.print(skew_table(trace, skew))
    if options.json:
        write_json(
            options.json,
            {
                "schema": "trimtab-trace-info-1",
                "trace": str(options.trace),
                "model": trace.model,
                "layers": trace.num_layers,
                "experts": trace.num_experts,
                "top_k": trace.top_k,
                "sequences": trace.num_sequences,
                "tokens": trace.num_tokens,
                "steps": steps.tolist(),
                "unknown_routes": unknown,
                "file_bytes": file_bytes,
                "hottest_over_mean": skew.hottest_over_mean_L.tolist(),
                "busier_half_share": skew.busier_half_share_L.tolist(),
            },
        )
