"""`trimtab bench`: reproduce the figures of README and docs."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from trimtab.cli.options import check_outputs, need_extra, positive, whole
from trimtab.errors import InputError
from trimtab.files import write_json
from trimtab.planner import Placement
from trimtab.policies import POLICIES
from trimtab.trace import PRESETS

PRESET_NAMES = tuple(PRESETS)


def add(commands: Any) -> None:
    parser = commands.add_parser("bench", description="Measure Trimtab.")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    runtime = benches.add_parser(
        "runtime",
        help="step time of the runtime: static, trimtab, balanced, and transformers' own expert parallelism",
        description="Time one micro-step (forward, backward, complete gradients) of a 4-layer MoE on local ranks: "
        "static and trimtab on skewed routing; trimtab and transformers' own all-to-all on even routing. On several "
        "nodes also node-blind: trimtab, planning as if all ranks were on one.",
        epilog="example: trimtab bench runtime --json out/bench-runtime.json",
    )
    runtime.add_argument("--ranks", type=positive, metavar="N", help="local ranks in all (default: 2 on each node)")
    runtime.add_argument("--nodes", type=positive, default=1, metavar="N", help="nodes of the ranks (default: 1)")
    runtime.add_argument(
        "--link-mbit",
        type=positive,
        metavar="N",
        help="make the nodes network namespaces on links of N Mbit/s (Linux, root; default: nodes only in planning)",
    )
    runtime.add_argument("--tokens", type=positive, default=2048, metavar="N", help="tokens of a rank (default: 2048)")
    runtime.add_argument("--rounds", type=positive, default=40, metavar="N", help="alternating rounds (default: 40)")
    runtime.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    runtime.set_defaults(run=run_runtime)
    planner = benches.add_parser(
        "planner",
        help="balance, bytes, gap to the bound and planning time of every balancer",
        description="Plan synthetic steps with every balancer, on its own recipe and on equal terms (same homes, "
        "schedule and slots), and compare the plans with LP bounds.",
        epilog="example: trimtab bench planner --sizes 8/128 --presets rl-mixed --json out/bench-planner.json",
    )
    planner.add_argument(
        "--sizes", type=_size, nargs="+", metavar="RANKS/EXPERTS", help="cases (8/128 16/128 32/128 64/256)"
    )
    planner.add_argument(
        "--presets",
        nargs="+",
        choices=PRESET_NAMES,
        metavar="NAME",
        help="uniform, spike, ... (default: rl-math rl-mixed)",
    )
    planner.add_argument("--slots", type=positive, nargs="+", metavar="N", help="slots a rank (default: 1 2)")
    planner.add_argument("--policies", nargs="+", choices=sorted(POLICIES), metavar="NAME", help="balancers (all)")
    planner.add_argument("--layers", type=positive, metavar="N", help="layers (default: 8)")
    planner.add_argument("--seed", type=whole, metavar="N", help="of the routing (default: 0)")
    planner.add_argument("--frontier", type=Path, metavar="SVG", help="draw balance against bytes as a picture")
    planner.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    planner.set_defaults(run=run_planner)
    step = benches.add_parser(
        "step",
        help="time and memory of planning a whole step, and how they grow",
        description="Plan whole steps of 32 micro-steps: 32 ranks, 128 experts and 48 layers; then 256 ranks and 512 "
        "experts, and 1,024 of both, with fewer layers.",
        epilog="example: trimtab bench step --json out/bench-step.json",
    )
    step.add_argument("--preset", choices=PRESET_NAMES, default="rl-mixed", help="routing (default: rl-mixed)")
    step.add_argument("--largest", type=positive, default=1024, metavar="RANKS", help="largest size to run (1024)")
    step.add_argument("--threads", type=positive, default=1, metavar="N", help="layers planned at a time (default: 1)")
    step.add_argument("--seed", type=whole, default=0, metavar="N", help="of the routing (default: 0)")
    step.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    step.set_defaults(run=run_step)
    transfer = benches.add_parser(
        "transfer",
        help="cost of weight transfers, and expert compute saved by a plan, on one device",
        description="On one GPU (on the CPU with smaller sizes): experts' compute against tokens an expert, host-path "
        "copies beside it, peer pulls between processes, a planned layer that must not wait for the GPU, and the "
        "slowest rank's compute with and without a plan.",
        epilog="example: trimtab bench transfer --json out/bench-transfer.json",
    )
    transfer.add_argument("--rounds", type=positive, default=20, metavar="N", help="alternating rounds (default: 20)")
    transfer.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    transfer.set_defaults(run=run_transfer)
    traces = benches.add_parser(
        "traces",
        help="time, memory and size of importing and analyzing a large dump",
        description="Write a dump as vLLM's server would (48 layers, top-8 of 128 experts), import it and analyze it.",
        epilog="example: trimtab bench traces --json out/bench-traces.json",
    )
    traces.add_argument("--tokens", type=positive, default=1_000_000, metavar="N", help="of the dump (1000000)")
    traces.add_argument("--rounds", type=positive, default=5, metavar="N", help="runs of each command (default: 5)")
    traces.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    traces.set_defaults(run=run_traces)
    capture = benches.add_parser(
        "capture",
        help="cost of recording the routing of a forward and a generation in transformers",
        description="Time forward and generation of a 16-layer MoE, plain and recorded in turns.",
        epilog="example: trimtab bench capture --json out/bench-capture.json",
    )
    capture.add_argument("--rounds", type=positive, default=60, metavar="N", help="alternating pairs (default: 60)")
    capture.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    capture.set_defaults(run=run_capture)


def run_runtime(options: argparse.Namespace) -> None:
    need_extra("torch", "transformers")
    from trimtab.benchmarks.bench_runtime import RuntimeBenchmark, run_benchmark
    from trimtab.launch import launch, run_on_nodes, torchrun_ranks

    nodes, link_mbit = options.nodes, options.link_mbit
    ranks = torchrun_ranks() or options.ranks or 2 * nodes
    if ranks % nodes:
        raise InputError(f"--nodes is {nodes}; it should divide the {ranks} ranks")
    if link_mbit and nodes == 1:
        raise InputError("--link-mbit is for links between nodes; --nodes should be 2 or more")
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks // nodes))
    settings = RuntimeBenchmark(options.tokens, options.rounds, options.json, ranks_per_node, link_mbit)
    Placement.contiguous(settings.layers, settings.experts, ranks)
    if link_mbit and not torchrun_ranks():
        command = [sys.executable, "-m", "trimtab.cli.main", *options.arguments]
        run_on_nodes(command, nodes=nodes, ranks_per_node=ranks_per_node, link_mbit=link_mbit)
    else:
        launch(run_benchmark, (settings,), ranks=ranks)


def run_planner(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_planner import PlannerBenchmark, print_figures, run_benchmark

    if options.frontier:
        need_extra("matplotlib", extra="dev")
    given = {field.name: getattr(options, field.name, None) for field in fields(PlannerBenchmark)}
    settings = PlannerBenchmark(**{name: _tuple(value) for name, value in given.items() if value is not None})
    for ranks, experts in settings.sizes:
        Placement.contiguous(1, experts, ranks)
    figures = run_benchmark(settings, frontier=options.frontier is not None)
    print_figures(figures, Console(highlight=False))
    if options.frontier:
        from trimtab.benchmarks.planner_frontier import draw_frontier

        draw_frontier(figures["frontier"], options.frontier)
    if options.json:
        write_json(options.json, figures)


def run_traces(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_traces import print_figures, run_benchmark

    check_outputs(options.json)
    figures = run_benchmark(options.tokens, options.rounds)
    if options.json:
        write_json(options.json, {"schema": "trimtab-bench-traces-1"} | figures)
    print_figures(figures, Console(highlight=False))


def run_step(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_step import SIZES, print_figures, run_benchmark

    sizes = tuple(size for size in SIZES if size.ranks <= options.largest)
    if not sizes:
        raise InputError(f"--largest is {options.largest}; the smallest step has {SIZES[0].ranks} ranks")
    rows = run_benchmark(sizes, options.preset, threads=options.threads, seed=options.seed)
    print_figures(rows, Console(highlight=False))
    if options.json:
        write_json(options.json, {"schema": "trimtab-bench-step-1", "seed": options.seed, "sizes": rows})


def run_transfer(options: argparse.Namespace) -> None:
    need_extra("torch")
    from trimtab.benchmarks.bench_transfer import print_figures, run_benchmark

    figures = run_benchmark(options.rounds)
    print_figures(figures, Console(highlight=False))
    if options.json:
        write_json(options.json, figures)


def run_capture(options: argparse.Namespace) -> None:
    need_extra("torch", "transformers")
    from trimtab.benchmarks.bench_capture import CaptureBenchmark, print_figures, run_benchmark

    figures = run_benchmark(CaptureBenchmark(options.rounds))
    print_figures(figures, Console(highlight=False))
    if options.json:
        write_json(options.json, figures)


def _size(text: str) -> tuple[int, int]:
    ranks, _, experts = text.partition("/")
    try:
        return positive(ranks), positive(experts)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} should be ranks/experts, such as 8/128") from None


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
