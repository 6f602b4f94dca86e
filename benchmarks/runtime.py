"""`python -m benchmarks.runtime`: step time of the runtime with and without balancing, and its own cost.

Time one micro-step (forward, backward, complete gradients) of a 4-layer MoE on local ranks: static and trimtab on the
skewed routing of several seeds; trimtab and transformers' own all-to-all on even routing. On several nodes also
node-blind: trimtab with a plan that ignores node boundaries. With --link-mbit the nodes are network namespaces; without
it they exist only in planning.

Planning is not timed: in training it happens before the step. The variants alternate within one run. After that,
`trimtab` runs with each path of replica weights, to measure how much of the transfers is exposed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.harness import Figures, main, settings_of, show
from benchmarks.namespaces import run_on_nodes
from benchmarks.pairs import percentiles
from benchmarks.runtime_variants import Variant, build_variants, time_blocks
from benchmarks.tables import Columns, figure_table, interval, named_rows, quantity, with_interval
from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import BOOTSTRAP_SAMPLES, alternate, median_with_interval
from trimtab.calibration.calibration_settings import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    SEQUENCE_LENGTH,
    TOKENS,
    TOP_K,
    WIDTH,
    small_config,
)
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.errors import InputError
from trimtab.launch import launch
from trimtab.planner import Placement, Schedule, pack_by_length
from trimtab.rank_variables import rank_variable, torchrun_ranks
from trimtab.report.number_text import bytes_text, seconds
from trimtab.runtime import Session
from trimtab.trace import RoutingTrace, synthesize

Result = TypeVar("Result")
# Runs of a variant over all seeds: before the timed ones, for its time in MoE blocks, and with each path.
WARM_UP_RUNS = 3
MOE_RUNS = 5
PATH_RUNS = 10
PATH_FIGURES = ("exposed_s", "refresh_s", "cpu_s", "peer_bytes", "host_bytes", "gradient_bytes")
STEPS: Columns = {
    "variant": "{name}",
    "median step": quantity("median_s", seconds),
    "of it in MoE": quantity("moe_s", seconds),
    "CPU per rank": quantity("cpu_s_per_rank", seconds),
}
SEEDS: Columns = {
    "seed": "{seed}",
    "max/mean": lambda row: f"{statistics.mean(row['static_max_over_mean']):.2f}",
    "static": lambda row: seconds(row["median_s"]["static"]),
    "trimtab": lambda row: seconds(row["median_s"]["trimtab"]),
    "balanced": lambda row: seconds(row["median_s"]["balanced"]),
    "gain captured": "{gain_captured:.2f}",
    "of balanced": "{fraction_of_balanced:.2f}",
}
FIGURES: Columns = {
    "figure": "{name}",
    "median": "{median:.2f}",
    "of the seeds": interval("range", "{:.2f}"),
    "95% interval": interval("interval", "{:.2f}"),
}
TRANSFERS: Columns = {
    "paths": "{name}",
    "exposed": quantity("exposed_s", seconds),
    "of MoE time": with_interval("exposed_fraction", "{:.2%}"),
    "peer": quantity("peer_bytes", bytes_text),
    "host": quantity("host_bytes", bytes_text),
}
NOTES = (
    "gain_captured and fraction_of_balanced can exceed 1: the step with even routing is not the fastest possible one. "
    "A replica of a hot expert computes rows of its own rank, which even routing sends to another rank, and the rows "
    "of a few hot experts make larger matrix products than as many rows spread evenly. On a seed that is nearly even "
    "there is little to gain, and gain_captured is mostly noise.",
    "overhead_when_balanced includes passes over the rows in memory that transformers' all-to-all makes and Trimtab "
    "does not, such as sorting received rows once more. They take long on a CPU. It says nothing about GPUs.",
)


@dataclass(frozen=True)
class RuntimeBenchmark:
    """Sizes of the benchmark.

    Attributes:
        tokens: tokens per rank.
        rounds: timed repetitions of every variant on every seed's routing.
        json: file for the figures; None for none.
        ranks_per_node: neighbouring ranks that share a node.
        link_mbit: Mbit/s of the links between nodes, if they are limited. The links are set up elsewhere.
        seeds: skewed routings that are compared, of the seeds 0 to seeds - 1. Weights and tokens have seed 0.
        layers, experts, top_k, hidden, width: sizes of the model; `width` is that of an expert.
        slots: slots per rank.
        sequence_length: tokens of each sequence.
        zipf: exponent of the skewed routing.
        plans: folder for the plans of Trimtab's variants on seed 0's routing; None for none. With a folder no tables
            are printed.
    """

    tokens: int = TOKENS
    rounds: int = 5
    json: Path | None = None
    ranks_per_node: int = 2
    link_mbit: int | None = None
    seeds: int = 8
    layers: int = LAYERS
    experts: int = EXPERTS
    top_k: int = TOP_K
    hidden: int = HIDDEN
    width: int = WIDTH
    slots: int = 2
    sequence_length: int = SEQUENCE_LENGTH
    zipf: float = 1.2
    plans: Path | None = None

    @property
    def model_config(self) -> dict[str, Any]:
        """The model's config, as in a `config.json`."""
        return small_config(
            layers=self.layers, hidden=self.hidden, width=self.width, experts=self.experts, top_k=self.top_k
        )

    def draw(self, ranks: int, seed: int = 0) -> tuple[RoutingTrace, RoutingTrace, Schedule]:
        """Skewed and even routing of one micro-step on `ranks` ranks, and the schedule of either.

        Even routing is exactly even. It has seed 0, whatever the seed of the skewed routing.
        """
        draw = partial(
            synthesize,
            num_sequences=self.tokens // self.sequence_length * ranks,
            sequence_length=self.sequence_length,
            num_layers=self.layers,
            num_experts=self.experts,
            top_k=self.top_k,
        )
        skewed, even = draw(zipf=self.zipf, seed=seed), draw(zipf=0.0, seed=0)
        return skewed, even, pack_by_length(skewed.sequence_lengths, num_ranks=ranks, token_budget=self.tokens)


