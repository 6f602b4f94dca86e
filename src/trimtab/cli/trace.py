"""`trimtab trace`: inspect routing traces, make synthetic ones, and convert them from and to other formats."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.api.import_dump import import_dump, read_dump
from trimtab.cli.options import add_options, add_output, add_trace, positive, whole
from trimtab.cli.output import progress_shown, write_figures
from trimtab.cli.signatures import add_arguments, given
from trimtab.console import console
from trimtab.errors import InputError
from trimtab.figures import plural
from trimtab.files import is_stream, write_atomically
from trimtab.planner.placement.serving_placement import count_parts, fill_slots, sglang_map, slot_loads
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.rollout_placement import count_steps, judge_placements
from trimtab.report.number_text import bytes_text
from trimtab.report.tables import skew_table, terminal_facts, trace_facts
from trimtab.trace import PRESETS, RoutingTrace, TraceReader, id_dtype, synthesize_preset, write_trace
from trimtab.trace.exports.megatron import write_megatron
from trimtab.trace.formats.importing import FORMATS
from trimtab.trace.formats.normalise import Summary
from trimtab.trace.numbering import Numbering
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
    add_import(actions)
    add_export(actions)
    renumber = actions.add_parser(
        "renumber",
        help="the same routes by the expert ids of a renumbered checkpoint",
        description="Map the expert ids of a trace to those of a checkpoint that trimtab renumber wrote, or back.",
        examples=["trimtab trace renumber out/rollout.parquet --checkpoint models/qwen3-ep32 -o out/mapped.parquet"],
    )
    add_trace(renumber)
    add_options(renumber, "--checkpoint", type=Path, required=True, metavar="FOLDER", help="whose ids are wanted")
    add_options(
        renumber, "--recorded-by", type=Path, metavar="FOLDER", unset="what the trace says, else first ids",
        help="checkpoint that recorded the trace",
    )  # fmt: skip
    add_output(renumber, "the trace (.parquet)")
    renumber.set_defaults(run=run_renumber)


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


def run_renumber(options: argparse.Namespace) -> None:
    for folder in filter(None, (options.checkpoint, options.recorded_by)):
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; expected a checkpoint")
    reader, wanted = TraceReader(options.trace), Numbering.of_checkpoint(options.checkpoint)
    recorded = Numbering.of_checkpoint(options.recorded_by) if options.recorded_by else reader.empty.numbering
    chunks = (replace(chunk, numbering=recorded) for chunk in reader.chunks())
    write_trace((chunk.in_numbering(wanted) for chunk in chunks), options.output)
    if not is_stream(options.output):
        console().print(trace_facts(TraceReader(options.output)))


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


log = logging.getLogger("trimtab")


def add_import(actions: Any) -> None:
    parser = actions.add_parser(
        "import",
        help="convert routing that a framework recorded",
        description="Convert routing that an RL or serving framework recorded into a routing trace. "
        f"Formats: {', '.join(FORMATS)}.",
        examples=["trimtab trace import rollout.jsonl -o out/rollout.parquet --model qwen3-30b-a3b"],
    )
    parser.add_argument(
        "source", type=Path, nargs="+", metavar="SOURCE", help="files, folders or patterns of one dump, in order"
    )
    add_output(parser, "the trace (.parquet)")
    add_arguments(parser, import_dump)
    parser.set_defaults(run=run_import)


def run_import(options: argparse.Namespace) -> None:
    screen, start, last_step = console(), time.perf_counter(), 0
    parts, summary = read_dump(tuple(options.source), vars(options))
    with progress_shown() as update:

        def watched() -> Iterator[RoutingTrace]:
            nonlocal last_step
            for part in parts:
                last_step = max(last_step, int(part.steps.max(initial=0)))
                update(f"{summary.format}: {summary.tokens:,} tokens")
                yield part

        write_trace(watched(), options.output, notes=lambda: summary.notes)
    seconds = time.perf_counter() - start
    if not last_step and {"step", "step_from"}.isdisjoint(vars(options)):
        log.info("no step is recorded, so all sequences are of step 0; --step-from takes steps from files' names")
    if not is_stream(options.output):
        screen.print(trace_facts(TraceReader(options.output), summary.unknown_routes))
    screen.print(terminal_facts(_rows(summary, seconds), "Imported"))
    for note in summary.notes:
        log.info("%s", note)


def _rows(summary: Summary, seconds: float) -> list[tuple[str, str]]:
    rows = [("format", summary.format), ("time", f"{seconds:.1f} s")]
    if summary.unknown_rows:
        rows.append(("without any route", f"{summary.unknown_rows:,} tokens"))
    if summary.fills:
        fills = [f"{count:,} of {'other' if fill is None else fill}" for fill, count in summary.fills.items()]
        rows.append(("rows of equal ids", f"{', '.join(fills)}: no route of their layer"))
    if summary.agreement is not None:
        rows.append(("prompts agree", f"{summary.agreement:.1%} of their routes, between answers to the same prompt"))
    return rows + [("left out", f"{count:,} {what}") for what, count in summary.dropped.items()]


def add_export(actions: Any) -> None:
    parser = actions.add_parser(
        "export",
        help="write a trace for other tools, or a placement for a rollout engine",
        description="Write a routing trace as Megatron's JSON lines, or make an expert placement from it, which "
        "SGLang's --init-expert-location reads.",
        examples=[
            "trimtab trace export rollout.parquet --to sglang-placement --ranks 8 --redundant 16 -o placement.json",
            "trimtab trace export rollout.parquet --to megatron -o trace.jsonl",
        ],
    )
    add_trace(parser)
    add_options(parser, "--to", choices=("megatron", "sglang-placement"), required=True, help="format to write")
    add_output(parser, "the trace or placement")
    add_options(parser, "--step", unset="all; a placement takes all")
    add_options(parser, "--ranks", unset="none; required for a placement")
    add_options(parser, "--ranks-per-node", unset="all")
    add_options(
        parser, "--redundant", type=whole, unset="0", help="placement: redundant experts of a layer, over all ranks"
    )
    add_options(parser, "--num-layers", unset="placement: up to the last of the trace")
    parser.set_defaults(run=run_export)


def run_export(options: argparse.Namespace) -> None:
    placing = options.to == "sglang-placement"
    for name in ("ranks", "ranks_per_node", "redundant", "num_layers"):
        if not placing and getattr(options, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} is for a placement; --to megatron writes the trace itself")
    trace = TraceReader(options.trace)
    if not placing:
        write_megatron(trace.read(options.step), options.output)
        shown = []
    else:
        shown = _place(options, trace)
    if not is_stream(options.output):
        shown = [*shown, ("size", bytes_text(options.output.stat().st_size))]
    console().print(terminal_facts([("form", options.to), *shown], str(options.output)))


def _place(options: argparse.Namespace, trace: TraceReader) -> list[tuple[str, str]]:
    """Make and write a placement. Returns the facts to print."""
    if options.ranks is None:
        raise InputError(f"--to {options.to} needs --ranks, the ranks of the engine's expert parallelism")
    if options.step is not None:
        raise InputError("--step is for traces; a placement is made from all of its trace")
    if options.output.suffix != ".json":
        raise InputError(f"{options.output}: SGLang takes a file for a placement only if it is named *.json")
    ranks, nodes_of, redundant = options.ranks, options.ranks_per_node or options.ranks, options.redundant or 0
    layers, experts = trace.empty.layer_indices, trace.empty.num_experts
    counts_MLE = count_parts(trace)
    slots_LP = fill_slots(counts_MLE, experts + redundant, ranks, nodes_of)
    content = sglang_map(slots_LP, layers, experts, options.num_layers)
    write_atomically(options.output, json.dumps(content) + "\n")
    usual_LP = np.broadcast_to(np.arange(experts + redundant) % experts, slots_LP.shape)
    before, after = (float(max_over_mean(slot_loads(counts_MLE, each, ranks)).mean()) for each in (usual_LP, slots_LP))
    return [
        ("placement", f"{experts} experts and {redundant} redundant ones of a layer on {ranks} ranks"),
        ("busiest rank / mean", f"{after:.3f}; in the engine's own order {before:.3f}"),
        *_later(trace, experts + redundant, ranks, nodes_of),
    ]


def _later(trace: TraceReader, slots: int, ranks: int, nodes_of: int) -> list[tuple[str, str]]:
    """Placements of a step, judged on routing that they were not made from."""
    if trace.facts.lengths.size < 2:
        return []
    usual, (_, *later), after = judge_placements(count_steps(trace), slots, ranks, nodes_of)
    usual_text = f"in the engine's own order {usual:.3f}"
    if len(np.unique(trace.facts.steps)) == 1:
        return [("held out", f"{later[0]:.3f} on the second half, if made from the first; {usual_text}")]
    ages = ", ".join(f"{value:.3f} after {plural(age, 'step')}" for age, value in enumerate(later, 1))
    pays = f"not within {plural(len(later), 'step')}" if after is None else f"after {plural(after, 'step')}"
    return [("held out", f"{ages}; {usual_text}"), ("a refresh pays", pays)]
