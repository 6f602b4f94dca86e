"""Properties of every policy: valid plans that do not depend on later routing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_future_is_unseen, check_policy, random_step, random_steps
from trimtab import ClusterSpec
from trimtab.planner.replicas.paths import HOST, PEER
from trimtab.policies import POLICIES, Policy
from trimtab.policies.rivals.echo import Echo
from trimtab.policies.rivals.fastermoe import FasterMoe
from trimtab.policies.rivals.foremoe import ForeMoe
from trimtab.policies.rivals.llep import Llep
from trimtab.policies.rivals.relibra import ReLibra
from trimtab.policies.rivals.taot import Taot
from trimtab.policies.rivals.ultraep import UltraEp


def small_step(seed: int) -> Step:
    rng = np.random.default_rng(seed)
    return random_step(rng, ranks=8, experts=32, ranks_per_node=4, past_steps=2, contiguous=True, all_known=False)


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
            plan = only.plan(policy, equal_terms=equal_terms)
            assert plan.num_replicas or not equal_terms or policy.traits.copies == "none"
            assert np.all(plan.replica_paths == path)


WITHOUT_FORESIGHT = [name for name, policy in POLICIES.items() if policy.traits.known_at != "step"]


# Settings with which small steps get replicas.
EAGER: dict[str, Policy] = {
    "llep": Llep(1.0, 1, 1.0),
    "ultraep": UltraEp(smallest_quota=10),
    "fastermoe": FasterMoe(network_bytes_per_s=1e15),
}


@pytest.mark.parametrize("name", WITHOUT_FORESIGHT)
@settings(max_examples=15)
@given(step=random_steps(), seed=st.integers(0, 2**32))
@example(step=small_step(1), seed=2)
def test_plans_do_not_depend_on_later_routing(name: str, step: Step, seed: int) -> None:
    check_future_is_unseen(EAGER.get(name, POLICIES[name]), step, np.random.default_rng(seed))


SHARES = st.sampled_from([1, 128])
LEVELLING: dict[str, st.SearchStrategy[Policy]] = {
    "ultraep": st.builds(UltraEp, smallest_quota=st.sampled_from([1, 128, 1024])),
    "echo": st.just(Echo()),
    "taot": st.builds(Taot, smallest_share=SHARES),
    "relibra": st.builds(ReLibra, smallest_share=SHARES, sweeps=st.just(10)),
    "foremoe": st.builds(ForeMoe, smallest_share=SHARES, threshold=st.sampled_from([1.0, 1.2])),
}


@pytest.mark.parametrize("name", LEVELLING)
@settings(max_examples=50)
@given(step=random_steps(), data=st.data())
def test_replicas_make_no_rank_busier_and_keep_the_smallest_share(name: str, step: Step, data: st.DataObject) -> None:
    policy = data.draw(LEVELLING[name])
    workload = step.known_workload()
    for plan in check_policy(policy, step).values():
        before_ML = workload.home_loads(plan.home).max(axis=-1)
        assert np.all(plan.rank_loads(workload).max(axis=-1) <= before_ML)
        if plan.num_replicas and hasattr(policy, "smallest_share"):
            assert np.add.reduceat(plan.quota_tokens, plan.quota_starts[:-1]).min() >= policy.smallest_share


@pytest.mark.parametrize("name", WITHOUT_FORESIGHT)
def test_the_view_hides_the_step_from_policies_that_do_not_know_it(name: str) -> None:
    view = small_step(0).view(POLICIES[name], equal_terms=False)
    with pytest.raises(LookupError, match="can't see the whole step"):
        _ = view.workload
    with pytest.raises(LookupError, match="can't see the whole step"):
        _ = view.sequences


@pytest.mark.parametrize(("name", "steps"), [("eplb", 4), ("laer", 1)])
def test_only_the_last_steps_are_planned_from(name: str, steps: int) -> None:
    policy = POLICIES[name]
    step = random_step(np.random.default_rng(0), ranks=8, experts=32, ranks_per_node=8, past_steps=7, contiguous=True)
    # Other experts were hot in earlier steps.
    past_PLE = step.past_counts_PLE.copy()
    past_PLE[:-steps] = past_PLE[:-steps, :, ::-1]
    pasts = (past_PLE, past_PLE[-steps:], past_PLE[:-1])
    hashes = [replace(step, past_counts_PLE=past).plan(policy).hash for past in pasts]
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
