"""FasterMoE's shadows: counted by hand, chosen by cost, and as a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_future_is_unseen, check_policy, random_step, random_steps
from trimtab.cluster import QWEN3_30B
from trimtab.policies.rivals.fastermoe import FasterMoe, rows_by_shadows


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 12))
def test_rows_by_shadows_equal_a_plain_count(seed: int, ranks: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    counts_RE = rng.integers(0, 50, (ranks, experts))
    home_E = rng.integers(0, ranks, experts)
    hottest = rng.permutation(experts)[: rng.integers(0, experts + 1)]
    computed_KR, received_KR = rows_by_shadows(counts_RE, home_E, hottest)
    for k in range(len(hottest) + 1):
        computed, received = [0] * ranks, [0] * ranks
        for source, expert in np.ndindex(ranks, experts):
            rank = source if expert in hottest[:k] else int(home_E[expert])
            computed[rank] += int(counts_RE[source, expert])
            received[rank] += int(counts_RE[source, expert]) if rank != source else 0
        assert computed_KR[k].tolist() == computed
        assert received_KR[k].tolist() == received


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.sampled_from([1e8, 1e9, 1e10, 1e11]))
def test_the_number_of_shadows_has_the_least_predicted_time(seed: int, ranks: int, speed: float) -> None:
    """Three times the forward work of the busiest rank, four times its transfer, two transfers of every shadow."""
    rng = np.random.default_rng(seed)
    counts_RE = rng.integers(0, 2000, (ranks, 2 * ranks)) * (rng.random(2 * ranks) < 0.5)
    home_E = np.arange(2 * ranks) // 2
    policy = FasterMoe(flops=1e13)
    hottest = sorted(range(2 * ranks), key=lambda e: (-counts_RE[:, e].sum(), e))
    seconds = []
    for k in range(len(hottest) + 1):
        computed, received = [0] * ranks, [0] * ranks
        for (source, expert), rows in np.ndenumerate(counts_RE):
            rank = source if expert in hottest[:k] else int(home_E[expert])
            computed[rank] += int(rows)
            received[rank] += int(rows) if rank != source else 0
        # An expert of Qwen3-30B-A3B has three matrices of 2048 x 768; a token and a weight have two bytes a value.
        work_s, token_s, weights_s = 2 * 3 * 2048 * 768 / 1e13, 2 * 2048 / speed, 2 * 3 * 2048 * 768 / speed
        seconds.append(3 * work_s * max(computed) + 4 * token_s * max(received) + 2 * k * weights_s)
    shadows = policy.shadows(counts_RE, home_E, 2 * ranks, speed)
    assert shadows.tolist() == hottest[: len(shadows)]
    assert seconds[len(shadows)] == pytest.approx(min(seconds), rel=1e-12)


@settings(max_examples=80, deadline=None)
@given(random_steps(), st.sampled_from([1e9, 50e9, 1e15]))
def test_a_shadow_computes_the_tokens_of_its_own_rank(step: Step, speed: float) -> None:
    """Whatever the network costs; with a fast one, that is every expert worth its row."""
    policy = FasterMoe(node_bytes_per_s=speed, network_bytes_per_s=speed)
    plans = check_policy(policy, step)
    workload = step.workload()
    for terms, plan in plans.items():
        most = 0
        for m, layer in np.ndindex(plan.num_micro_steps, plan.num_layers):
            counts_RE = workload.token_counts_MLRE[m, layer]
            shadows = set()
            for p in plan.replicas_of(m, layer):
                expert, rank = plan.replica_experts[p], plan.replica_ranks[p]
                shadows.add(int(expert))
                quotas = slice(plan.quota_starts[p], plan.quota_starts[p + 1])
                assert plan.quota_sources[quotas].tolist() == [rank]
                assert plan.quota_tokens[quotas].tolist() == [counts_RE[rank, expert]]
            most = max(most, len(shadows))
            for expert in shadows:
                copies = {int(plan.replica_ranks[p]) for p in plan.replicas_of(m, layer)
                          if plan.replica_experts[p] == expert}  # fmt: skip
                assert copies | {int(plan.home[layer, expert])} >= set(np.flatnonzero(counts_RE[:, expert]).tolist())
        assert most <= plan.slots_per_rank
        if terms == "equal":
            assert most <= step.cluster.slots_per_rank


def test_shadows_are_the_hottest_experts_and_lower_the_busiest_rank() -> None:
    rng = np.random.default_rng(0)
    counts_RE = rng.multinomial(32768, np.arange(1, 129) ** -0.8 / (np.arange(1, 129) ** -0.8).sum(), 8)
    home_E = np.arange(128) // 16
    shadows = FasterMoe().shadows(counts_RE, home_E, 128, 150e9)
    assert shadows.tolist() == np.argsort(-counts_RE.sum(axis=0), kind="stable")[: len(shadows)].tolist()
    computed_KR, _ = rows_by_shadows(counts_RE, home_E, shadows)
    assert computed_KR[-1].max() < 0.8 * computed_KR[0].max()
    assert len(FasterMoe().shadows(counts_RE, home_E, 2, 150e9)) <= 2


def test_no_shadow_pays_when_the_load_is_small_or_the_network_slow() -> None:
    step = random_step(np.random.default_rng(0), ranks=4, experts=16, max_length=20)
    assert FasterMoe().plan(step.view(FasterMoe(), equal_terms=False)).num_replicas == 0
    large = random_step(np.random.default_rng(0), ranks=4, experts=16, max_length=20_000)
    assert FasterMoe().plan(large.view(FasterMoe(), equal_terms=False)).num_replicas > 0
    # Weights far heavier than tokens: nothing pays.
    wide = FasterMoe(model=replace(QWEN3_30B, expert_width=10**9), flops=1e30)
    assert wide.plan(large.view(wide, equal_terms=False)).num_replicas == 0


@settings(max_examples=15, deadline=None)
@given(random_steps(), st.integers(0, 2**32))
def test_plans_do_not_depend_on_later_instances(step: Step, seed: int) -> None:
    check_future_is_unseen(FasterMoe(network_bytes_per_s=1e15), step, np.random.default_rng(seed))
