"""Memory of ranks, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.reference_flows import peak_bytes
from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.cluster import QWEN3_30B, ModelSpec
from trimtab.planner.replicas.paths import HOST, PEER
from trimtab.policies import Traits
from trimtab.simulator.memory import RankLoad, mirror_bytes, rank_memory, replica_pool_bytes, state_bytes, ways_to_fit
from trimtab.simulator.step import StepSettings

# An expert has 600 weights, 1200 bytes; its gradient in float32 has 2400.
MODEL = ModelSpec(
    "small", num_experts=4, top_k=1, hidden_size=20, expert_width=10, moe_layers=4,
    attention_parameters=100, vocab_size=7,
)  # fmt: skip
WEIGHTS, GRADIENT = 1200, 2400


def small_plan() -> StepPlan:
    """Two micro-steps of two layers on two ranks with experts 0 and 1, 2 and 3; a rank has two slots.

    In micro-step 0 layer 0 has expert 0 on rank 1, layer 1 experts 0 and 1 on rank 1 and 2 on rank 0; in micro-step 1
    layer 0 has expert 1 on rank 1, and layer 1 expert 0 again.
    """
    counts_MLRE = np.full((2, 2, 2, 4), 5, np.int32)
    replicas = [[(0, 1)], [(0, 1), (1, 1), (2, 0)], [(1, 1)], [(0, 1)]]
    plan = StepPlan.from_instances(
        Schedule(np.array([0, 1], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32), 2),
        Placement.contiguous(2, 4, 2),
        [np.array(instance) for instance in replicas],
        [np.tile([[2, 1]], (len(instance), 1)) for instance in replicas],
        mixed_ML=np.zeros((2, 2), bool),
        cluster=ClusterSpec(2, 2, 2),
    )
    plan.check(Workload.known(counts_MLRE))
    return plan


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ("none", [0, 0]),
        # Three layers at a time: two slots, and the gradients of at most three replicas of an instance: in micro-step 0
        # and layer 1 two come home to rank 0 and one leaves it; two leave rank 1 and one comes.
        ("shared slots", [3 * (2 * WEIGHTS + 3 * GRADIENT)] * 2),
        # Rank 1 keeps experts 0 and 1 of both layers, rank 0 expert 2 of one; the model has twice the layers.
        ("layer slots", [2 * 1 * (WEIGHTS + GRADIENT), 2 * 4 * (WEIGHTS + GRADIENT)]),
        # In micro-step 0 rank 1 has three copies in all its layers, and rank 0 one.
        ("unbounded", [2 * 1 * (WEIGHTS + GRADIENT), 2 * 3 * (WEIGHTS + GRADIENT)]),
    ],
)
def test_the_replica_pool_holds_the_copies_kept_at_once(copies: Any, expected: list[int]) -> None:
    plan, traits = small_plan(), Traits("step", copies=copies)
    assert replica_pool_bytes(plan, MODEL, traits, 3).tolist() == expected
    assert not replica_pool_bytes(plan.without_replicas(), MODEL, traits, 3).any()


def test_the_mirror_holds_every_mirrored_expert_of_a_node_once() -> None:
    plan = small_plan()
    host, peer = (replace(plan, replica_paths=np.full_like(plan.replica_paths, path)) for path in (HOST, PEER))
    # Experts 0 and 1 of layer 0, 0, 1 and 2 of layer 1; twice the layers.
    assert mirror_bytes(host, MODEL, Traits("step", host_path=True)) == 2 * 5 * WEIGHTS
    assert mirror_bytes(host, MODEL, Traits("step")) == mirror_bytes(peer, MODEL, Traits("step", host_path=True)) == 0


DEEPSEEK_V3 = ModelSpec.named("deepseek-v3")


def even_load(model: ModelSpec, ranks: int, tokens: int, layers: int | None = None) -> RankLoad:
    """All ranks with as many experts and rows in one micro-step."""
    layers = layers or model.moe_layers
    rows = np.full((1, layers, ranks), tokens * model.top_k)
    homes = np.full(ranks, layers * model.num_experts // ranks)
    return RankLoad(layers, homes, np.full((1, ranks), tokens), rows, np.zeros(ranks, np.int64))


def test_qwen3_30b_on_16_ranks_by_hand() -> None:
    # 8 of 128 experts in 48 layers are 384, of 3 * 2048 * 768 = 4,718,592 parameters: 1,811,939,328.
    # Dense: 48 * (18,874,368 + 128 * 2048) + 2 * 151,936 * 2048 = 1,540,882,432, without norms.
    dense = QWEN3_30B.dense_parameters
    assert dense == pytest.approx(1_540_882_432, rel=0.01)
    found = rank_memory(even_load(QWEN3_30B, 16, 4096), QWEN3_30B)
    assert found == {
        "expert parameters": 3_623_878_656,  # 2 bytes
        "expert gradients": 7_247_757_312,  # 4 bytes
        "expert optimizer state": 21_743_271_936,  # 12 bytes; with one group it is not shared
        "dense parameters": 2 * dense,
        "dense gradients": 4 * dense,
        "dense optimizer state": -(-12 * dense // 16),
        # A token: 4 * 2048 and 18,874,368 / 2048 = 9,216 values of 2 bytes, 8 bytes for each of 128 experts: 35,840.
        # A row: (2 * 2048 + 3 * 768) * 2 = 12,800. 48 layers of 4096 tokens and 32,768 rows.
        "activations": 48 * (4096 * 35_840 + 32_768 * 12_800),
        # 2 * 2048 * 2 + 4 * 151,936 = 615,936 bytes of a token.
        "output head": 4096 * 615_936,
        # 32,768 rows sent and as many received, of 4,096 bytes.
        "dispatch buffers": 65_536 * 4096,
        "replica pool": 0,
    }
    # About 73 GB, most of it experts' state and activations.
    assert sum(found.values()) == pytest.approx(73.0e9, rel=0.01)
    kept = rank_memory(even_load(QWEN3_30B, 16, 4096), QWEN3_30B, checkpointing=True)
    # The inputs of 48 layers, 4,096 bytes a token, and one layer's activations.
    assert kept["activations"] == 48 * 4096 * 4096 + 4096 * 35_840 + 32_768 * 12_800
    assert {name for name in found if found[name] != kept[name]} == {"activations"}


def test_deepseek_v3_in_two_groups_of_64_by_hand() -> None:
    load = even_load(DEEPSEEK_V3, 64, 2048)
    # 4 of 256 experts in 58 layers are 232, of 3 * 7168 * 2048 = 44,040,192 parameters: 10,217,324,544.
    dense = DEEPSEEK_V3.dense_parameters
    # Latent attention: 187,105,280 / 7168 = 26,102 values are fewer than 40,960, so 2 * 40,960 are kept.
    kept = 4 * 7168 + 81_920
    token, dense_token = 2 * (kept + 3 * 2048) + 8 * 256, 2 * (kept + 3 * 18_432)
    row = 2 * (2 * 7168 + 3 * 2048)
    found = rank_memory(load, DEEPSEEK_V3, groups=2)
    assert found["expert parameters"] == 20_434_649_088
    assert found["expert gradients"] == 40_869_298_176
    assert found["expert optimizer state"] == 61_303_947_264  # 12 bytes, shared by two groups
    assert found["dense optimizer state"] == -(-12 * dense // 128)
    assert found["activations"] == 2048 * (58 * token + 3 * dense_token) + 58 * 16_384 * row
    assert found["output head"] == 2048 * (2 * 7168 * 2 + 4 * 129_280)
    assert found["dispatch buffers"] == 2 * 16_384 * 7168 * 2
    alone = rank_memory(load, DEEPSEEK_V3)
    assert alone["expert optimizer state"] == 2 * found["expert optimizer state"]
    assert alone["dense optimizer state"] == -(-12 * dense // 64)
    # With FSDP experts are shared by two groups, dense parameters by 128 ranks; float32 parameters are the master copy.
    sharded = rank_memory(load, DEEPSEEK_V3, groups=2, sharding="fsdp")
    assert sharded["expert parameters"] == sharded["expert gradients"] == 2 * 10_217_324_544
    assert sharded["expert optimizer state"] == 4 * 10_217_324_544
    assert sharded["dense gradients"] == -(-4 * dense // 128)
    # Two layers of bfloat16 weights and one of float32 gradients: four experts and a 61st of the dense parameters.
    assert sharded["gathered layers"] == 8 * (4 * 44_040_192 + dense // 61)
    # Float32 weights are twice as many bytes.
    wide = rank_memory(load, replace(DEEPSEEK_V3, weight_bytes=4), groups=2, sharding="fsdp")
    assert wide["gathered layers"] == 12 * (4 * 44_040_192 + dense // 61)
    # Nothing shared: 18 bytes a parameter.
    whole = rank_memory(load, DEEPSEEK_V3, groups=2, sharding="ddp")
    assert whole["expert optimizer state"] == 12 * 10_217_324_544
    assert whole["dense optimizer state"] == 12 * dense
    # With checkpointing a dense layer is the largest only without rows.
    empty = replace(load, rows_MLR=0 * load.rows_MLR)
    inputs = 61 * 2048 * 7168 * 2
    assert rank_memory(load, DEEPSEEK_V3, checkpointing=True)["activations"] == inputs + 2048 * token + 16_384 * row
    assert rank_memory(empty, DEEPSEEK_V3, checkpointing=True)["activations"] == inputs + 2048 * dense_token


@pytest.mark.parametrize(("weight_bytes", "bytes_each"), [(2, (2, 4, 12)), (4, (4, 4, 8)), (8, (8, 8, 16))])
def test_state_of_a_parameter_by_dtype(weight_bytes: int, bytes_each: tuple[int, int, int]) -> None:
    """Megatron's table: 18 bytes with bf16 weights and float32 gradients, 16 with float32 weights."""
    model = replace(MODEL, weight_bytes=weight_bytes)
    found = rank_memory(even_load(model, 2, 1), model, sharding="ddp")
    assert list(state_bytes(found, "expert")) == ["parameters", "gradients", "optimizer state"]
    assert list(state_bytes(found, "expert").values()) == [8 * 600 * size for size in bytes_each]


