"""Does the simulator predict what the runtime takes? One step, measured on this machine and simulated as calibrated.

What is simulated is what ran: the same routing, schedule and plans, `static`, `trimtab` and `balanced` of
`trimtab bench runtime`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trimtab.benchmarks.bench_runtime import RuntimeBenchmark, ratio_with_interval, run_benchmark
from trimtab.calibration import Calibrated, Calibration, calibrate, settings_for
from trimtab.calibration.figures_table import figures_table
from trimtab.cli.main import Parser, run
from trimtab.cli.options import positive
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.cluster.operations import OperationCosts
from trimtab.files import write_json
from trimtab.launch.launcher import launch
from trimtab.planner import Schedule, SequenceCounts, StepPlan, Workload
from trimtab.policies import POLICIES
from trimtab.simulator.step import StepSettings, simulate_step
from trimtab.trace import RoutingTrace

NAME = "python -m experiments.simulator_validation"
VARIANTS = ("static", "trimtab", "balanced")
# How far a prediction may be from the median.
TOLERANCE = 0.1


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """One variant of the benchmark, as it ran: a micro-step's forward, backward and complete gradients.

    Attributes:
        seconds: median of its rounds.
        interval: 95% bootstrap interval of the median, low and high.
        trace: routing of all ranks' sequences.
        schedule: which rank had which.
        plan: what was carried out.
    """

    seconds: float
    interval: tuple[float, float]
    trace: RoutingTrace
    schedule: Schedule
    plan: StepPlan


def run_validation(calibration: Calibration, benchmark: RuntimeBenchmark) -> tuple[Calibrated, dict[str, Any]]:
    """Calibrate this machine, run the benchmark on the same ranks, and hold it against what is simulated.

    Args:
        calibration: of the benchmark's model, on ranks that are all started here.

    Raises:
        RankFailedError: naming a rank that failed.
    """
    calibrated = calibrate(calibration)
    assert calibrated is not None
    measured = measure_steps(benchmark, calibration.ranks)
    # As it ran: in float32 on a CPU.
    model = replace(calibration.model, weight_bytes=4)
    cluster = replace(calibrated.cluster, slots_per_rank=benchmark.slots)
    predicted = {name: simulated_seconds(cluster, model, step) for name, step in measured.items()}
    return calibrated, compare(measured, predicted)


def simulated_seconds(cluster: ClusterSpec, model: ModelSpec, step: MeasuredStep) -> float:
    """What the simulator says to the step: its update alone, planned before and without the optimizer."""
    sequences = SequenceCounts.from_trace(step.trace)
    workload = Workload.from_sequences(sequences, step.schedule)
    costs = OperationCosts.of(cluster, model, moe_layers=sequences.num_layers)
    simulated = simulate_step(
        step.plan,
        workload,
        sequences.lengths,
        costs._replace(optimizer_s=0.0),
        cluster,
        replace(POLICIES["trimtab"].traits, planning_us_per_rank=0.0),
        settings=StepSettings(recompute=False),
    )
    # The bench brings new weights to the mirrors before its clock runs.
    return simulated.step_time_s - simulated.parts_s["migration"]


def measure_steps(benchmark: RuntimeBenchmark, ranks: int) -> dict[str, MeasuredStep]:
    """Run the benchmark on local ranks of one node; its variants by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = replace(benchmark, ranks_per_node=ranks, json=folder / "bench.json", plans=folder)
        launch(run_benchmark, (settings,), ranks=ranks)
        taken = json.loads((folder / "bench.json").read_text())["policies"]
        plans = {variant: StepPlan.load(folder / f"{variant}.npz") for variant in VARIANTS}
    skewed, even, schedule = benchmark.draw(ranks)
    steps = {}
    for variant in VARIANTS:
        median, (low, high) = ratio_with_interval(taken[variant]["step_s"])
        trace = even if variant == "balanced" else skewed
        steps[variant] = MeasuredStep(median, (low, high), trace, schedule, plans[variant])
    return steps


def compare(measured: Mapping[str, MeasuredStep], predicted: Mapping[str, float]) -> dict[str, Any]:
    """How far predictions are off, and whether they put the variants in the right order.

    Two variants whose intervals overlap are in no order that a measurement knows of.
    """
    errors = {name: predicted[name] / step.seconds - 1 for name, step in measured.items()}
    rows = {
        name: {
            "measured_s": step.seconds,
            "interval": list(step.interval),
            "predicted_s": predicted[name],
            "error": errors[name],
        }
        for name, step in measured.items()
    }
    known = [
        (slow, fast)
        for slow in measured
        for fast in measured
        if measured[slow].interval[0] > measured[fast].interval[1]
    ]
    return {
        "variants": rows,
        "within_tolerance": all(abs(error) <= TOLERANCE for error in errors.values()),
        "order_is_right": all(predicted[slow] > predicted[fast] for slow, fast in known),
    }


def print_comparison(result: Mapping[str, Any], console: Console) -> None:
    """The table for people."""
    table = Table(title="One step, measured and simulated", title_justify="left", title_style="bold")
    for column in ("variant", "measured", "95% interval", "simulated", "error"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, row in result["variants"].items():
        low, high = row["interval"]
        table.add_row(
            name,
            f"{row['measured_s'] * 1e3:.0f} ms",
            f"{low * 1e3:.0f} to {high * 1e3:.0f}",
            f"{row['predicted_s'] * 1e3:.0f} ms",
            f"{row['error']:+.1%}",
        )
    console.print(table)
    within = "all" if result["within_tolerance"] else "not all"
    order = "right" if result["order_is_right"] else "wrong"
    console.print(f"{within} within {TOLERANCE:.0%}; the order of the variants is {order}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = Parser(
        prog=NAME,
        description="Calibrate this machine, run the static, trimtab and balanced variants of `trimtab bench runtime` "
        "on it, and compare their step times with the simulator's predictions for the same routing and plans.",
        epilog=f"example: {NAME} --json out/simulator.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=positive, default=20, metavar="N", help="rounds of both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.set_defaults(run=_run)
    return run(NAME, lambda: parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> None:
    calibration = settings_for(None, ranks=None, rounds=options.rounds, name="this machine")
    calibrated, result = run_validation(calibration, RuntimeBenchmark(rounds=options.rounds))
    console = Console(highlight=False)
    console.print(figures_table(calibrated))
    print_comparison(result, console)
    if options.json:
        write_json(options.json, {"schema": "trimtab-bench-simulator-1", **result, "calibrated": calibrated.to_json()})


if __name__ == "__main__":
    sys.exit(main())
