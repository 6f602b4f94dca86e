"""Synthetic routing with the skew of published figures: by layer, domain and sequence, and with spikes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.routing import RoutingTrace, id_dtype
from trimtab.trace.sampling import derive, expert_noise, normal, sample_experts

SHORTEST = 16  # tokens
LENGTH_SPREAD = 0.4  # standard deviation of a length's logarithm
PROMPT_SHARE = 0.15
SPIKE_WEIGHT = 16.0  # weight of one hot expert, where that of all the others together is at most 1

# Parts of the seed's key, of a layer's key and of a sequence's key (see `derive`).
LAYERS, SEQUENCES = np.uint64(0), np.uint64(1)
COMMON, SPIKES, FIRST_DOMAIN = np.uint64(0), np.uint64(1), 2
LENGTH, DOMAIN, ROUTING = np.uint64(0), np.uint64(1), np.uint64(2)


@dataclass(frozen=True)
class SkewPreset:
    """Skew of the experts used by a synthetic model and its prompts.

    In every layer and domain the r-th hottest expert has popularity r**-z. Which expert is r-th follows from normal
    numbers that domains of a layer, and experts near each other, partly share. Layers differ in z, sequences of a
    domain in a random factor for each expert. Tokens of a sequence draw their experts independently.

    Attributes:
        name: the trace's `model`.
        zipf: least and greatest z. The layers cover the range evenly, in random order.
        domains: number of kinds of prompts. Each sequence belongs to one, all equally likely.
        closeness: correlation of two domains in what is hot, 0 to 1.
        clustering: correlation within an eighth of the expert ids in what is hot, 0 to 1. Without it the experts of
            a rank average out: with z of 0.30 to 0.95 the busiest of 8 ranks has 1.5 times the mean load at most,
            averaged over layers.
        deviation: standard deviation of the logarithm of a sequence's factors.
        drift: standard deviation of what a step adds to a domain's normal numbers, whose own deviation is 1.
        spikes: for each of as many equal blocks as there are entries, consecutive in a step's sequences: the number of
            hot experts that get nearly all of the block's tokens; 0 for none. They differ by layer and step.
    """

    name: str
    zipf: tuple[float, float] = (0.0, 0.0)
    domains: int = 1
    closeness: float = 1.0
    clustering: float = 0.0
    deviation: float = 0.0
    drift: float = 0.0
    spikes: tuple[int, ...] = ()


_RL_MATH = SkewPreset(
    "rl-math", zipf=(0.30, 0.95), domains=2, closeness=0.85, clustering=0.7, deviation=1.2, drift=0.05
)
_RL_MIXED = replace(_RL_MATH, name="rl-mixed", domains=4, closeness=0.35)
_SPIKE = replace(_RL_MIXED, name="spike", spikes=(0, 1, 0, 4, 0, 16, 0, 0))

PRESETS = {preset.name: preset for preset in (_RL_MATH, _RL_MIXED, _SPIKE, SkewPreset("uniform"))}
"""Skew by name.

* rl-math: two close subjects. rl-mixed: four subjects of the same model.
* spike: rl-mixed, but of the eighths of a step's sequences the second, fourth and sixth go to 1, 4 and 16 experts.
* uniform: no skew but chance.

max/mean rank load of instances, over seeds 0 to 4, with 8 layers, top-8, experts at home in the order of their ids,
and 8 micro-steps of about 4,096 tokens (8 sequences) a rank, packed by length:

| preset   | 8 ranks, 128 experts: mean by seed, all | 64 ranks, 256 experts: mean by seed, all |
|----------|-----------------------------------------|------------------------------------------|
| rl-math  | 1.79 to 2.26, 1.24 to 3.53              | 3.28 to 3.86, 1.74 to 7.92               |
| rl-mixed | 1.53 to 1.74, 1.12 to 2.93              | 2.37 to 2.69, 1.46 to 5.77               |
| uniform  | 1.01, 1.00 to 1.02                      | 1.01, 1.01 to 1.03                       |

Published figures close to those of rl-math:

* Zipf exponents of 0.30 to 0.95 by layer: the preset has these values. Since sequences and domains differ, a whole
  trace shows less, 0.25 to 0.77 (fitted to the busier half of its experts).
* At 8 ranks one rank holds 30 to 35% of the rows (gpt-oss-20b on maths): here 17 to 39%, by layer.
* Instances of 1.30 to 4.01 before balancing (UltraEP, 40 and 64 ranks): here 70% of them at 64 ranks; the rest, in the
  steepest layers, are beyond.
* Data of one domain stays skewed however many sequences are averaged: here a step is as skewed as its micro-steps.