def test_a_partial_trace_needs_the_memory_of_the_whole_model() -> None:
    whole = even_load(QWEN3_30B, 16, 4096)
    for choices in ({}, {"checkpointing": True}, {"sharding": "fsdp", "groups": 4}):
        expected: Any = rank_memory(whole, QWEN3_30B, **choices)
        assert rank_memory(even_load(QWEN3_30B, 16, 4096, layers=8), QWEN3_30B, **choices) == expected


def test_memory_is_that_of_the_rank_that_needs_most() -> None:
    # Rows of the layers differ; the largest instance has most in the dispatch buffers.
    loads_MLR = np.array([[[17, 23], [170, 2]], [[1, 40], [300, 41]]])
    plan = replace(small_plan(), micro_step=np.array([0, 0, 1, 1], np.int32), rank=np.array([0, 1, 0, 1], np.int32))
    for home in ([[0, 0, 1, 1], [0, 0, 1, 1]], [[0, 0, 0, 1], [0, 1, 1, 1]], [[0, 1, 1, 1], [0, 1, 1, 1]]):
        moved = replace(plan, home=np.array(home, np.int16))
        for lengths in ([11, 2, 3, 30], [500, 2, 3, 30]):
            # A large pool makes its rank the one that needs most.
            for pool_R in (np.array([0, 0]), np.array([0, 10**9])):
                homes_R = np.bincount(moved.home.ravel(), minlength=2)
                load = RankLoad(2, homes_R, np.reshape(lengths, (2, 2)), loads_MLR, pool_R)
                expected = peak_bytes(moved, loads_MLR, lengths, MODEL, groups=1, pool_R=pool_R)
                assert sum(rank_memory(load, MODEL).values()) == expected


