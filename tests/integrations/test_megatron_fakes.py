"""Megatron with Transformer Engine's grouped product, fused gradient accumulation, DeepEP and HybridEP.

All four are replacements in plain torch with their public contract; see `fake_te` and `fake_deep_ep`. No test here
reaches the libraries themselves, which need a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("megatron.core")

from helpers.megatron_fakes import (
    compare_by_autograd,
    compare_with_fakes,
    deepep_experts_of_weights_0,
    hybrid_buffer,
    refusals,
    use_fakes,
)
from helpers.megatron_runs import MegatronCase
from helpers.rank_pool import RankPool, shared_pool

CASES = {
    "grouped": MegatronCase(grouped=True, double=True, bias=True, recompute="moe_act"),
    "grouped fused": MegatronCase(grouped=True, fused=True, double=True),
    "grouped fused frozen": MegatronCase(grouped=True, fused=True, double=True, frozen=True, recompute="moe"),
    "grouped fused overlap": MegatronCase(
        grouped=True, fused=True, overlap=True, distributed_optimizer=True, dispatcher="trimtab"
    ),
    "fused": MegatronCase(fused=True),
    "deepep": MegatronCase(flex="deepep", double=True),
}


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    """Two ranks with the replacements. The pool starts new ones after a failure."""
    pool = shared_pool(2, "megatron with fakes")
    pool.call(use_fakes)
    yield pool
    pool.forget()


@pytest.mark.longer
@pytest.mark.parametrize("name", CASES)
def test_balanced_run_equals_megatrons_own(ranks: RankPool, name: str) -> None:
    case = CASES[name]
    # Adam multiplies rounding errors of float32, which are 1e-6 in the first step.
    assert max(ranks.call(compare_with_fakes, case)) < (1e-12 if case.double else 1e-4)


@pytest.mark.parametrize("name", ["grouped fused", "fused"])
def test_gradients_of_replicas_vanish_if_autograd_gets_them_with_fusion(ranks: RankPool, name: str) -> None:
    assert min(ranks.call(compare_by_autograd, CASES[name])) > 0.1


def test_one_hybridep_buffer_serves_home_and_physical_experts(ranks: RankPool) -> None:
    case = MegatronCase(flex="hybridep", grouped=True, fused=True, double=True, recompute="moe")
    assert max(ranks.call(compare_with_fakes, case)) < 1e-12
    # 8 experts on 2 ranks, with 2 slots each.
    assert ranks.call(hybrid_buffer) == [({4, 6}, 1)] * 2


def test_deepep_gets_planned_experts_with_weight_0(ranks: RankPool) -> None:
    for planned, sent, weights in ranks.call(deepep_experts_of_weights_0):
        assert sent == planned
        assert weights == [pytest.approx(row) for row in ([0.0, 1.0], [0.3, 0.7], [0.0, 0.0])]


def test_refuses_by_name(ranks: RankPool) -> None:
    for messages in ranks.call(refusals):
        assert "moe_flex_dispatcher_backend=ncclep is not supported" in messages["backend"]
        assert "set it to deepep or hybridep" in messages["backend"]
        assert "has experts in TEGroupedMLP; use SequentialMLP, or TEGroupedMLP with one weight" in messages["fused"]
        assert "has experts in TEGroupedMLP" in messages["single"]
        assert "has experts in GroupedMLP" in messages["legacy"]
        assert "HybridEP needs a multiple of 4 on all ranks: use slots_per_rank=2" in messages["slots"]
