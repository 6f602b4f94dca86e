"""Presets of synthetic routing: their skew, validity in any shape, and reproducibility by seed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from trimtab import InputError, RoutingTrace
from trimtab.planner import pack_by_length
from trimtab.planner.plan.workload import max_over_mean
from trimtab.trace import PRESETS, SkewPreset, synthesize_preset
from trimtab.trace.counting import count_experts
from trimtab.trace.presets import _domain_popularity
from trimtab.trace.sampling import derive, sample_experts

MICRO_STEPS = 8


def small_trace(preset: str = "qwen3-30b-math", mean_length: int = 64, **changes: int) -> RoutingTrace:
    sizes = {"num_sequences": 16, "num_layers": 2, "num_experts": 32, "top_k": 4} | changes
    return synthesize_preset(PRESETS[preset], mean_length=mean_length, max_length=2 * mean_length, **sizes)


def imbalance(preset: str, ranks: int, experts: int, layers: int, seed: int) -> np.ndarray:
    """max/mean rank load `[M, L]` of 8 micro-steps of 4,096 tokens a rank, with experts at home by id."""
    sequences = ranks * MICRO_STEPS * 8
    sizes = {"num_sequences": sequences, "num_layers": layers, "num_experts": experts, "top_k": 8}
    trace = small_trace(preset, mean_length=512, seed=seed, **sizes)
    budget = trace.num_tokens // (ranks * MICRO_STEPS) + 256
    schedule = pack_by_length(trace.sequence_lengths, num_ranks=ranks, token_budget=budget)
    assert schedule.num_micro_steps == MICRO_STEPS
    counts_MLE = count_experts(trace, schedule.micro_step, MICRO_STEPS)
    return max_over_mean(counts_MLE.reshape(MICRO_STEPS, layers, ranks, experts // ranks).sum(axis=-1))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("preset", "ranks", "experts", "layers", "least", "most"),
    [
        ("qwen3-30b-math", 8, 128, 8, 1.3, 1.7),
        ("qwen3-30b-math", 64, 256, 4, 2.0, 3.5),
        ("qwen3-30b-mixed", 8, 128, 8, 1.1, 1.4),
        ("qwen3-30b-mixed", 64, 256, 4, 1.4, 2.4),
        ("uniform", 8, 128, 2, 1.0, 1.1),
        ("uniform", 64, 256, 1, 1.0, 1.1),
    ],
)
def test_rank_loads_of_presets(
    preset: str, ranks: int, experts: int, layers: int, least: float, most: float, seed: int
) -> None:
    ratios = imbalance(preset, ranks, experts, layers, seed)
    assert least <= ratios.mean() <= most
    assert preset == "uniform" or ratios.std(axis=0).mean() > 0.02, "micro-steps should fluctuate"


def test_sizes_are_those_of_the_preset_by_default() -> None:
    sizes = {"num_sequences": 2, "mean_length": 20, "max_length": 40, "num_layers": 2}
    for preset in PRESETS.values():
        trace = synthesize_preset(preset, **sizes)
        assert (trace.num_experts, trace.top_k) == (preset.num_experts, preset.top_k)
    trace = synthesize_preset(PRESETS["uniform"], **sizes, num_experts=9)
    assert (trace.num_experts, trace.top_k) == (9, 8)


def test_spikes_take_their_blocks_and_leave_the_others() -> None:
    trace = small_trace("spike", num_sequences=64, mean_length=256, num_layers=4, num_experts=128, top_k=8)
    block = np.arange(64) // 8
    counts_BLE = np.sort(count_experts(trace, block, 8), axis=-1)[:, :, ::-1]
    tokens_B = np.bincount(block, trace.sequence_lengths)
    for spike, hot in ((1, 1), (3, 4), (5, 16)):
        # Picks of hot experts, of all that tokens could pick of them.
        assert np.all(counts_BLE[spike, :, :hot].sum(axis=-1) > 0.95 * min(hot, 8) * tokens_B[spike])
    for calm in (0, 2, 4, 6, 7):
        assert np.all(counts_BLE[calm, :, 0] < 0.7 * tokens_B[calm])


def test_spikes_move_from_layer_to_layer_and_step_to_step() -> None:
    trace = small_trace("spike", num_sequences=8, num_layers=6, num_experts=128, num_steps=2)
    hottest = [count_experts(trace.select([s]), np.zeros(1, int), 1)[0].argmax(axis=-1) for s in (1, 9)]
    assert len(set(hottest[0].tolist())) > 3
    assert np.mean(hottest[0] == hottest[1]) < 0.5


def test_a_step_of_drift_is_about_its_own_subject() -> None:
    """Half of its sequences, and an eighth of the others."""
    trace = small_trace("drift", num_sequences=1600, num_experts=128, top_k=1, num_steps=9)
    for step in range(9):
        subjects, counts = np.unique(trace.domains[trace.steps == step], return_counts=True)
        own = counts[subjects == f"subject {step % 8}"].item()
        assert 0.5 < own / 1600 < 0.62
        assert counts[subjects != f"subject {step % 8}"].max() < 0.1 * 1600


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize(
    ("sequences", "experts", "top_k"),
    [(3, 1, 1), (1, 8, 8), (9, 20, 20), (5, 257, 8), (4, 255, 1), (8, 3, 2), (0, 8, 2)],
)
def test_any_shape_is_valid(preset: str, sequences: int, experts: int, top_k: int) -> None:
    trace = small_trace(preset, num_sequences=sequences, num_experts=experts, top_k=top_k, num_steps=2)
    trace.check()
    assert np.all(trace.expert_ids < experts)
    assert (trace.num_sequences, trace.top_k) == (2 * sequences, top_k)
    assert trace.steps.tolist() == [0] * sequences + [1] * sequences
    assert trace.model == f"synthetic {preset}"


def test_the_seed_fixes_everything() -> None:
    trace, again, other = small_trace(seed=3), small_trace(seed=3), small_trace(seed=4)
    for name in ("expert_ids", "sequence_starts", "prompt_lengths", "sequence_hashes"):
        assert np.array_equal(getattr(trace, name), getattr(again, name))
    assert not np.array_equal(trace.sequence_lengths, other.sequence_lengths)


def test_popularity_is_zipf_with_exponents_spread_over_the_layers() -> None:
    """The r-th of a layer's experts has r**-z of the first one's; z is even between the preset's ends."""
    keys = derive(np.uint64(7), np.arange(10, dtype=np.uint64))
    preset = PRESETS["qwen3-30b-math"]
    low, high = preset.zipf
    of_steps = [_domain_popularity(preset, keys, 32, step) for step in range(3)]
    # It drifts from step to step.
    assert all((one != other).any(axis=-1).all() for one, other in pairwise(of_steps))
    for popularity_DLE in of_steps:
        descending_DLE = -np.sort(-popularity_DLE, axis=-1)
        exponents_DL = -np.log2(descending_DLE[..., 1])
        for exponents_L in exponents_DL:
            assert np.sort(exponents_L) == pytest.approx(low + (high - low) * (np.arange(10) + 0.5) / 10)
        expected = np.arange(1, 33) ** -exponents_DL[..., None]
        assert np.allclose(descending_DLE, expected)


