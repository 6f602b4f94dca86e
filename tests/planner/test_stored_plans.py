"""Plans of many cases, compared with stored ones: homes, replicas and quotas by hash, seconds within 1.5%.

After a wanted change of plans, `PYTHONPATH=tests python tests/planner/test_stored_plans.py` writes the file again. It
keeps the cases; one that is added by hand, with its `case` alone, is planned too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.stored_results import counted, digest
from trimtab import Placement
from trimtab.cluster import StepCosts, load_cluster, load_model
from trimtab.planner import (
    PlannedStep,
    PlanSettings,
    SequenceCounts,
    Workload,
    pack_by_length,
    plan_schedule,
    plan_sequences,
)
from trimtab.planner.plan.step_loads import StepLoads

FILE = Path(__file__).parents[1] / "fixtures" / "plans.json"
STORED: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
SECONDS_OFF = 0.015


def planned(case: dict[str, Any]) -> tuple[SequenceCounts, PlannedStep]:
    """The step of a case and its plan.

    Args:
        case: `routing`, arguments of `counted`; `cluster` and `model`, names of presets; `ranks`, `per_node`, `slots`;
            `groups`; `settings` of the planner; `moves`: homes may change; `past`: earlier steps; `given`: the schedule
            is given; `mini_batches`; `micro_steps`, about; `excluded` strategies.
    """
    sequences = counted(**case["routing"])
    layers, experts = sequences.num_layers, sequences.num_experts
    cluster = load_cluster(
        case["cluster"], ranks=case["ranks"], ranks_per_node=case["per_node"], slots_per_rank=case["slots"]
    )
    past = [counted(**case["routing"] | {"seed": 1000 + n}).counts_SLE.sum(axis=0) for n in range(case["past"])]
    # The routing of a case that does not say so may use all groups of experts.
    expert_groups = {name: case["routing"].get(name, 1) for name in ("expert_groups", "groups_per_token")}
    model = replace(load_model(case["model"]), **expert_groups)
    data_ranks = case["ranks"] * case["groups"]
    budget = int(max(sequences.lengths.max(), -(-sequences.lengths.sum() // (data_ranks * case["micro_steps"]))))
    mini_batch = np.arange(sequences.num_sequences) % case["mini_batches"]
    common: dict[str, Any] = {
        "settings": PlanSettings(**case["settings"]),
        "costs": StepCosts.of(cluster, model, moe_layers=layers, groups=case["groups"]),
        "past_PLE": np.stack(past) if past else None,
        "may_move": case["moves"],
        "excluded": frozenset(case["excluded"]),
        "threads": 2,
    }
    homes = Placement.contiguous(layers, experts, cluster.ranks)
    if not case["given"]:
        return sequences, plan_sequences(
            sequences, homes, cluster, token_budget=budget, mini_batch=mini_batch, groups=case["groups"], **common
        )
    schedule = pack_by_length(sequences.lengths, num_ranks=data_ranks, token_budget=budget, mini_batch=mini_batch)
    parts = [schedule.of_group(group, cluster.ranks) for group in range(case["groups"])]
    workloads = [Workload.from_sequences(sequences.select(mine), part) for mine, part in parts]
    loads = StepLoads.of_workloads(workloads, schedule, sequences.lengths)
    return sequences, plan_schedule(loads, schedule, homes, cluster, **common)


def facts(case: dict[str, Any]) -> dict[str, Any]:
    """What is stored of a case's plan; `routing` is that of the input."""
    sequences, made = planned(case)
    plans = made.plans
    return {
        "routing": digest(sequences.counts_SLE, sequences.lengths, sequences.unknown_SL),
        "schedule": digest(made.schedule.micro_step, made.schedule.rank, made.schedule.mini_batch_of_micro_step),
        "strategy": made.strategy,
        "homes": digest(made.placement.home),
        "replicas": digest(
            *(array for plan in plans for array in (plan.replica_starts, plan.replica_experts, plan.replica_ranks))
        ),
        "paths": digest(*(plan.replica_paths for plan in plans)),
        "quotas": digest(
            *(array for plan in plans for array in (plan.quota_starts, plan.quota_sources, plan.quota_tokens))
        ),
        "seconds": float(f"{made.predicted_s:.6g}"),
    }


@pytest.mark.parametrize("name", STORED)
def test_a_stored_plan_is_made_again(name: str) -> None:
    stored, found = STORED[name]["plan"], facts(STORED[name]["case"])
    if abs(found["seconds"] / stored["seconds"] - 1) <= SECONDS_OFF:
        found["seconds"] = stored["seconds"]
    wrong = {part: (stored[part], found[part]) for part in stored if found[part] != stored[part]}
    assert not wrong, f"{name}: these parts of the plan differ (stored, found): {wrong}"


def test_the_stored_plans_use_everything() -> None:
    """Every strategy and path, moves of homes, and plans that differ from each other."""
    plans = [entry["plan"] for entry in STORED.values()]
    replicas = {"", ", replicas in the node", ", replicas on any node"}
    homes = {"re-home by past loads", "re-home by this step's loads"}
    expected = {home + more for home in homes for more in replicas} | {more[2:] for more in replicas if more}
    assert {plan["strategy"] for plan in plans} >= expected | {"nothing"}
    for part in ("routing", "schedule", "homes", "replicas", "paths", "quotas"):
        assert len({plan[part] for plan in plans}) > len(plans) // 3, part


if __name__ == "__main__":
    lines = []
    for name, entry in STORED.items():
        lines.append(f"{json.dumps(name)}: {json.dumps({'case': entry['case'], 'plan': facts(entry['case'])})}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
