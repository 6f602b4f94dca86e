"""Sampling of experts from popularities: kernels of the presets, with their own random numbers.

Every random number is a hash (splitmix64) of a key and a number, so it does not depend on numpy's generators, the order
of sampling, or the number of threads.
"""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel

NEIGHBOURHOODS = 8


@kernel
def derive(key, part):  # type: ignore[no-untyped-def]
    """Derives the key of part 0, 1, 2, ... of a key. Different parts of a key have different keys.

    Both are uint64, and so is the result; either or both may be arrays, which then broadcast.
    """
    x = key + (part + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel
def fraction(key):  # type: ignore[no-untyped-def]
    """The number in [0, 1) of a key, or of each key of an array; 53 bits of it."""
    return (key >> np.uint64(11)) * 2.0**-53


@kernel
def normal(key):  # type: ignore[no-untyped-def]
    """The standard normal number of a key, or of each key of an array (Box-Muller)."""
    radius = np.sqrt(-2.0 * np.log(1.0 - fraction(derive(key, np.uint64(0)))))
    return radius * np.cos(2.0 * np.pi * fraction(derive(key, np.uint64(1))))


@kernel
def expert_noise(key_N, num_experts, clustering):  # type: ignore[no-untyped-def]
    """Standard normal numbers `[N, E]` float64 for the experts of each key.

    Experts are neighbours if they are in the same eighth of the ids; neighbours have correlation `clustering`.
    """
    noise_NE = np.empty((len(key_N), num_experts))
    for n in range(len(key_N)):
        _fill_noise(key_N[n], clustering, noise_NE[n])
    return noise_NE


@kernel
def _fill_noise(key, clustering, noise_E):  # type: ignore[no-untyped-def]
    num_experts = len(noise_E)
    shared, own = np.sqrt(clustering), np.sqrt(1.0 - clustering)
    neighbourhood, of_neighbourhood = -1, 0.0
    for e in range(num_experts):
        if e * NEIGHBOURHOODS // num_experts != neighbourhood:
            neighbourhood = e * NEIGHBOURHOODS // num_experts
            of_neighbourhood = normal(derive(key, np.uint64(num_experts + neighbourhood)))
        noise_E[e] = own * normal(derive(key, np.uint64(e))) + shared * of_neighbourhood


@kernel
def sample_experts(log_popularity_PLE, profile_S, key_S, starts, deviations, limits, ids_TLK):  # type: ignore[no-untyped-def]
    """Write the experts of every token: top_k samples without replacement, from its sequence's popularity.

    A sample is one lookup in an alias table, built once for each sequence and layer. It is repeated if the token
    already has the expert, or has as many groups as it may and the expert is in none of them.

    Args:
        log_popularity_PLE: `[P, L, E]` float64, natural logarithms of P profiles of popularity, up to a constant.
        profile_S: `[S]` int64, the profile that each sequence deviates from.
        key_S: `[S]` uint64, each sequence's key.
        starts: `[S + 1]` int64; sequence s owns rows `starts[s]:starts[s + 1]`.
        deviations: standard deviation of a sequence's own change to the logarithms, and the correlation of
            neighbours' changes, as in `expert_noise`.
        limits: groups of experts, of equal size and in order of ids, and how many of them a token's experts are in;
            1 and 1 without groups.
        ids_TLK: `[T, L, K]` uint8 or uint16, written to. K is at most E.
    """
    num_experts = log_popularity_PLE.shape[2]
    deviation, clustering = deviations
    noise_E = np.zeros(num_experts)
    limit_E = np.empty(num_experts, np.uint64)
    alias_E = np.empty(num_experts, np.int64)
    for s in range(len(profile_S)):
        for layer in range(ids_TLK.shape[1]):
            key = derive(key_S[s], np.uint64(layer))
            if deviation > 0.0:
                _fill_noise(derive(key, np.uint64(0)), clustering, noise_E)
            weight_E = np.exp(log_popularity_PLE[profile_S[s], layer] + deviation * noise_E)
            _fill_alias_table(weight_E, limit_E, alias_E)
            ids_TK = ids_TLK[starts[s] : starts[s + 1], layer]
            _sample_sequence(derive(key, np.uint64(1)), weight_E, limit_E, alias_E, limits, ids_TK)


@kernel
def _sample_sequence(key, weight_E, limit_E, alias_E, limits, ids_TK):  # type: ignore[no-untyped-def]
    num_experts = len(weight_E)
    groups, groups_per_token = limits
    group_size = num_experts // groups
    # The last token that took an expert, and the last that has experts of a group.
    taken_by_E, used_by_G = np.full(num_experts, -1), np.full(groups, -1)
    picks = np.uint64(0)
    for t in range(ids_TK.shape[0]):
        used = 0
        for k in range(ids_TK.shape[1]):
            # If a few experts have nearly all the weight, misses cost more than a scan of the others.
            for _ in range(num_experts):
                pick = derive(key, picks)
                picks += np.uint64(1)
                expert = np.int64(((pick >> np.uint64(32)) * np.uint64(num_experts)) >> np.uint64(32))
                if (pick & np.uint64(0xFFFFFFFF)) >= limit_E[expert]:
                    expert = alias_E[expert]
                open_to_t = used < groups_per_token or used_by_G[expert // group_size] == t
                if taken_by_E[expert] != t and open_to_t:
                    break
            else:
                if used == groups_per_token:
                    for e in range(num_experts):
                        if used_by_G[e // group_size] != t:
                            taken_by_E[e] = t
                expert = _scan(derive(key, picks), weight_E, taken_by_E, t)
                picks += np.uint64(1)
            taken_by_E[expert] = t
            if used_by_G[expert // group_size] != t:
                used_by_G[expert // group_size] = t
                used += 1
            ids_TK[t, k] = expert


@kernel
def _scan(pick, weight_E, taken_by_E, t):  # type: ignore[no-untyped-def]
    """The same sample without misses: a scan over the weights of the experts that token t does not have."""
    left = 0.0
    for e in range(len(weight_E)):
        if taken_by_E[e] != t:
            left += weight_E[e]
    left *= fraction(pick)
    expert = -1
    for e in range(len(weight_E)):
        if taken_by_E[e] != t:
            expert = e
            left -= weight_E[e]
            if left < 0.0:
                break
    return expert


@kernel
def _fill_alias_table(weight_E, limit_E, alias_E):  # type: ignore[no-untyped-def]
    """Vose's alias method: place e gives expert e below limit_E[e] (of 2**32), else expert alias_E[e]."""
    num_experts = len(weight_E)
    height_E = weight_E * (num_experts / weight_E.sum())
    order_E = np.empty(num_experts, np.int64)  # Entries below the mean from the front, others from the back.
    short, tall = 0, num_experts
    for e in range(num_experts):
        alias_E[e] = e
        limit_E[e] = np.uint64(1 << 32)
        if height_E[e] < 1.0:
            order_E[short] = e
            short += 1
        else:
            tall -= 1
            order_E[tall] = e
    while short > 0 and tall < num_experts:
        short -= 1
        low, high = order_E[short], order_E[tall]
        limit_E[low] = np.uint64(height_E[low] * 4294967296.0)
        alias_E[low] = high
        height_E[high] -= 1.0 - height_E[low]
        if height_E[high] < 1.0:
            tall += 1
            order_E[short] = high
            short += 1