A published figure that contradicts these: the busier half of the experts getting 53 to 56% of the tokens in the average
layer, 60 to 65% in the worst (Qwen3-30B-A3B). Under a Zipf popularity that half gets about 0.5 ** (1 - z), so the
average layer would have a z of 0.09 to 0.16. Even if the 16 hottest of 128 experts shared a rank, it would have no more
than 1.4 times the mean load. Here the busier half gets 60% in the flattest layer, 70% on average and 80% in the
steepest.
"""


def synthesize_preset(
    preset: SkewPreset,
    *,
    num_sequences: int,
    mean_length: int,
    max_length: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    num_steps: int = 1,
    seed: int = 0,
) -> RoutingTrace:
    """A trace of synthetic sequences, the same for the same arguments.

    Popularity drifts slightly from step to step; sequences are new in every step.

    Args:
        preset: one of `PRESETS`, or one's own.
        num_sequences: sequences of each step.
        mean_length: mean tokens of a sequence, before clipping. Lengths are lognormal, clipped to 16 tokens (or the
            mean, if that is less) and `max_length`. About 15% of a sequence, but at least one token, is prompt.
        seed: 0 to 2**64 - 1. It fixes which experts are hot, too.

    Raises:
        InputError: if the arguments allow no trace.
    """
    if not 1 <= top_k <= num_experts:
        raise InputError(f"top_k is {top_k}; it should be 1 to the number of experts, {num_experts}")
    if not 1 <= mean_length <= max_length:
        raise InputError(f"the mean length is {mean_length}; it should be 1 to the greatest length, {max_length}")
    if not 0 <= seed < 1 << 64:
        raise InputError(f"the seed is {seed}; it should be 0 to 2**64 - 1")
    seed_key = np.array([seed], np.uint64)
    layer_key_L = derive(derive(seed_key, LAYERS), _parts(num_layers))
    key_S = derive(derive(seed_key, SEQUENCES), _parts(num_sequences * num_steps))
    length_S = _lengths(derive(key_S, LENGTH), mean_length, max_length)
    starts = np.concatenate([[0], np.cumsum(length_S)])
    ids_TLK = np.empty((starts[-1], num_layers, top_k), id_dtype(num_experts))
    profile_S = np.empty(len(key_S), np.int64)
    for step in range(num_steps):
        first, end = step * num_sequences, (step + 1) * num_sequences
        popularity_DLE = _domain_popularity(preset, layer_key_L, num_experts, step)
        popularity_BLE = _spike_popularity(preset, layer_key_L, popularity_DLE.mean(axis=0), step)
        profile_S[first:end] = _profiles(preset, derive(key_S[first:end], DOMAIN))
        sample_experts(
            np.log(np.concatenate([popularity_DLE, popularity_BLE])),
            profile_S[first:end],
            derive(key_S[first:end], ROUTING),
            starts[first : end + 1],
            preset.clustering,
            preset.deviation,
            ids_TLK,
        )
    return RoutingTrace(
        expert_ids=ids_TLK,
        sequence_starts=starts,
        prompt_lengths=np.maximum(1, PROMPT_SHARE * length_S).astype(np.int32),
        steps=np.repeat(np.arange(num_steps, dtype=np.int32), num_sequences),
        sequence_hashes=np.maximum(key_S, np.uint64(1)),
        domains=_domain_names(preset, profile_S),
        layer_indices=np.arange(num_layers, dtype=np.int32),
        num_experts=num_experts,
        model=f"synthetic {preset.name}",
    )


def _domain_names(preset: SkewPreset, profile_S: Array) -> Array:
    blocks = max(len(preset.spikes), 1)
    names = [f"subject {domain}" for domain in range(preset.domains)] + ["spike"] * blocks
    return np.array(names)[profile_S]


def _parts(count: int, first: int = 0) -> Array:
    return np.arange(first, first + count, dtype=np.uint64)


def _lengths(key_S: Array, mean: int, longest: int) -> Array:
    """`[S]` int64, tokens of each sequence."""
    length_S = mean * np.exp(LENGTH_SPREAD * normal(key_S) - LENGTH_SPREAD**2 / 2)
    return np.clip(np.rint(length_S), min(SHORTEST, mean), longest).astype(np.int64)


def _domain_popularity(preset: SkewPreset, layer_key_L: Array, num_experts: int, step: int) -> Array:
    """`[D, L, E]` float64, each row a permutation of 1, 2**-z, 3**-z, ... with its layer's z."""
    num_layers = len(layer_key_L)
    domain_key_DL = derive(layer_key_L[None], _parts(preset.domains, FIRST_DOMAIN)[:, None])

    def noise(key: Array) -> Array:
        return expert_noise(key.ravel(), num_experts, preset.clustering).reshape(*key.shape, num_experts)

    noise_DLE = np.sqrt(1 - preset.closeness) * noise(derive(domain_key_DL, np.uint64(0)))
    noise_DLE += np.sqrt(preset.closeness) * noise(derive(layer_key_L, COMMON))
    for drifted in range(1, step + 1):
        noise_DLE += preset.drift * noise(derive(domain_key_DL, np.uint64(drifted)))
    low, high = preset.zipf
    zipf_L = low + (high - low) * (_ranks(layer_key_L) + 0.5) / num_layers
    return (1.0 + _ranks(-noise_DLE)) ** -zipf_L[:, None]


def _ranks(values: Array) -> Array:
    """Rank of each value along the last axis, in ascending order."""
    return np.argsort(np.argsort(values, axis=-1), axis=-1)


def _spike_popularity(preset: SkewPreset, layer_key_L: Array, popularity_LE: Array, step: int) -> Array:
    """`[B, L, E]` float64: the given popularity, but each hot expert of a block outweighs all others by far."""
    share_LE = popularity_LE / popularity_LE.sum(axis=1, keepdims=True)
    block_key_BL = derive(
        derive(layer_key_L, SPIKES)[None], _parts(len(preset.spikes), step * len(preset.spikes))[:, None]
    )
    order_BLE = _ranks(derive(block_key_BL[:, :, None], _parts(popularity_LE.shape[1])))
    hot_BLE = order_BLE < np.array(preset.spikes, np.int64)[:, None, None]
    return np.where(hot_BLE, SPIKE_WEIGHT, share_LE)


def _profiles(preset: SkewPreset, key_S: Array) -> Array:
    """`[S]` int64, each sequence's domain, or the number of domains plus its block's number if the block is a spike."""
    domain_S = (key_S % np.uint64(preset.domains)).astype(np.int64)
    if not preset.spikes:
        return domain_S
    block_S = np.arange(len(key_S)) * len(preset.spikes) // len(key_S)
    return np.where(np.array(preset.spikes)[block_S] > 0, preset.domains + block_S, domain_S)
