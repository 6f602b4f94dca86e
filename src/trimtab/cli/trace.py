"""`trimtab trace`: inspect routing traces and make synthetic ones; see also `trace_import`, `trace_export`."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import numpy as np

from trimtab.cli import trace_export, trace_import
from trimtab.cli.options import add_options, add_output, add_trace, given, positive
from trimtab.cli.output import write_figures
from trimtab.console import console
from trimtab.errors import InputError
from trimtab.files import is_stream
from trimtab.report.number_text import bytes_text
from trimtab.report.tables import skew_table, trace_facts
from trimtab.trace import PRESETS, TraceReader, id_dtype, synthesize_preset, write_trace
from trimtab.trace.counting import layer_skew


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
    add_options(info, "--json")
    info.set_defaults(run=run_info)
    synth = actions.add_parser(
        "synth",
        help="make a synthetic trace with realistic skew",
        description="Make a synthetic routing trace. Presets are named after the model and the kind of text whose "
        "published skew they match (experiments/presets); spike and uniform are test cases: hot spots, and no skew.",
        examples=["trimtab trace synth qwen3-30b-math -o out/math.parquet --sequences 512"],
    )
    synth.add_argument("preset", choices=tuple(PRESETS), metavar="PRESET", help=", ".join(PRESETS))
    add_output(synth, "the trace (.parquet)")
    option = partial(add_options, synth)
    option("--sequences", dest="num_sequences", type=positive, default=256, help="sequences of each step")
    option("--mean-length", type=positive, default=512, help="mean tokens of a sequence")
    option("--max-length", type=positive, unset="twice the mean", help="most tokens of a sequence")
    option("--layers", dest="num_layers", default=8)
    option("--experts", dest="num_experts", type=positive, unset="those of the model", help="experts of a layer")
    option("--top-k", unset="that of the model")
    option("--expert-groups", type=positive, default=1, help="groups that the router limits a token's experts to")
    option("--groups-per-token", type=positive, default=1, help="of these groups, those that a token may use")
    option("--steps", dest="num_steps", type=positive, default=1)
    option("--seed", default=0)
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
    if options.max_length is None:
        options.max_length = 2 * options.mean_length
    options.preset = PRESETS[options.preset]
    num_experts, top_k = options.num_experts or options.preset.num_experts, options.top_k or options.preset.top_k
    tokens = options.num_sequences * options.num_steps * options.mean_length
    needed = tokens * options.num_layers * top_k * id_dtype(num_experts).itemsize
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise InputError(
            f"{tokens:,} tokens need {bytes_text(needed)} of expert ids; this machine has {bytes_text(memory)}"
        )
    write_trace(synthesize_preset(**given(options, synthesize_preset)), options.output)
    if not is_stream(options.output):
        console().print(trace_facts(TraceReader(options.output)))
