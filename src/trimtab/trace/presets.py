"""Synthetic routing with the skew of published figures: by layer, domain and sequence, and with spikes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.routing import RoutingTrace, id_dtype, windows_array
from trimtab.trace.sampling import derive, expert_noise, normal, sample_experts

SHORTEST = 16  # tokens
LENGTH_SPREAD = 0.4  # standard deviation of a length's logarithm
PROMPT_SHARE = 0.15
SPIKE_WEIGHT = 16.0  # weight of one hot expert, where that of all the others together is at most 1

# Parts of the seed's key, of a layer's key and of a sequence's key (see `derive`).
LAYERS, SEQUENCES = np.uint64(0), np.uint64(1)
COMMON, SPIKES, FIRST_DOMAIN = np.uint64(0), np.uint64(1), 2
LENGTH, DOMAIN, ROUTING, CURRICULUM = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)


@dataclass(frozen=True)
class SkewPreset:
    """Skew of the experts used by a synthetic model and its prompts.

    In every layer and domain the r-th hottest expert has popularity r**-z. Which expert is r-th follows from normal
    numbers that domains of a layer, and experts near each other, partly share. Layers differ in z, sequences of a
    domain in a random factor for each expert. Tokens of a sequence draw their experts independently.

    Attributes:
        name: the trace's `model`.
        num_experts: routed experts of a layer, of the model that the preset is named after.
        top_k: experts that a token uses, of that model.
        moe_layers: layers with experts, of that model.
        zipf: least and greatest z. The layers cover the range evenly, in random order.
        domains: number of kinds of prompts. Each sequence belongs to one, all equally likely.
        curriculum: part of a step's sequences that are of the step's own kind instead; the kinds take turns.
        closeness: correlation of two domains in what is hot, 0 to 1.
        clustering: correlation within an eighth of the expert ids in what is hot, 0 to 1.
        deviation: standard deviation of the logarithm of a sequence's factors.
        drift: standard deviation of what a step adds to a domain's normal numbers, whose own deviation is 1.
        spikes: for each of as many equal blocks as there are entries, consecutive in a step's sequences: the number of
            hot experts that get nearly all of the block's tokens; 0 for none. They differ by layer and step.
    """

    name: str
    num_experts: int = 128
    top_k: int = 8
    moe_layers: int = 48
    zipf: tuple[float, float] = (0.0, 0.0)
    domains: int = 1
    curriculum: float = 0.0
    closeness: float = 1.0
    clustering: float = 0.0
    deviation: float = 0.0
    drift: float = 0.0
    spikes: tuple[int, ...] = ()


_MATH = SkewPreset(
    "qwen3-30b-math", zipf=(0.30, 0.85), domains=2, closeness=0.85, clustering=0.1, deviation=0.95, drift=0.1
)
_MIXED = replace(_MATH, name="qwen3-30b-mixed", domains=8, closeness=0.2)
_TEXT = replace(_MATH, domains=4, closeness=0.35)

_PRESETS = (
    _MATH,
    _MIXED,
    replace(_MATH, name="glm-4.7-flash-math", num_experts=64, top_k=4, moe_layers=46, clustering=0.25),
    replace(_MATH, name="gpt-oss-20b-reasoning", num_experts=32, top_k=4, moe_layers=24, zipf=(0.9, 1.1)),
    replace(_TEXT, name="qwen3.5-35b-text", num_experts=256, moe_layers=40, zipf=(0.35, 0.75)),
    replace(_TEXT, name="nemotron-3-nano-text", top_k=6, moe_layers=23, zipf=(0.15, 0.55)),
    replace(_TEXT, name="deepseek-moe-16b-text", num_experts=64, top_k=6, moe_layers=27, zipf=(0.1, 0.5)),
    replace(
        _MATH, name="mixtral-8x7b-text", num_experts=8, top_k=2, moe_layers=32, zipf=(0.9, 1.4), domains=1, drift=0.6
    ),
    replace(_MIXED, name="drift", drift=0.6, curriculum=0.5),
    replace(_MIXED, name="spike", spikes=(0, 1, 0, 4, 0, 16, 0, 0)),
    SkewPreset("uniform"),
)
PRESETS = {preset.name: preset for preset in _PRESETS}
"""Skew by name. Presets of models are named after the model and the kind of text whose published skew they match.

`experiments/presets/` compares each with its published figures; `python -m experiments.presets` measures them again.

* qwen3-30b-math: two close subjects. qwen3-30b-mixed: eight subjects of the same model.
* glm-4.7-flash-math: two close subjects, with more neighbouring hot experts. gpt-oss-20b-reasoning: two close subjects,
  steeper.
* qwen3.5-35b-text, nemotron-3-nano-text, deepseek-moe-16b-text: general text. mixtral-8x7b-text: pre-training text,
  which changes more from step to step.
* drift: qwen3-30b-mixed, but hot experts change between steps: half of a step's sequences are of one subject, another
  one in each step, and popularity drifts as in mixtral-8x7b-text. Synthetic: no figures of RL runs are published.
* spike: qwen3-30b-mixed, but of the eighths of a step's sequences the second, fourth and sixth go to 1, 4 and 16
  experts. A stress test, not a model.
