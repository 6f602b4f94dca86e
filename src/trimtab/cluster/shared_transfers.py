"""How many transfers to places a dispatcher needs that sends a token to a place once, whatever number of its experts is
there, from counts of rows.

`rank_work` computes the same in a kernel; `token_replay` counts instead, where the route of every token is known.
"""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array

# Least and most part of the tokens that use a group, so that odds are finite.
LEAST_USED, MOST_USED = 1e-9, 0.98


def transfers_to(rows_XE: Array, places: int, top_k: int, groups: int = 1, chosen: int = 1) -> Array:
    """Transfers `[..., P]` float64 of tokens to P places, each with the experts of E / P neighbouring ids.

    If the router doesn't limit a token's experts to groups, those of a token are taken as independent, see `rank_work`.

    Args:
        rows_XE: `[..., E]` rows of every expert, with all experts of their tokens.
        places: P, which divides E.
        top_k: rows of a token; 1 if none share a transfer.
        groups, chosen: of experts, and how many of them a token's experts are in.
    """
    rows_XPC = rows_XE.reshape(*rows_XE.shape[:-1], places, -1)
    if top_k == 1:
        return np.asarray(rows_XPC.sum(axis=-1, dtype=np.float64))
    tokens_X1 = np.maximum(rows_XE.sum(axis=-1, keepdims=True) / top_k, 1.0)
    if groups > 1:
        place_E = np.arange(rows_XE.shape[-1]) * places // rows_XE.shape[-1]
        rows_XPE = rows_XE[..., None, :] * (np.arange(places)[:, None] == place_E)
        rows_XPG = rows_XPE.reshape(*rows_XPE.shape[:-1], groups, -1).sum(axis=-1, dtype=np.float64)
        return np.asarray(tokens_X1 * _used(rows_XPG, top_k, chosen))
    without = np.prod(1 - np.minimum(1, rows_XPC / tokens_X1[..., None]), axis=-1)
    power = np.maximum(0, 1 - rows_XPC.sum(axis=-1) / (tokens_X1 * top_k)) ** top_k
    return np.asarray(tokens_X1 * (1 - np.minimum(without, power)))


def even_share(places: int, top_k: int, num_experts: int, groups: int = 1, chosen: int = 1) -> float:
    """Transfers of a row with even routing and neighbouring ids at a place, on average."""
    if top_k == 1:
        return 1.0
    if groups > 1 and num_experts % places == 0:
        # Any number of tokens.
        rows_E = np.full(num_experts, 1e6 * top_k / num_experts)
        return float(transfers_to(rows_E, places, top_k, groups, chosen).sum() / (1e6 * top_k))
    without = (1 - top_k / num_experts) ** (num_experts / places)
    return places * (1 - min(without, (1 - 1 / places) ** top_k)) / top_k


def _used(rows_XPG: Array, top_k: int, chosen: int) -> Array:
    """Part of the tokens `[..., P]` that have an expert at a place, for rows by place and group.

    A token chooses groups, the more popular ones more often. It has one row in each of them, and its others are spread
    over them independently. The chance that no row is at the place is a ratio of elementary symmetric polynomials of
    the groups' odds; exact for groups of equal popularity that are at one place each.
    """
    rows_X1G = rows_XPG.sum(axis=-2, keepdims=True)
    share_X1G = rows_X1G / np.maximum(rows_X1G.sum(axis=-1, keepdims=True), 1.0)
    chosen_X1G = np.clip(chosen * share_X1G, LEAST_USED, MOST_USED)
    odds_X1G = chosen_X1G / (1 - chosen_X1G)
    at_place_XPG = rows_XPG / np.maximum(rows_X1G, 1.0)
    others = max(1, top_k - chosen)
    others_X1G = np.maximum(0, top_k * share_X1G / chosen_X1G - 1) / others
    missed_XPG = odds_X1G * (1 - at_place_XPG) * np.maximum(0, 1 - at_place_XPG * others_X1G) ** others
    return np.asarray(1 - _symmetric(missed_XPG, chosen) / _symmetric(odds_X1G, chosen))


def _symmetric(values: Array, degree: int) -> Array:
    """The sum, along the last axis, of the products of `degree` of the values."""
    sums = [np.ones(values.shape[:-1])] + [np.zeros(values.shape[:-1]) for _ in range(degree)]
    for value in np.moveaxis(values, -1, 0):
        for size in range(degree, 0, -1):
            sums[size] = sums[size] + value * sums[size - 1]
    return sums[degree]
