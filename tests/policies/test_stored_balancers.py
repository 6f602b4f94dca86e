"""Plans of all balancers for many steps, compared with stored ones by hash.

After a wanted change of a balancer, `PYTHONPATH=tests python tests/policies/test_stored_balancers.py` writes the file
again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.policies import Step
from helpers.stored_results import counted, digest
from trimtab import ClusterSpec, Placement, Schedule, StepPlan
from trimtab.array_type import Array
from trimtab.policies import POLICIES, Policy
from trimtab.policies.planning_time import Exchange, HiddenPlanning, PlanningTime, TimeAtSize

FILE = Path(__file__).parents[1] / "fixtures" / "balancers.json"
STORED: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}

# Routing: skew, layers, experts, top_k, sequences, seed, scale, tenths unknown. Then ranks, ranks per node, slots,
# micro-steps, earlier steps, and whether homes are contiguous.
Sizes = tuple[tuple[str, int, int, int, int, int, int, int], tuple[int, int, int, int, int], bool]
STEPS: dict[str, Sizes] = {
    "a node": (("qwen3-30b-mixed", 2, 16, 2, 12, 1, 20, 0), (4, 4, 2, 2, 2), True),
    "two nodes": (("mixtral-8x7b-text", 2, 24, 2, 24, 2, 50, 0), (8, 4, 2, 2, 5), True),
    "moved homes": (("gpt-oss-20b-reasoning", 3, 32, 4, 16, 3, 10, 4), (8, 2, 1, 3, 3), False),
    "few tokens": (("uniform", 2, 8, 2, 6, 4, 1, 0), (4, 2, 3, 2, 1), False),
    "spikes": (("spike", 2, 32, 2, 16, 5, 100, 0), (4, 2, 4, 4, 0), True),
    "no slots": (("qwen3-30b-math", 1, 12, 3, 9, 6, 5, 5), (4, 4, 0, 1, 2), False),
    "many experts": (("qwen3-30b-mixed", 1, 64, 8, 32, 7, 30, 2), (16, 8, 2, 2, 4), True),
}
SKEWS = ["qwen3-30b-mixed", "spike", "uniform", "gpt-oss-20b-reasoning"]
SIZES = [(2, 1), (6, 3), (4, 4), (8, 2), (6, 2), (12, 4), (3, 3), (8, 4)]
# Ranks and ranks per node in turns, with everything else by the number; stored as one hash.
SMALL: dict[str, Sizes] = {
    f"small {n}": (
        (SKEWS[n % 4], 1 + n % 2, ranks * (1 + n % 5), 1 + n % 2, 5 + 7 * n % 20, 20 + n, 3 ** (n % 6), 0),
        (ranks, per_node, 1 + n % 3, 1 + n // 3 % 2, n % 3),
        n % 4 != 3,
    )
    for n, (ranks, per_node) in enumerate(SIZES * 4)
}
# Settings with which small steps get replicas, and annealing takes milliseconds: of all steps, and of every second.
QUICK: dict[str, dict[str, Any]] = {
    "routepack": {"evaluations": 3000, "population": 3, "temperatures": 5},
    "relibra": {"sweeps": 10},
}
EAGER: dict[str, dict[str, Any]] = {
    "eplb": {"interval": 3},
    "fastermoe": {"network_bytes_per_s": 1e15, "node_bytes_per_s": 1e14},
    "feplb": {"dynamic_experts": 2, "smallest_move": 16},
    "foremoe": {"smallest_share": 1, "threshold": 1.1},
    "laer": {"window": 2},
    "llep": {"min_tokens_per_gemm": 16, "gate": 1.0},
    "relibra": {"smallest_share": 1, "sweeps": 10},
    "routepack": {"evaluations": 3000, "population": 1, "temperatures": 3, "attention_per_pair": 0.1},
    "taot": {"smallest_share": 1, "far_cost": 2.0},
    "ultraep": {"smallest_quota": 16, "tolerance": 0.1},
}
BALANCERS = [*POLICIES]
PLANNING = PlanningTime(
    (TimeAtSize(2, 3.0, 0.5, 20.0, 1.5, 40.0, 7.0, 0.25), TimeAtSize(16, 5.0, 0.75, 30.0, 2.5, 90.0, 9.0, 0.5)),
    route_us=0.01,
    exchange=Exchange(3.0, 0.001),
)


def step_of(name: str) -> Step:
    routing, (ranks, per_node, slots, micro_steps, past), is_contiguous = (STEPS | SMALL)[name]
    sequences = counted(*routing)
    layers, experts, number = sequences.num_layers, sequences.num_experts, np.arange(sequences.num_sequences)
    earlier = [counted(*routing[:5], 1000 + n, *routing[6:]).counts_SLE.sum(axis=0) for n in range(past)]
    home_LE = Placement.contiguous(layers, experts, ranks).home
    if not is_contiguous:
        home_LE = np.stack([home_LE[layer][(np.arange(experts) * 5 + layer) % experts] for layer in range(layers)])
    # Of two mini-batches, if there are two micro-steps or more.
    mini_batch_M = np.arange(micro_steps, dtype=np.int32) * 2 // max(2, micro_steps)
    schedule = Schedule(
        (number % micro_steps).astype(np.int32), (number * 3 // 2 % ranks).astype(np.int32), mini_batch_M, ranks
    )
    past_PLE = np.stack(earlier) if past else np.zeros((0, layers, experts), np.int64)
    return Step(sequences, schedule, Placement(home_LE), ClusterSpec(ranks, per_node, slots), past_PLE)


def balancer(name: str, step: str) -> Policy:
    settings = EAGER if list(STEPS | SMALL).index(step) % 2 else QUICK
    return replace(POLICIES[name], **settings.get(name, {}))  # type: ignore[type-var]


def digest_of(*plans: StepPlan) -> str:
    return digest(*(array for plan in plans for array in _arrays(plan)))


def _arrays(plan: StepPlan) -> Iterable[Array]:
    schedule, homes = plan.schedule, plan.home
    replicas = plan.replica_starts, plan.replica_experts, plan.replica_ranks, plan.replica_paths
    quotas = plan.quota_starts, plan.quota_sources, plan.quota_tokens
    return schedule.micro_step, schedule.rank, homes, *replicas, *quotas, np.array([plan.slots_per_rank])


def facts(name: str, of_step: str) -> list[Any]:
    """Plans on both terms, and seconds of planning on the balancer's own."""
    step, policy = step_of(of_step), balancer(name, of_step)
    own, equal = (step.plan(policy, equal_terms=terms) for terms in (False, True))
    hidden = HiddenPlanning.of(PLANNING, own, step.workload(own), step.sequences.lengths, layers=5, threads=3)
    return [digest_of(own), digest_of(equal), *(float(f"{seconds:.9g}") for seconds in astuple(hidden))]


def digest_of_small_steps(name: str) -> str:
    """Of plans on both terms, in turns."""
    return digest_of(
        *(step_of(step).plan(balancer(name, step), equal_terms=n // 2 % 2 == 1) for n, step in enumerate(SMALL))
    )


@pytest.mark.parametrize("name", BALANCERS)
def test_stored_plans_are_made_again(name: str) -> None:
    assert digest_of_small_steps(name) == STORED[name]["small"]
    found = {step: facts(name, step) for step in STEPS}
    wrong = [step for step in STEPS if found[step][:2] != STORED[name][step][:2]]
    assert not wrong, f"other plans for these steps: {', '.join(wrong)}"
    for step in STEPS:
        assert found[step][2:] == pytest.approx(STORED[name][step][2:], rel=1e-6), step


if __name__ == "__main__":
    stored = {
        name: {step: facts(name, step) for step in STEPS} | {"small": digest_of_small_steps(name)} for name in BALANCERS
    }
    lines = [f"{json.dumps(name)}: {json.dumps(facts)}" for name, facts in stored.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