def test_ways_to_fit_are_enough_and_no_smaller_one_is() -> None:
    load = even_load(QWEN3_30B, 16, 4096)

    def peak(**choices: Any) -> int:
        return sum(rank_memory(load, QWEN3_30B, **choices).values())

    def ways(device_bytes: float, **settings: Any) -> list[str]:
        return ways_to_fit(load, QWEN3_30B, StepSettings(**settings), device_bytes)

    both = {"checkpointing": True, "sharding": "fsdp"}
    assert peak(**both) < peak(checkpointing=True) < peak(sharding="fsdp") < peak() < peak(sharding="ddp")
    assert ways(peak(sharding="fsdp")) == [
        "with --recompute-granularity full", "with --sharding fsdp", "from EP 32", "from --pp 2",
    ]  # fmt: skip
    assert ways(peak(checkpointing=True)) == ["with --recompute-granularity full", "from EP 128", "from --pp 2"]
    assert peak(times_ranks=8) <= peak(checkpointing=True) < peak(times_ranks=4)
    assert ways(peak(**both))[0] == "with --recompute-granularity full --sharding fsdp"
    assert ways(peak(**both) - 1)[0] == "from EP 32 with --recompute-granularity full --sharding fsdp"
    assert ways(peak(checkpointing=True), sharding="ddp")[0] == "with --recompute-granularity full --sharding zero1"
    assert ways(peak(), sharding="ddp")[0] == "with --recompute-granularity full"
    assert ways(peak(), sharding="ddp")[1:3] == ["with --sharding zero1", "with --sharding fsdp"]
    assert ways(peak(**both) - 1, **both) == ["from EP 32", "from --pp 2"]
    assert ways(1e9) == []
