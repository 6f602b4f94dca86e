"""`python -m experiments.simulator_validation`: simulated beside measured step times, for a step on this machine.

The machine is calibrated. The variants `static`, `trimtab` and `balanced` of `benchmarks.runtime` are measured, and
simulated with the same routing, schedule and plans.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import main
from benchmarks.runtime import RuntimeBenchmark, run_benchmark
from benchmarks.tables import Columns, figure_table, named_rows, quantity
from trimtab.calibration.alternating_rounds import median_with_interval
from trimtab.calibration.calibrate import calibrate
from trimtab.calibration.calibration_result import CalibrationResult, calibration_table
from trimtab.calibration.calibration_settings import CalibrationSettings, settings_for
from trimtab.cli.options import add_options
from trimtab.cli.output import write_figures
from trimtab.cli.parser import Parser
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.cluster.operations import OperationCosts
from trimtab.launch import launch
from trimtab.planner import Schedule, SequenceCounts, StepPlan, Workload
from trimtab.policies import POLICIES
from trimtab.policies.planning_time import NO_PLANNING
from trimtab.report.number_text import seconds
from trimtab.simulator.step import StepSettings, simulate_step
from trimtab.trace import RoutingTrace

EXAMPLES = ("--json out/simulator.json",)
VARIANTS = ("static", "trimtab", "balanced")
# Largest relative error of a prediction.
TOLERANCE = 0.1


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """One measured variant: a micro-step's forward, backward and complete gradients.

    Attributes:
        seconds: median of its rounds.
        interval: 95% bootstrap interval of the median, low and high.
        trace: routing of all ranks' sequences.
        schedule: of these sequences.
        plan: that was executed.
    """

    seconds: float
    interval: tuple[float, float]
    trace: RoutingTrace
    schedule: Schedule
    plan: StepPlan


def run_validation(
    calibration: CalibrationSettings, benchmark: RuntimeBenchmark
) -> tuple[CalibrationResult, dict[str, Any]]:
    """Calibrate this machine, run the benchmark on the same ranks, and compare it with the simulation.

    Args:
        calibration: of the benchmark's model, on ranks that are all started here.
        benchmark: sizes of the benchmark.

    Returns:
        The calibration, and what `compare` returns.

    Raises:
        RankFailedError: naming a rank that failed.
    """
    calibrated = calibrate(calibration)
    assert calibrated is not None
    measured = measure_steps(benchmark, calibration.ranks)
    # The benchmark runs in float32 on a CPU.
    model = replace(calibration.model, weight_bytes=4)
    cluster = replace(calibrated.cluster, slots_per_rank=benchmark.slots)
    predicted = {name: simulated_seconds(cluster, model, step) for name, step in measured.items()}
    return calibrated, compare(measured, predicted)


def simulated_seconds(cluster: ClusterSpec, model: ModelSpec, step: MeasuredStep) -> float:
    """Simulated seconds of the step's update, without planning and optimizer, which the benchmark does not time."""
    sequences = SequenceCounts.from_trace(step.trace)
    workload = Workload.from_sequences(sequences, step.schedule)
    costs = OperationCosts.of(cluster, model, moe_layers=sequences.num_layers)
    simulated = simulate_step(
        step.plan,
        workload,
        sequences.lengths,
        costs._replace(optimizer_s=0.0),
        cluster,
        replace(POLICIES["trimtab"].traits, planning=NO_PLANNING),
        settings=StepSettings(recompute=False),
    )
    # The benchmark writes weights to the mirrors before it starts the clock.
    return simulated.step_time_s - simulated.parts_s["migration"]


def measure_steps(benchmark: RuntimeBenchmark, ranks: int) -> dict[str, MeasuredStep]:
    """Run the benchmark on local ranks of one node, and return its variants by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = replace(benchmark, ranks_per_node=ranks, json=folder / "bench.json", plans=folder)
        launch(run_benchmark, (settings,), ranks=ranks)
        taken = json.loads((folder / "bench.json").read_text())["policies"]
        plans = {variant: StepPlan.load(folder / f"{variant}.npz") for variant in VARIANTS}
    skewed, even, schedule = benchmark.draw(ranks)
    steps = {}
    for variant in VARIANTS:
        median, (low, high) = median_with_interval(taken[variant]["step_s"])
        trace = even if variant == "balanced" else skewed
        steps[variant] = MeasuredStep(median, (low, high), trace, schedule, plans[variant])
    return steps


def compare(measured: Mapping[str, MeasuredStep], predicted: Mapping[str, float]) -> dict[str, Any]:
    """Errors of the predictions, and whether they put the variants in the measured order.

    The order of two variants whose measured intervals overlap is not known, so it is not compared.
    """
    rows: dict[str, dict[str, Any]] = {
        name: {
            "measured_s": step.seconds,
            "interval": list(step.interval),
            "predicted_s": predicted[name],
            "error": predicted[name] / step.seconds - 1,
        }
        for name, step in measured.items()
    }
    return {
        "variants": rows,
        "within_tolerance": all(abs(row["error"]) <= TOLERANCE for row in rows.values()),
        "order_is_right": all(
            predicted[slow] > predicted[fast]
            for slow, fast in itertools.permutations(measured, 2)
            if measured[slow].interval[0] > measured[fast].interval[1]
        ),
    }


def print_figures(result: Mapping[str, Any], console: Console) -> None:
    """Print one line per variant, and the verdict."""
    columns: Columns = {
        "variant": "{name}",
        "measured": quantity("measured_s", seconds),
        "95% interval": lambda row: " to ".join(map(seconds, row["interval"])),
        "simulated": quantity("predicted_s", seconds),
        "error": "{error:+.1%}",
    }
    console.print(figure_table("One step, measured and simulated", columns, named_rows(result["variants"])))
    within = "all" if result["within_tolerance"] else "not all"
    order = "right" if result["order_is_right"] else "wrong"
    console.print(f"{within} within {TOLERANCE:.0%}; the order of the variants is {order}")


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--rounds", default=20)


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    settings = settings_for(None, ranks=None, rounds=options.rounds, name="this machine")
    calibrated, result = run_validation(settings, RuntimeBenchmark(rounds=options.rounds, seeds=1))
    figures = {"schema": "trimtab-bench-simulator-1", **result, "calibrated": calibrated.to_json()}
    console = write_figures(options, figures)
    console.print(calibration_table(calibrated))
    print_figures(result, console)


if __name__ == "__main__":
    main("experiments.simulator_validation")
