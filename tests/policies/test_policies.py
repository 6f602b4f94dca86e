"""Properties of every policy: valid plans that do not depend on later routing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.policies import Step, check_future_is_unseen, check_policy, random_step
from trimtab import ClusterSpec
from trimtab.planner.replicas.paths import HOST, PEER
from trimtab.policies import POLICIES


def small_step(seed: int) -> Step:
    rng = np.random.default_rng(seed)
    return random_step(rng, ranks=8, experts=32, ranks_per_node=4, past_steps=2, contiguous=True, all_known=False)


def test_the_registry_is_complete() -> None:
    assert list(POLICIES) == [
        "static",
        "eplb",
        "eplb_oracle",
        "lplb",
        "fastermoe",
        "llep",
        "laer",
        "ultraep",
        "moonep",
        "echo",
        "taot",
        "feplb",
        "relibra",
        "foremoe",
        "routepack",
        "openinstruct",
        "trimtab",
        "balanced",
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_a_docstring(name: str) -> None:
    assert len((type(POLICIES[name]).__doc__ or "").strip()) > 20


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_makes_valid_plans_on_both_terms(name: str, seed: int) -> None:
    check_policy(POLICIES[name], small_step(seed))


@pytest.mark.parametrize("name", POLICIES)
def test_replicas_use_only_paths_that_the_cluster_has(name: str) -> None:
    policy, step = POLICIES[name], small_step(0)
    peer_only = replace(step.cluster, host_bytes_per_s=0.0)
    host_only = replace(step.cluster, node_bytes_per_s=0.0, network_bytes_per_s=0.0)
    for cluster, path in ((peer_only, PEER), (host_only, HOST)):
        only = replace(step, cluster=cluster)
        for equal_terms in (False, True):
            plan = policy.plan(only.view(policy, equal_terms=equal_terms))
            assert plan.num_replicas or not equal_terms or policy.traits.copies == "none"
            assert np.all(plan.replica_paths == path)


def test_only_policies_without_decisions_use_no_routing() -> None:
    assert [name for name, policy in POLICIES.items() if policy.traits.known_at == "nothing"] == ["static", "balanced"]


WITHOUT_FORESIGHT = [name for name, policy in POLICIES.items() if policy.traits.known_at != "step"]


@pytest.mark.parametrize("name", WITHOUT_FORESIGHT)
def test_plans_do_not_depend_on_later_routing(name: str) -> None:
    check_future_is_unseen(POLICIES[name], small_step(1), np.random.default_rng(2))


@pytest.mark.parametrize("name", WITHOUT_FORESIGHT)
def test_the_view_hides_the_step_from_policies_that_do_not_know_it(name: str) -> None:
    view = small_step(0).view(POLICIES[name], equal_terms=False)
    with pytest.raises(LookupError, match="can't see the whole step"):
        _ = view.workload
    with pytest.raises(LookupError, match="can't see the whole step"):
        _ = view.sequences


@pytest.mark.parametrize(("name", "steps"), [("eplb", 4), ("lplb", 4), ("laer", 1)])
def test_only_the_last_steps_are_planned_from(name: str, steps: int) -> None:
    policy = POLICIES[name]
    step = random_step(np.random.default_rng(0), ranks=8, experts=32, ranks_per_node=8, past_steps=7, contiguous=True)
    # Other experts were hot in earlier steps.
    past_PLE = step.past_counts_PLE.copy()
    past_PLE[:-steps] = past_PLE[:-steps, :, ::-1]
    hashes = [
        policy.plan(replace(step, past_counts_PLE=past).view(policy, equal_terms=False)).hash
        for past in (past_PLE, past_PLE[-steps:], past_PLE[:-1])
    ]
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]


def test_published_planning_times_are_scaled_to_the_ranks_planned_together() -> None:
    """UltraEP: 78 us at 64 ranks of one domain, 35 us of them at any size; FEPLB: 50 us at 8."""

    def us(name: str, ranks: int, ranks_per_node: int) -> float:
        seconds = POLICIES[name].traits.live_planning_seconds(ClusterSpec(ranks, ranks_per_node, 2))
        return round(seconds * 1e6, 9)

    assert us("ultraep", 64, 64) == us("ultraep", 128, 64) == 78.0
    assert us("ultraep", 32, 32) == 35.0 + 43.0 / 2
    assert us("ultraep", 64, 8) == us("ultraep", 8, 8) == 35.0 + 43.0 / 8
    assert us("feplb", 8, 8) == us("feplb", 32, 8) == 50.0
    assert us("feplb", 8, 4) == 25.0
