"""Work is done once: each instance is planned once a step, and each kernel compiled once a process."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.registry import CPUDispatcher

import trimtab.planner
from helpers.planner_steps import free_moves, steady_step
from trimtab.planner import Workload, plan_schedule
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.step_planning import StepPlanning
from trimtab.planner.plan.strategy import NOTHING, STAY, STEP, Strategy
from trimtab.planner.plan.strategy_choice import WAYS

# These count sequences, whose counts are uint16, or int32 if one is longer than 65,535 tokens.
BY_SEQUENCE = {"_add_rows", "_add_sequences"}
# Routes are uint8, uint16 or more, by the number of experts.
BY_ROUTES = {"_count"}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("given", [False, True])
def test_every_strategy_is_planned_once_and_the_chosen_one_for_the_whole_step(
    groups: int, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategies are compared in a sample; the step without changes is planned as a whole for comparison."""
    step = steady_step(3, groups=groups, ranks=4, per_node=2)
    sampled, whole = Counter[Strategy](), Counter[Strategy]()
    plan = StepPlanning.plan

    def counted(self: StepPlanning, strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
        (sampled if kwargs else whole)[strategy] += 1
        return plan(self, strategy, *args, **kwargs)

    schedule, costs = step.plan().schedule, free_moves(step.cluster)
    loads = step.workloads(schedule)
    monkeypatch.setattr(StepPlanning, "plan", counted)
    if given:
        given_loads = StepLoads.of_workloads(loads, schedule)
        planned = plan_schedule(
            given_loads, schedule, step.placement, step.cluster, settings=step.settings, costs=costs
        )
    else:
        planned = step.plan(costs=costs)
    chosen = planned.chosen_strategy
    assert chosen != NOTHING
    assert set(sampled.values()) == {1}
    assert whole == {NOTHING: 1, chosen: 1}
    assert any(strategy.homes == STEP for strategy in sampled)
    sampled.clear()
    step.plan(may_move=False)
    # Nothing; and for each number of slots replicas in the node, and on any node with more or less of them.
    assert len(sampled) <= 1 + 2 * (1 + len(WAYS))
    assert all(strategy.homes == STAY for strategy in sampled)


def signatures() -> dict[str, int]:
    """Signatures of every kernel of the planner that has any."""
    names = [module.name for module in pkgutil.walk_packages(trimtab.planner.__path__, "trimtab.planner.")]
    modules = [importlib.import_module(name) for name in [*names, "trimtab.trace.counting"]]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)}
    return {kernel.py_func.__name__: len(kernel.signatures) for kernel in kernels if kernel.signatures}


def plan_all_kinds() -> None:
    """Steps of different shapes, with and without unknown routes, with short and long sequences; prints signatures."""
    sizes = [(4, 2, 1, 8), (4, 4, 2, 12), (6, 1, 1, 6), (1, 1, 1, 3)]
    for seed, (ranks, per_node, groups, experts) in enumerate(sizes):
        step = steady_step(seed, ranks=ranks, per_node=per_node, groups=groups, experts=experts)
        if seed % 2:
            step.trace.expert_ids[::7, 0] = step.trace.no_route
        for dtype in (np.uint16, np.int32):
            counts = replace(step.sequences, counts_SLE=step.sequences.counts_SLE.astype(dtype))
            schedule = step.plan(sequences=counts).schedule
            loads = [
                Workload(load.token_counts_MLRE.astype(np.int32), load.unknown_MLR.astype(np.int32))
                for load in step.workloads(schedule)
            ]
            costs = free_moves(step.cluster)
            step_loads = StepLoads.of_workloads(loads, schedule)
            planned = plan_schedule(
                step_loads, schedule, step.placement, step.cluster, settings=step.settings, costs=costs
            )
            for plan, load in zip(planned.plans, loads, strict=True):
                plan.check(load)
                plan.rows(load)
    print(signatures())


@pytest.mark.long
def test_every_kernel_is_compiled_once(tmp_path: Path) -> None:
    """In a new process with an empty cache, so that kernels inside others are compiled, too."""
    code = "from planner.test_plan_once import plan_all_kinds; plan_all_kinds()"
    paths = [str(Path(__file__).parents[1]), str(Path(trimtab.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        env={"NUMBA_CACHE_DIR": str(tmp_path), "PATH": ""}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = ast.literal_eval(done.stdout)
    kernels = {"_pick_rank", "split_tokens", "_swap_homes", "_choose", "_count_rows", "fill_emptiest", "_run_passes"}
    kernels |= {"place_local_replicas", "shift_shares", "split_by_links", "longest_times", "_fill"}
    assert kernels <= set(found)
    assert {name for name, count in found.items() if count != 1} <= BY_SEQUENCE | BY_ROUTES
    assert all(found[name] <= 2 for name in BY_SEQUENCE & set(found))
