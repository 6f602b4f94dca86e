"""`trimtab bench planner`: all balancers on the same steps, with their own settings and with equal settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.progress import Progress

from trimtab.benchmarks.planner_balancers import balancer_figures
from trimtab.benchmarks.planner_bounds import milp_figures
from trimtab.benchmarks.planner_cases import LONGEST, MICRO_STEPS, SLACK, TOKENS_PER_RANK, build_case
from trimtab.benchmarks.planner_curves import compare_curves, frontier_points
from trimtab.benchmarks.planner_schedules import schedule_figures
from trimtab.benchmarks.planner_tables import print_figures
from trimtab.policies import POLICIES
from trimtab.simulator.yardstick import yardstick

__all__ = ["PlannerBenchmark", "print_figures", "run_benchmark"]


@dataclass(frozen=True)
class PlannerBenchmark:
    """Cases to compare.

    Attributes:
        sizes: (ranks, experts) of each case.
        presets: routing of each case.
        slots: slots per rank that each case is planned with.
        policies: names of the balancers.
        layers: MoE layers.
        sampled: number of instances, evenly spread, whose LP bound is solved.
        sampled_milp: number of instances whose fewest replicas are solved, at the first size only.
        seed: of the routing.
    """

    sizes: tuple[tuple[int, int], ...] = ((8, 128), (16, 128), (32, 128), (64, 256))
    presets: tuple[str, ...] = ("qwen3-30b-math", "qwen3-30b-mixed")
    slots: tuple[int, ...] = (1, 2)
    policies: tuple[str, ...] = tuple(POLICIES)
    layers: int = 8
    sampled: int = 16
    sampled_milp: int = 24
    seed: int = 0


def run_benchmark(settings: PlannerBenchmark, *, frontier: bool) -> dict[str, Any]:
    """All figures, as `trimtab bench planner --json` writes them; those of the frontier only if asked for."""
    sizes = {"micro_steps": MICRO_STEPS, "tokens_per_rank": TOKENS_PER_RANK, "longest": LONGEST, "slack": SLACK}
    lists = ("cases", "schedule", "milp", "frontier", "frontier_compared")
    figures: dict[str, Any] = {
        "schema": "trimtab-bench-planner-1",
        "yardstick": yardstick(),
        "settings": asdict(settings) | sizes,
        **{name: [] for name in lists},
    }
    cases = [(*size, preset) for size in settings.sizes for preset in settings.presets]
    with Progress(transient=True) as progress:
        task = progress.add_task("bench planner", total=len(cases) * len(settings.slots) * len(settings.policies) * 2)
        for ranks, experts, preset in cases:
            case = build_case(ranks, experts, preset, layers=settings.layers, seed=settings.seed)
            figures["schedule"] += schedule_figures(case)
            if (ranks, experts) == settings.sizes[0] and settings.sampled_milp:
                figures["milp"] += [milp_figures(case, homes, settings.sampled_milp) for homes in ("contiguous", "own")]
            if frontier:
                points = frontier_points(case)
                figures["frontier"] += points
                figures["frontier_compared"].append(case.key | compare_curves(points))
            for slots in settings.slots:
                for equal_terms in (False, True):
                    for name in settings.policies:
                        figures["cases"].append(balancer_figures(case, name, slots, equal_terms, settings.sampled))
                        progress.advance(task)
    return figures
