"""`trimtab trace export`: convert a trace to other formats, or make a placement for a rollout engine from it."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from trimtab.cli.options import add_options, add_output, add_trace, whole
from trimtab.console import console
from trimtab.errors import InputError
from trimtab.files import is_stream, write_atomically
from trimtab.planner.placement.serving_placement import count_parts, engine_map, fill_slots, slot_loads
from trimtab.planner.plan.workload import max_over_mean
from trimtab.report.number_text import bytes_text, plural
from trimtab.report.tables import facts
from trimtab.sizing.held_out import later_max_over_mean, refresh_after, steps_parts
from trimtab.trace import TraceReader
from trimtab.trace.exports.arrays import write_npz, write_safetensors
from trimtab.trace.exports.megatron import write_megatron

TRACES = {"megatron": write_megatron, "numpy": write_npz, "safetensors": write_safetensors}
PLACEMENTS = ("sglang-placement", "vllm-placement")


def add(actions: Any) -> None:
    parser = actions.add_parser(
        "export",
        help="write a trace for other tools, or a placement for a rollout engine",
        description="Write a routing trace as Megatron's JSON lines, numpy's .npz or safetensors; or make an expert "
        "placement from it. sglang-placement is read by SGLang's --init-expert-location. vllm-placement is a list of "
        "physical experts for each MoE layer, as proposed for vLLM (pull request 49572); no release of vLLM reads it.",
        examples=[
            "trimtab trace export rollout.parquet --to sglang-placement --ranks 8 --redundant 16 -o placement.json",
            "trimtab trace export rollout.parquet --to megatron -o trace.jsonl",
        ],
    )
    add_trace(parser)
    add_options(parser, "--to", choices=(*TRACES, *PLACEMENTS), required=True, help="format to write")
    add_output(parser, "the trace or placement")
    add_options(parser, "--step", unset="all; placements take all")
    add_options(parser, "--ranks", unset="none; required for placements")
    add_options(parser, "--ranks-per-node", unset="all")
    add_options(
        parser, "--redundant", type=whole, unset="0", help="placement: redundant experts of a layer, over all ranks"
    )
    add_options(parser, "--num-layers", unset="up to the last of the trace; only for sglang-placement")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    placing = options.to in PLACEMENTS
    for name in ("ranks", "ranks_per_node", "redundant", "num_layers"):
        if not placing and getattr(options, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} is for placements; --to {options.to} writes the trace itself")
    trace = TraceReader(options.trace)
    if not placing:
        TRACES[options.to](trace.read(options.step), options.output)
        shown = []
    else:
        shown = _place(options, trace)
    if not is_stream(options.output):
        shown = [*shown, ("size", bytes_text(options.output.stat().st_size))]
    console().print(facts([("form", options.to), *shown], str(options.output)))


def _place(options: argparse.Namespace, trace: TraceReader) -> list[tuple[str, str]]:
    """Make and write a placement. Returns the facts to print."""
    if options.ranks is None:
        raise InputError(f"--to {options.to} needs --ranks, the ranks of the engine's expert parallelism")
    if options.step is not None:
        raise InputError("--step is for traces; a placement is made from all of its trace")
    if options.to == "sglang-placement" and options.output.suffix != ".json":
        raise InputError(f"{options.output}: SGLang takes a file for a placement only if it is named *.json")
    ranks, nodes_of, redundant = options.ranks, options.ranks_per_node or options.ranks, options.redundant or 0
    layers, experts = trace.empty.layer_indices, trace.empty.num_experts
    num_layers = options.num_layers or int(layers.max()) + 1
    if num_layers <= layers.max():
        raise InputError(f"--num-layers is {num_layers}; the trace has decoder layer {layers.max()}")
    if options.to == "vllm-placement" and options.num_layers is not None:
        raise InputError("--num-layers is for sglang-placement; vLLM's maps have MoE layers only")
    counts_MLE = count_parts(trace)
    slots_LP = fill_slots(counts_MLE, experts + redundant, ranks, nodes_of)
    content = engine_map(options.to.removesuffix("-placement"), slots_LP, layers, num_layers, experts)
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
    steps = steps_parts(trace)
    (_, *later), usual = later_max_over_mean(steps, slots, ranks, nodes_of)
    if len(np.unique(trace.facts.steps)) == 1:
        text = f"{later[0]:.3f} on the second half, if made from the first; in the engine's own order {usual:.3f}"
        return [("held out", text)]
    ages = ", ".join(f"{value:.3f} after {plural(age, 'step')}" for age, value in enumerate(later, 1))
    after = refresh_after([0.0, *later])
    pays = f"not within {plural(len(later), 'step')}" if after is None else f"after {plural(after, 'step')}"
    return [("held out", f"{ages}; in the engine's own order {usual:.3f}"), ("a refresh pays", pays)]
