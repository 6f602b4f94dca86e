"""`trimtab bench`: reproduce the figures of README and docs."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from trimtab.benchmarks.bench_papers import PapersBenchmark
from trimtab.benchmarks.bench_planner import PlannerBenchmark
from trimtab.benchmarks.tppo_settings import TppoBenchmark
from trimtab.cli.options import add_options, given, need_extra, positive, whole
from trimtab.cli.output import write_figures
from trimtab.errors import InputError
from trimtab.planner import Placement
from trimtab.policies import POLICIES
from trimtab.rank_variables import rank_variable, torchrun_ranks
from trimtab.rl.config import ValueModelName
from trimtab.trace import PRESETS


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench", description="Measure Trimtab.", examples=["trimtab bench planner --json out/bench-planner.json"]
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCHMARK")
    runtime = benches.add_parser(
        "runtime",
        help="step time of the runtime: static, trimtab, balanced, and transformers' own expert parallelism",
        description="Time one micro-step (forward, backward, complete gradients) of a 4-layer MoE on local ranks: "
        "static and trimtab on the skewed routing of several seeds; trimtab and transformers' own all-to-all on even "
        "routing. On several nodes also node-blind: trimtab with a plan that ignores node boundaries. With --link-mbit "
        "the nodes are network namespaces; without it they exist only in planning.",
        examples=[
            "trimtab bench runtime --json out/bench-runtime.json",
            "trimtab bench runtime --nodes 2 --link-mbit 500 --json out/nodes.json",
        ],
    )
    add_options(runtime, "--ranks", unset="2 on each node")
    add_options(runtime, "--nodes", default=1)
    add_options(runtime, "--link-mbit", unset="not limited")
    add_options(runtime, "--tokens", type=positive, default=2048, help="tokens of a rank")
    add_options(runtime, "--seeds", type=positive, default=8, help="skewed routings: those of seeds 0 to N - 1")
    add_options(runtime, "--rounds", default=5, help="timed repetitions of every variant on every seed's routing")
    runtime.set_defaults(run=run_runtime, needs=("torch", "transformers"))
    planner = benches.add_parser(
        "planner",
        help="balance, bytes, gap to the bound and planning time of every balancer",
        description="Plan synthetic steps with every balancer, on its own recipe and on equal terms (same homes, "
        "schedule and slots), and compare the plans with LP bounds.",
        examples=["trimtab bench planner --sizes 8/128 --preset qwen3-30b-mixed --json out/bench-planner.json"],
    )
    option = partial(add_options, planner, of=PlannerBenchmark)
    sizes = [f"{ranks}/{experts}" for ranks, experts in PlannerBenchmark.sizes]
    option("--sizes", type=_size, nargs="+", metavar="SIZE", unset=" ".join(sizes), help="cases, as ranks/experts")
    option("--preset", nargs="+", dest="presets", choices=tuple(PRESETS))
    option("--slots", type=positive, nargs="+")
    option("--policy", nargs="+", dest="policies", choices=tuple(POLICIES), unset="all")
    option("--layers", "--seed")
    add_options(planner, "--frontier", type=Path, help="draw balance against bytes to FILE (.svg)")
    planner.set_defaults(run=run_planner)
    papers = benches.add_parser(
        "papers",
        help="simulated step time of every balancer in 48 cases, and the distance to a lower bound",
        description="Simulate steps of five models on 8 to 128 ranks with every balancer, on its own recipe and with "
        "planning charged, and compare trimtab with the best other one and with a lower bound.",
        examples=[
            "trimtab bench papers --json out/bench-step-time.json",
            "trimtab bench papers --seeds 100 --only deepseek-v3-64",
        ],
    )
    option = partial(add_options, papers, of=PapersBenchmark)
    option("--seeds", type=whole, nargs="+", help="random seeds of the routing")
    option("--only", unset="all", help="run the cases that have NAME in their name")
    option("--processes", type=positive, help="cases simulated at the same time, at most one on each core")
    papers.set_defaults(run=run_papers)
    step = benches.add_parser(
        "step",
        help="time and memory of planning a whole step, and how they grow",
        description="Plan whole steps of 32 micro-steps: 32 ranks, 128 experts and 48 layers; then 256 ranks and 512 "
        "experts, and 1,024 of both, with fewer layers.",
        examples=["trimtab bench step --json out/bench-step.json"],
    )
    add_options(step, "--preset", choices=tuple(PRESETS), default="qwen3-30b-mixed")
    add_options(step, "--largest", type=positive, default=1024, help="ranks of the largest size to run")
    add_options(step, "--threads", type=positive, default=1, help="layers planned at a time")
    add_options(step, "--seed", default=0)
    step.set_defaults(run=run_step)
    megatron = benches.add_parser(
        "megatron",
        help="step time of a Megatron-core model with and without Trimtab",
        description="Time Megatron's forward-backward function (all micro-batches, complete gradients) of a small "
        "GPTModel on 2 CPU ranks: plain and planned, each on even and on skewed routing. Planning and refreshing of "
        "weights are part of the step. Plain Megatron replays the same routing by its RouterReplay.",
        examples=["trimtab bench megatron --json out/bench-megatron.json"],
    )
    add_options(megatron, "--pairs", type=positive, default=40, help="timed rounds of all four variants")
    add_options(megatron, "--seeds", type=positive, default=8, help="skewed routings: those of seeds 0 to N - 1")
    add_options(
        megatron, "--dispatcher", choices=("megatron", "trimtab"), default="megatron",
        help="what sends rows in planned steps",
    )  # fmt: skip
    add_options(
        megatron, "--rehome", action="store_true",
        help="instead, train on drifting routing: plain, EPLB's homes, mode rehome, and mode plan",
    )  # fmt: skip
    megatron.set_defaults(run=run_megatron, needs=("torch",))
    planning = benches.add_parser(
        "planning",
        help="what planning in the background adds to the time of a step",
        description="Time steps of a small model on CPU ranks of one thread: replicas are planned beforehand, by a "
        "thread while the step runs, or as a whole before its first micro-step.",
        examples=["trimtab bench planning --json out/bench-planning.json"],
    )
    add_options(planning, "--pairs", type=positive, default=40, help="timed rounds of all variants")
    add_options(planning, "--ranks", type=positive, default=2)
    add_options(planning, "--tokens", type=positive, default=512, help="tokens of a rank in a micro-step")
    planning.set_defaults(run=run_planning, needs=("torch", "transformers"))
    live = benches.add_parser(
        "live",
        help="balancing without recorded routing: stragglers as in FEPLB's tables, and step time",
        description="Stragglers on 2, 4 and 8 ranks in tokens and in CPU time of expert products, ranks one after "
        "another: before, with FasterMoE's shadows, the runtime's live policies feplb, quota and predict, and with "
        "foresight. Then time steps on 2 CPU ranks: live policies and foresight against no balancing.",
        examples=["trimtab bench live --json out/bench-live.json"],
    )
    add_options(live, "--pairs", type=positive, default=40, help="timed rounds of all variants")
    add_options(live, "--seeds", type=positive, default=3, help="routings: those of seeds 0 to N - 1")
    add_options(
        live, "--tokens", type=positive, default=1024, help="tokens of a rank in a micro-step of the timed steps"
    )
    live.set_defaults(run=run_live, needs=("torch", "transformers"))
    tppo = benches.add_parser(
        "t-ppo",
        help="PPO, GRPO and T-PPO on long, uneven responses: decode steps, accuracy, time",
        description="Train the task counting with PPO, GRPO and T-PPO from the same warm start on 2 CPU ranks, until "
        "each has trained the policy on the same number of tokens. Compares decode steps per trained token, held-out "
        "accuracy and time, and how the routing of earlier windows changes log-probabilities.",
        examples=["trimtab bench t-ppo --json out/bench-tppo.json --picture out/bench-tppo.svg"],
    )
    option = partial(add_options, tppo, of=TppoBenchmark)
    option("--seeds", type=positive, help="runs of each algorithm: those of seeds 0 to N - 1")
    option("--trained-tokens", type=positive, help="that the policy is trained on in each run")
    option("--places", type=positive, help="responses that are generated together")
    option("--window", type=positive, help="most new tokens of a response in a step of T-PPO")
    option("--value-model", choices=get_args(ValueModelName), help="of PPO and T-PPO, as in trimtab train")
    option("--warm-start-steps", type=whole, help="supervised steps before RL")
    add_options(tppo, "--picture", type=Path, help="draw accuracy over decode steps and time to FILE (.svg)")
    tppo.set_defaults(run=run_tppo, needs=("torch", "transformers"))
    bind = benches.add_parser(
        "bind",
        help="what binding micro-steps to their plan costs the training thread, and its upload",
        description="Run steps whose layers take their estimated time on an H100, and time how long the training "
        "thread waits for the tables of rows, which another thread makes.",
        examples=["trimtab bench bind --json out/bench-bind.json", "trimtab bench bind --tokens 31744"],
    )
    add_options(bind, "--tokens", type=positive, default=8192, help="tokens of a rank in a micro-step")
    add_options(bind, "--layers", type=positive, default=48)
    add_options(bind, "--rounds", default=5)
    bind.set_defaults(run=run_function, needs=("torch",))
    transfer = benches.add_parser(
        "transfer",
        help="cost of weight transfers, and expert compute saved by a plan, on one device",
        description="On one GPU (on the CPU with smaller sizes): experts' compute against tokens an expert, host-path "
        "copies beside it, peer pulls between processes, a planned layer that must not wait for the GPU, and the "
        "slowest rank's compute with and without a plan.",
        examples=["trimtab bench transfer --json out/bench-transfer.json"],
    )
    add_options(transfer, "--rounds", default=20)
    transfer.set_defaults(run=run_function, needs=("torch",))
    traces = benches.add_parser(
        "traces",
        help="time, memory and size of importing and analyzing a large dump",
        description="Write a dump as vLLM's server would (48 layers, top-8 of 128 experts), import it and analyze it.",
        examples=["trimtab bench traces --json out/bench-traces.json"],
    )
    add_options(traces, "--tokens", type=positive, default=1_000_000, help="tokens of the dump")
    add_options(traces, "--rounds", default=5)
    traces.set_defaults(run=run_function)
    payload = benches.add_parser(
        "payload",
        help="size and speed of packed routing, beside int32, int16 and zstd",
        description="Bring synthetic routing of 48 layers, top-8 of 128 experts, from the rollout's int32 into bytes "
        "and back, a sequence at a time.",
        examples=["trimtab bench payload --json out/bench-payload.json"],
    )
    add_options(payload, "--tokens", type=positive, default=200_000, help="tokens of all sequences")
    add_options(payload, "--rounds", default=5)
    payload.set_defaults(run=run_function)
    observe = benches.add_parser(
        "observe",
        help="what observing a run costs its training thread, in time and memory",
        description="Hand the routing of a step (48 layers, top-8 of 128 experts) to an observer, as slime and verl "
        "hold it, and time the call, the observer's own thread, and a loop in Python beside it.",
        examples=["trimtab bench observe --json out/bench-observe.json"],
    )
    add_options(observe, "--tokens", type=positive, default=1_000_000, help="tokens of the step")
    add_options(observe, "--rounds", default=5)
    observe.set_defaults(run=run_function)
    capture = benches.add_parser(
        "capture",
        help="cost of recording the routing of a forward and a generation in transformers",
        description="Time forward and generation of a 16-layer MoE, plain and recorded in turns.",
        examples=["trimtab bench capture --json out/bench-capture.json"],
    )
    add_options(capture, "--rounds", default=60)
    capture.set_defaults(run=run_capture, needs=("torch", "transformers"))
    for bench in benches.choices.values():
        add_options(bench, "--json")


def run_runtime(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_runtime import RuntimeBenchmark, run_benchmark
    from trimtab.launch import launch, run_on_nodes

    nodes, link_mbit = options.nodes, options.link_mbit
    ranks = torchrun_ranks() or options.ranks or 2 * nodes
    if ranks % nodes:
        raise InputError(f"--nodes is {nodes}; it should divide the {ranks} ranks")
    if link_mbit and nodes == 1:
        raise InputError("--link-mbit is for links between nodes; --nodes should be 2 or more")
    ranks_per_node = rank_variable("LOCAL_WORLD_SIZE", ranks // nodes)
    settings = RuntimeBenchmark(options.tokens, options.rounds, options.json, ranks_per_node, link_mbit, options.seeds)
    Placement.contiguous(settings.layers, settings.experts, ranks)
    if link_mbit and not torchrun_ranks():
        command = [sys.executable, "-m", "trimtab.cli.main", *options.arguments]
        run_on_nodes(command, nodes=nodes, ranks_per_node=ranks_per_node, link_mbit=link_mbit)
    else:
        launch(run_benchmark, (settings,), ranks=ranks)


def run_megatron(options: argparse.Namespace) -> None:
    need_extra("megatron", extra="megatron")
    from trimtab.benchmarks.bench_megatron import run_benchmark
    from trimtab.benchmarks.bench_megatron_rehome import run_rehome_benchmark
    from trimtab.benchmarks.megatron_settings import MegatronBenchmark
    from trimtab.launch import launch

    settings = MegatronBenchmark(**given(options, MegatronBenchmark))
    launch(run_rehome_benchmark if settings.rehome else run_benchmark, (settings,), ranks=2)


def run_planning(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_planning import PlanningBenchmark, run_benchmark
    from trimtab.calibration.small_model import EXPERTS, SEQUENCE_LENGTH
    from trimtab.launch import launch

    settings = PlanningBenchmark(**given(options, PlanningBenchmark))
    if settings.tokens % SEQUENCE_LENGTH:
        raise InputError(f"--tokens is {settings.tokens}; it should be a multiple of {SEQUENCE_LENGTH}")
    Placement.contiguous(1, EXPERTS, settings.ranks)
    launch(run_benchmark, (settings,), ranks=settings.ranks)


def run_live(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_live import run_benchmark
    from trimtab.benchmarks.live_predictors import predictor_cases
    from trimtab.benchmarks.live_settings import LiveBenchmark
    from trimtab.benchmarks.live_stragglers import straggler_cases
    from trimtab.launch import launch

    settings = LiveBenchmark(**given(options, LiveBenchmark))
    if settings.tokens % settings.sequence_length:
        raise InputError(f"--tokens is {settings.tokens}; it should be a multiple of {settings.sequence_length}")
    launch(run_benchmark, (settings, straggler_cases(settings), predictor_cases(settings)), ranks=2)


def run_tppo(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_tppo import run_benchmark
    from trimtab.launch import launch

    if options.picture:
        need_extra("matplotlib", extra="dev")
    settings = TppoBenchmark(**given(options, TppoBenchmark))
    if settings.places % (2 * settings.samples):
        raise InputError(f"--places is {settings.places}; it should be a multiple of {2 * settings.samples}")
    launch(run_benchmark, (settings,), ranks=2)


def run_planner(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_planner import print_figures, run_benchmark

    if options.frontier:
        need_extra("matplotlib", extra="dev")
    settings = PlannerBenchmark(**given(options, PlannerBenchmark))
    for ranks, experts in settings.sizes:
        Placement.contiguous(1, experts, ranks)
    figures = run_benchmark(settings, frontier=options.frontier is not None)
    if options.frontier:
        from trimtab.benchmarks.planner_frontier import draw_frontier

        draw_frontier(figures["frontier"], options.frontier)
    print_figures(figures, write_figures(options, figures))


def run_papers(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_papers import print_figures, run_benchmark

    figures = run_benchmark(PapersBenchmark(**given(options, PapersBenchmark)))
    print_figures(figures, write_figures(options, figures))


def run_step(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_step import SIZES, print_figures, run_benchmark

    sizes = tuple(size for size in SIZES if size.ranks <= options.largest)
    if not sizes:
        raise InputError(f"--largest is {options.largest}; the smallest step has {SIZES[0].ranks} ranks")
    rows = run_benchmark(sizes, options.preset, threads=options.threads, seed=options.seed)
    figures = {"schema": "trimtab-bench-step-1", "seed": options.seed, "sizes": rows}
    print_figures(rows, write_figures(options, figures))


def run_function(options: argparse.Namespace) -> None:
    """Run a benchmark whose options are the arguments of its function."""
    module = import_module(f"trimtab.benchmarks.bench_{options.bench}")
    figures = module.run_benchmark(**given(options, module.run_benchmark))
    module.print_figures(figures, write_figures(options, figures))


def run_capture(options: argparse.Namespace) -> None:
    from trimtab.benchmarks.bench_capture import CaptureBenchmark, print_figures, run_benchmark

    figures = run_benchmark(CaptureBenchmark(options.rounds))
    print_figures(figures, write_figures(options, figures))


def _size(text: str) -> tuple[int, int]:
    ranks, _, experts = text.partition("/")
    try:
        return positive(ranks), positive(experts)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} should be ranks/experts, such as 8/128") from None