@pytest.mark.parametrize(("changes", "ratio"), [({}, 1.0), ({"clustering": 1.0}, 63 / 7)])
def test_neighbours_are_equally_hot_only_with_clustering(changes: dict[str, Any], ratio: float) -> None:
    """Variance of the mean rank of an eighth, over that of 8 of 64 ranks drawn at random."""
    keys = derive(np.uint64(7), np.arange(300, dtype=np.uint64))
    preset = SkewPreset("own", zipf=(1.0, 1.0), domains=2, **changes)
    first_LE, second_LE = _domain_popularity(preset, keys, 64, 0)
    mean_rank_LN = (1 / first_LE).reshape(300, 8, 8).mean(axis=2)
    random = (64**2 - 1) / 12 / 8 * (64 - 8) / (64 - 1)
    assert ((mean_rank_LN - 32.5) ** 2).mean() / random == pytest.approx(ratio, rel=0.15)
    # Domains and steps do not differ by default.
    assert np.array_equal(first_LE, second_LE)
    assert np.array_equal(first_LE, _domain_popularity(preset, keys, 64, 3)[0])


def test_random_numbers_do_not_change() -> None:
    """A new version of numpy or numba must not change what a seed gives. The keys are splitmix64's published ones."""
    key = np.array([0], np.uint64)
    assert derive(key, np.array([0, 1], np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    trace = small_trace("uniform", num_sequences=2, mean_length=20, num_layers=1, num_experts=64)
    assert trace.sequence(0)[:2].tolist() == [[[55, 58, 10, 63]], [[35, 42, 58, 14]]]


def test_a_longer_trace_begins_like_a_shorter_one() -> None:
    short, long = small_trace(num_steps=1), small_trace(num_steps=2)
    assert np.array_equal(short.expert_ids, long.expert_ids[: short.num_tokens])


def test_steps_share_popularity_and_no_sequences() -> None:
    trace = small_trace(num_sequences=256, num_steps=3)
    assert len(np.unique(trace.sequence_hashes)) == 3 * 256
    assert np.all(trace.sequence_hashes != 0)
    counts_PLE = count_experts(trace, trace.steps, 3)
    for layer in range(2):
        assert np.corrcoef(counts_PLE[:, layer]).min() > 0.9
    assert not np.array_equal(counts_PLE[0], counts_PLE[1])


def test_lengths_are_lognormal_within_their_bounds() -> None:
    lengths = small_trace(num_sequences=2000, mean_length=100, num_layers=1, num_experts=4, top_k=1).sequence_lengths
    assert 95 < lengths.mean() < 105
    assert 16 <= lengths.min() < 40
    assert lengths.max() == 200
    assert small_trace(num_sequences=50, mean_length=5).sequence_lengths.min() == 5


def test_a_seventh_of_a_sequence_is_prompt() -> None:
    trace = small_trace(num_sequences=100, mean_length=200)
    assert np.all(trace.prompt_lengths >= 1)
    assert trace.prompt_lengths.sum() == pytest.approx(0.15 * trace.num_tokens, rel=0.02)
    assert np.all(small_trace(mean_length=2).prompt_lengths == 1)


def test_single_picks_follow_the_popularity() -> None:
    """Pearson's statistic of 8 experts is above 40 once in a million times."""
    tokens, weights = 60_000, np.array([8, 4, 2, 1, 1, 0.5, 0.25, 0.25])
    ids_TLK = np.empty((tokens, 1, 1), np.uint8)
    keys, starts = np.array([5], np.uint64), np.array([0, tokens])
    sample_experts(np.log(weights)[None, None], np.zeros(1, np.int64), keys, starts, (0.0, 0.0), (1, 1), ids_TLK)
    expected_E = tokens * weights / weights.sum()
    found_E = np.bincount(ids_TLK.ravel(), minlength=8)
    assert ((found_E - expected_E) ** 2 / expected_E).sum() < 40


@pytest.mark.parametrize("steepness", [0.0, 1.0, 8.0])
def test_sampling_equals_gumbel_top_k(steepness: float) -> None:
    """The kernel and a draw without replacement in plain numpy pick every expert equally often.

    At the greatest steepness most picks are misses, so that tokens finish with scans.
    """
    tokens, experts, top_k = 40_000, 12, 4
    log_popularity_E = -steepness * np.arange(experts)
    ids_TLK = np.empty((tokens, 1, top_k), np.uint8)
    keys, starts = np.ones(1, np.uint64), np.array([0, tokens])
    sample_experts(log_popularity_E[None, None], np.zeros(1, np.int64), keys, starts, (0.0, 0.0), (1, 1), ids_TLK)
    noisy_TE = np.random.default_rng(0).gumbel(size=(tokens, experts)) + log_popularity_E
    expected_TK = np.argsort(-noisy_TE, axis=1)[:, :top_k]
    for place in range(top_k):
        drawn, expected = (np.bincount(ids[:, place], minlength=experts) for ids in (ids_TLK[:, 0], expected_TK))
        assert np.abs(drawn - expected).max() < 5 * np.sqrt(tokens / 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 33}, "top_k is 33; it should be 1 to the number of experts, 32"),
        ({"num_experts": 70_000}, "num_experts is 70000"),
        ({"mean_length": 0}, "the mean length is 0"),
        ({"seed": 1 << 64}, "it should be 0 to 2"),
        ({"seed": -1}, "the seed is -1"),
    ],
)
def test_impossible_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small_trace(**change)
