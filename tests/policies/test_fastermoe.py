"""FasterMoE's shadows: counted by hand, chosen by cost, and as a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_policy, instances, random_step, random_steps
from trimtab.array_type import Array
from trimtab.cluster import QWEN3_30B
from trimtab.policies.rivals.fastermoe import FasterMoe, rows_by_shadows


def plain_rows(counts_RE: Array, home_E: Array, shadows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Rows that each rank computes and receives with some shadows."""
    computed, received = [0] * len(counts_RE), [0] * len(counts_RE)
    for (source, expert), rows in np.ndenumerate(counts_RE):
        rank = source if expert in shadows else int(home_E[expert])
        computed[rank] += int(rows)
        received[rank] += int(rows) if rank != source else 0
    return computed, received


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 12))
def test_rows_by_shadows_equal_a_plain_count(seed: int, ranks: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    counts_RE = rng.integers(0, 50, (ranks, experts))
    home_E = rng.integers(0, ranks, experts)
    hottest = rng.permutation(experts)[: rng.integers(0, experts + 1)].tolist()
    computed_KR, received_KR = rows_by_shadows(counts_RE, home_E, np.array(hottest, np.int64))
    for k in range(len(hottest) + 1):
        assert (computed_KR[k].tolist(), received_KR[k].tolist()) == plain_rows(counts_RE, home_E, hottest[:k])


@settings(max_examples=60)
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
        computed, received = plain_rows(counts_RE, home_E, hottest[:k])
        # An expert of Qwen3-30B-A3B has three matrices of 2048 x 768; a token and a weight have two bytes a value.
        work_s, token_s, weights_s = 2 * 3 * 2048 * 768 / 1e13, 2 * 2048 / speed, 2 * 3 * 2048 * 768 / speed
        seconds.append(3 * work_s * max(computed) + 4 * token_s * max(received) + 2 * k * weights_s)
    shadows = policy.shadows(counts_RE, home_E, 2 * ranks, speed)
    assert shadows.tolist() == hottest[: len(shadows)]
    assert seconds[len(shadows)] == pytest.approx(min(seconds), rel=1e-12)


@settings(max_examples=80)
@given(random_steps(), st.sampled_from([1e9, 50e9, 1e15]))
def test_a_shadow_computes_the_tokens_of_its_own_rank(step: Step, speed: float) -> None:
    """Whatever the network costs; with a fast one, that is every expert worth its row."""
    policy = FasterMoe(node_bytes_per_s=speed, network_bytes_per_s=speed)
    plans = check_policy(policy, step)
    workload = step.workload()
    for terms, plan in plans.items():
        most = 0
        for instance, replicas in enumerate(instances(plan)):
            m, layer = divmod(instance, plan.num_layers)
            counts_RE = workload.token_counts_MLRE[m, layer]
            assert all(tokens == {rank: counts_RE[rank, expert]} for expert, rank, tokens in replicas)
            shadows = {expert for expert, _, _ in replicas}
            most = max(most, len(shadows))
            for expert in shadows:
                ranks = {int(plan.home[layer, expert])} | {rank for e, rank, _ in replicas if e == expert}
                assert ranks >= set(np.flatnonzero(counts_RE[:, expert]).tolist())
        assert most <= plan.slots_per_rank
        if terms == "equal":
            assert most <= step.cluster.slots_per_rank


def test_no_shadow_pays_when_the_load_is_small_or_the_network_slow() -> None:
    step = random_step(np.random.default_rng(0), ranks=4, experts=16, max_length=20)
    assert step.plan(FasterMoe()).num_replicas == 0
    large = random_step(np.random.default_rng(0), ranks=4, experts=16, max_length=20_000)
    assert large.plan(FasterMoe()).num_replicas > 0
    # Weights far heavier than tokens: nothing pays.
    wide = FasterMoe(model=replace(QWEN3_30B, expert_width=10**9), flops=1e30)
    assert large.plan(wide).num_replicas == 0