EXAMPLES = ("--json out/bench-runtime.json", "--nodes 2 --link-mbit 500 --json out/nodes.json")


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--ranks", unset="2 on each node")
    add_options(parser, "--nodes", default=1)
    add_options(parser, "--link-mbit", unset="not limited")
    add_options(parser, "--tokens", type=positive, default=2048, help="tokens of a rank")
    add_options(parser, "--seeds", type=positive, default=8, help="skewed routings: those of seeds 0 to N - 1")
    add_options(parser, "--rounds", default=5, help="timed repetitions of every variant on every seed's routing")


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with the options."""
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
        command = [sys.executable, "-m", "benchmarks.runtime", *options.arguments]
        run_on_nodes(command, nodes=nodes, ranks_per_node=ranks_per_node, link_mbit=link_mbit)
    else:
        launch(run_benchmark, (settings,), ranks=ranks)


def run_benchmark(settings: RuntimeBenchmark) -> None:
    """Time all variants on this rank's share of the work; rank 0 prints and writes the figures. Collective."""
    rank, rounds = dist.get_rank(), settings.rounds
    variants = build_variants(settings)
    session, compared = variants.session, variants.compared
    title = "" if rank else "bench runtime"
    times = {key: partial(_step_times, variant) for key, variant in compared.items()}
    steps = alternate(times, rounds, warm_up=_rounds_of(WARM_UP_RUNS, settings), progress=title)
    in_moe = {key: partial(_moe_seconds, variant) for key, variant in compared.items()}
    moe_s = _by_name(alternate(in_moe, min(_rounds_of(MOE_RUNS, settings), rounds), warm_up=0))
    transfers = {key: partial(_transfer_figures, variant, session) for key, variant in variants.by_paths.items()}
    taken = _by_name(alternate(transfers, min(_rounds_of(PATH_RUNS, settings), rounds), warm_up=1))
    step_s = {key: [seconds for seconds, _ in results] for key, results in steps.items()}
    all_step_s, cpu_results = _by_name(step_s), _by_name(steps).values()
    cpu_s = _mean_over_ranks([statistics.mean(cpu_s for _, cpu_s in results) for results in cpu_results])
    if settings.plans is not None:
        for (seed, name), variant in compared.items():
            variant.prepare()
            if (rank, seed) == (0, 0) and name != "native":
                session.step_plan.save(settings.plans / f"{name}.npz")
    if rank:
        return
    figures = {
        "schema": "trimtab-bench-runtime-2",
        "settings": settings_of(settings, "plans"),
        "ranks": dist.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "policies": {
            name: {
                "step_s": seconds,
                "median_s": statistics.median(seconds),
                "moe_s": statistics.median(moe_s[name]),
                "cpu_s_per_rank": cpu,
            }
            for (name, seconds), cpu in zip(all_step_s.items(), cpu_s, strict=True)
        },
        "transfer": {name: _summarise_transfers(results) for name, results in taken.items()},
        **summarise_steps(step_s, variants.static_max_over_mean),
    }
    show(figures, print_figures if settings.plans is None else lambda *_: None, settings.json)


def _rounds_of(runs: int, settings: RuntimeBenchmark) -> int:
    """Rounds in which a variant runs about so often."""
    return max(1, runs // settings.seeds)


def _by_name(results: Mapping[tuple[int, str], list[Result]]) -> dict[str, list[Result]]:
    """Results of every variant on all seeds, one seed after another."""
    joined: dict[str, list[Result]] = {}
    for (_, name), values in results.items():
        joined.setdefault(name, []).extend(values)
    return joined


def _step_times(variant: Variant) -> tuple[float, float]:
    """Seconds of a step until all ranks are done, and this rank's CPU seconds."""
    variant.prepare()
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    variant.step()
    dist.barrier()
    return time.perf_counter() - start, time.process_time() - cpu_start


def _moe_seconds(variant: Variant) -> float:
    """Seconds of a step in MoE blocks."""
    variant.prepare()
    with time_blocks(variant.blocks) as timer:
        variant.step()
    return timer.seconds


def _transfer_figures(variant: Variant, session: Session) -> list[float]:
    """Seconds of a step in MoE blocks, and its `PATH_FIGURES`; means over ranks."""
    variant.prepare()
    session.take_metrics()
    with time_blocks(variant.blocks) as timer:
        variant.step()
    taken = session.take_metrics()
    return _mean_over_ranks([timer.seconds, *(taken[f"transfer/{name}"] for name in PATH_FIGURES)])


def _mean_over_ranks(values: list[float]) -> list[float]:
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums / dist.get_world_size()).tolist()