* uniform: no skew but chance.
"""


def synthesize_preset(
    preset: SkewPreset,
    *,
    num_sequences: int,
    mean_length: int,
    max_length: int,
    num_layers: int,
    num_experts: int | None = None,
    top_k: int | None = None,
    expert_groups: int = 1,
    groups_per_token: int = 1,
    num_steps: int = 1,
    seed: int = 0,
) -> RoutingTrace:
    """A trace of synthetic sequences, the same for the same arguments.

    Popularity drifts from step to step; sequences are new in every step.

    Args:
        preset: one of `PRESETS`, or one's own.
        num_sequences: sequences of each step.
        mean_length: mean tokens of a sequence, before clipping. Lengths are lognormal, clipped to 16 tokens (or the
            mean, if that is less) and `max_length`. About 15% of a sequence, but at least one token, is prompt.
        num_experts, top_k: by default those of the preset's model. With others its published skew is not guaranteed.
        expert_groups, groups_per_token: a token's experts are in so many of the groups, as in `ModelSpec`: in those of
            its first experts.
        seed: 0 to 2**64 - 1. It fixes which experts are hot, too.

    Raises:
        InputError: if the arguments allow no trace.
    """
    num_experts = preset.num_experts if num_experts is None else num_experts
    top_k = preset.top_k if top_k is None else top_k
    if not 1 <= top_k <= num_experts:
        raise InputError(f"top_k is {top_k}; it should be 1 to the number of experts, {num_experts}")
    fits = 1 <= groups_per_token <= expert_groups and num_experts % expert_groups == 0
    if not fits or top_k > groups_per_token * (num_experts // expert_groups):
        raise InputError(
            f"a token's {top_k} of {num_experts} experts can't be in {groups_per_token} of {expert_groups} groups; "
            "groups should be of equal size, and those of a token have at least its experts"
        )
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
        profile_S[first:end] = _profiles(preset, derive(key_S[first:end], DOMAIN), step)
        sample_experts(
            np.log(np.concatenate([popularity_DLE, popularity_BLE])),
            profile_S[first:end],
            derive(key_S[first:end], ROUTING),
            starts[first : end + 1],
            (preset.deviation, preset.clustering),
            (expert_groups, groups_per_token),
            ids_TLK,
        )
    return RoutingTrace(
        expert_ids=ids_TLK,
        sequence_starts=starts,
        prompt_lengths=np.maximum(1, PROMPT_SHARE * length_S).astype(np.int32),
        steps=np.repeat(np.arange(num_steps, dtype=np.int32), num_sequences),
        sequence_hashes=np.maximum(key_S, np.uint64(1)),
        prompt_hashes=np.maximum(key_S, np.uint64(1)),
        domains=_domain_names(preset, profile_S),
        windows=windows_array([()] * len(key_S)),
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


def _profiles(preset: SkewPreset, key_S: Array, step: int) -> Array:
    """`[S]` int64, each sequence's domain, or the number of domains plus its block's number if the block is a spike."""
    domain_S = (key_S % np.uint64(preset.domains)).astype(np.int64)
    is_own_S = derive(key_S, CURRICULUM) % np.uint64(1000) < round(1000 * preset.curriculum)
    domain_S[is_own_S] = step % preset.domains
    if not preset.spikes:
        return domain_S
    block_S = np.arange(len(key_S)) * len(preset.spikes) // len(key_S)
    return np.where(np.array(preset.spikes)[block_S] > 0, preset.domains + block_S, domain_S)


def synthesize(
    *,
    num_sequences: int,
    sequence_length: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    zipf: float,
    seed: int = 0,
) -> RoutingTrace:
    """A trace whose experts are drawn without replacement from a Zipf popularity, shuffled for every layer.

    Args:
        zipf: exponent of the popularity, rank**-zipf. Real models show 0.30 to 0.95. At 0 routing is not random but
            exactly even: over any `num_experts` tokens in a row each expert is used `top_k` times.
    """
    rng = np.random.default_rng(seed)
    # Sampled first, so the hot experts depend on the seed and not on the trace's length.
    experts_LE = np.stack([rng.permutation(num_experts) for _ in range(num_layers)])
    tokens = num_sequences * sequence_length
    ids_TLK = np.empty((tokens, num_layers, top_k), id_dtype(num_experts))
    for layer in range(num_layers):
        if zipf == 0:
            positions_TK = (np.arange(tokens)[:, None] * top_k + np.arange(top_k)) % num_experts
        else:
            # Gumbel top-k: the largest of log-popularity plus Gumbel noise is a draw without replacement.
            scores_TE = rng.gumbel(size=(tokens, num_experts)) - zipf * np.log(np.arange(1, num_experts + 1))
            positions_TK = np.argpartition(-scores_TE, top_k - 1, axis=1)[:, :top_k]
        ids_TLK[:, layer] = experts_LE[layer][positions_TK]
    return RoutingTrace.from_sequences(
        list(ids_TLK.reshape(num_sequences, sequence_length, num_layers, top_k)),
        num_experts=num_experts,
        model="synthetic",
    )
