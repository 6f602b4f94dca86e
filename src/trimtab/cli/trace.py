"""`trimtab trace`: inspect routing traces and make synthetic ones; see also `trace_import`, `trace_export`."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
from rich.console import Console

from trimtab.cli import trace_export, trace_import
from trimtab.cli.options import add_option, add_output, add_trace, positive
from trimtab.cli.output import write_figures
from trimtab.errors import InputError
from trimtab.report.tables import skew_table, trace_facts
from trimtab.trace import PRESETS, TraceReader, id_dtype, synthesize_preset, write_trace
from trimtab.trace.statistics import layer_skew


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "trace",
        description="Work with routing traces.",
        examples=["trimtab trace info out/demo/routing", "trimtab trace import rollout.jsonl -o out/rollout.parquet"],
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    info = actions.add_parser(
        "info",
        help="show contents and skew of a trace",
        description="Show the contents of a routing trace and how unevenly its experts are used.",
        examples=["trimtab trace info out/demo/routing/step-00000.parquet"],
    )
    add_trace(info)
    add_option(info, "--json")
    info.set_defaults(run=run_info)
    synth = actions.add_parser(
        "synth",
        help="make a synthetic trace with realistic skew",
        description="Make a synthetic routing trace. Presets: rl-math (two close subjects, strong skew), rl-mixed "
        "(four subjects), spike (rl-mixed, but some blocks of sequences go to 1, 4 or 16 experts), uniform (no skew).",
        examples=["trimtab trace synth rl-math -o out/rl-math.parquet --sequences 512 --experts 256"],
    )
    synth.add_argument("preset", choices=tuple(PRESETS), metavar="PRESET", help=", ".join(PRESETS))
    add_output(synth, "the trace (.parquet)")
    add_option(synth, "--sequences", type=positive, default=256, help="sequences of each step")
    add_option(synth, "--mean-length", type=positive, default=512, help="mean tokens of a sequence")
    add_option(synth, "--max-length", type=positive, unset="twice the mean", help="most tokens of a sequence")
    add_option(synth, "--layers", default=8)
    add_option(synth, "--experts", type=positive, default=128, help="experts of a layer")
    add_option(synth, "--top-k", default=8)
    add_option(synth, "--steps", type=positive, default=1)
    add_option(synth, "--seed", default=0)
    synth.set_defaults(run=run_synth)
    trace_import.add(actions)
    trace_export.add(actions)


def run_info(options: argparse.Namespace) -> None:
    reader = TraceReader(options.trace)
    skew, unknown = layer_skew(reader)
    figures = {
        "schema": "trimtab-trace-info-1",
        "trace": reader.name,
        "model": reader.empty.model,
        "layers": reader.empty.num_layers,
        "experts": reader.empty.num_experts,
        "top_k": reader.empty.top_k,
        "sequences": len(reader.facts.lengths),
        "tokens": int(reader.facts.lengths.sum()),
        "steps": np.unique(reader.facts.steps).tolist(),
        "domains": np.unique(reader.facts.domains).tolist(),
        "unknown_routes": unknown,
        "file_bytes": sum(file.stat().st_size for file in reader.files),
        "hottest_over_mean": skew.hottest_over_mean_L.tolist(),
        "busier_half_share": skew.busier_half_share_L.tolist(),
    }
    write_figures(options, figures).print(trace_facts(reader, unknown), skew_table(reader.empty, skew))


def run_synth(options: argparse.Namespace) -> None:
    _check_size(options)
    trace = synthesize_preset(
        PRESETS[options.preset],
        num_sequences=options.sequences,
        mean_length=options.mean_length,
        max_length=options.max_length or 2 * options.mean_length,
        num_layers=options.layers,
        num_experts=options.experts,
        top_k=options.top_k,
        num_steps=options.steps,
        seed=options.seed,
    )
    write_trace(trace, options.output)
    Console(highlight=False).print(trace_facts(TraceReader(options.output)))


def _check_size(options: argparse.Namespace) -> None:
    tokens = options.sequences * options.steps * options.mean_length
    needed = tokens * options.layers * options.top_k * id_dtype(options.experts).itemsize
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise InputError(
            f"{tokens:,} tokens need {needed / 1e9:,.0f} GB of expert ids; this machine has {memory / 1e9:,.0f} GB"
        )