def _summarise_transfers(rounds: Sequence[list[float]]) -> Figures:
    """Medians over rounds, and the part of MoE time in which compute waits for transfers."""
    names = ("moe_s", *PATH_FIGURES)
    figures: Figures = dict(zip(names, map(statistics.median, zip(*rounds, strict=True)), strict=True))
    fraction, interval = median_with_interval([exposed / moe for moe, exposed, *_ in rounds])
    return figures | {"exposed_fraction": fraction, "exposed_fraction_interval": interval}


def summarise_steps(step_s: Mapping[tuple[int, str], list[float]], static_max_over_mean: list[list[float]]) -> Figures:
    """Figures of every seed, and of all seeds together.

    Args:
        step_s: seconds of every variant on every seed's routing. The rounds of all lists are the same.
        static_max_over_mean: `[seeds, layers]`.

    Returns:
        `seeds`, a dictionary per seed; and for each ratio its median over seeds, its 95% bootstrap interval over rounds
        (`_interval`) and the lowest and highest seed (`_range`); the last also for `static_max_over_mean`, which is the
        mean over layers.
    """
    names = list(dict.fromkeys(name for _, name in step_s))
    seeds = range(len(static_max_over_mean))
    times = {name: np.array([step_s[seed, name] for seed in seeds]) for name in names}
    ratios_S = _ratios(times)
    skew_S = [statistics.mean(layers) for layers in static_max_over_mean]
    figures: Figures = {
        "static_max_over_mean": statistics.median(skew_S),
        "static_max_over_mean_range": [min(skew_S), max(skew_S)],
        "seeds": [
            {
                "seed": seed,
                "static_max_over_mean": static_max_over_mean[seed],
                "median_s": {name: float(np.median(times[name][seed])) for name in names},
                **{ratio: float(values_S[seed]) for ratio, values_S in ratios_S.items()},
            }
            for seed in seeds
        ],
    }
    resampled = {ratio: np.median(values_BS, axis=1) for ratio, values_BS in _ratios(_resampled(times)).items()}
    for ratio, values_S in ratios_S.items():
        figures[ratio] = float(np.median(values_S))
        figures[f"{ratio}_interval"] = percentiles(resampled[ratio])
        figures[f"{ratio}_range"] = [float(values_S.min()), float(values_S.max())]
    return figures


def _ratios(times: Mapping[str, Array]) -> dict[str, Array]:
    """Ratios of step times `[..., rounds]`, compared within each round: `[...]`."""
    static, trimtab, balanced = times["static"], times["trimtab"], times["balanced"]
    ratios = {
        # The median difference, not the median ratio: where there is little to gain, single ratios are arbitrary.
        "gain_captured": np.median(static - trimtab, axis=-1) / np.median(static - balanced, axis=-1),
        "fraction_of_balanced": np.median(balanced / trimtab, axis=-1),
        "overhead_when_balanced": np.median(balanced / times["native"], axis=-1) - 1,
    }
    if "node-blind" in times:
        ratios["speedup_vs_node_blind"] = np.median(times["node-blind"] / trimtab, axis=-1)
    return ratios


def _resampled(times: Mapping[str, Array]) -> dict[str, Array]:
    """`[samples, seeds, rounds]` of times `[seeds, rounds]`: rounds with replacement, the same for all variants."""
    seeds, rounds = times["static"].shape
    drawn_BSN = np.random.default_rng(0).integers(rounds, size=(BOOTSTRAP_SAMPLES, seeds, rounds))
    return {name: times_SN[np.arange(seeds)[:, None], drawn_BSN] for name, times_SN in times.items()}


def print_figures(figures: Figures, console: Console) -> None:
    """Print step times, those of each seed, their ratios with what they mean, and what transfers cost on each path."""
    rounds, seeds = figures["settings"]["rounds"], len(figures["seeds"])
    console.print(f"One micro-step: {rounds} rounds of all variants on the skewed routing of seeds 0 to {seeds - 1}")
    console.print(figure_table("Step time, all seeds", STEPS, named_rows(figures["policies"])))
    console.print(figure_table("By seed; max/mean: mean over layers, under static", SEEDS, figures["seeds"]))
    names = [key.removesuffix("_range") for key in figures if key.endswith("_range")]
    rows = [
        {"name": name, "median": figures[name], "range": figures[f"{name}_range"]}
        | {"interval": figures.get(f"{name}_interval")}
        for name in names
    ]
    console.print(figure_table("Over seeds: median, lowest and highest", FIGURES, rows))
    console.print(figure_table("Transfers of replica weights", TRANSFERS, named_rows(figures["transfer"])))
    console.print(*NOTES, sep="\n")


if __name__ == "__main__":
    main("benchmarks.runtime")
