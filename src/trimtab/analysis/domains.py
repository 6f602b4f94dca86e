"""Skew by domain (kind of prompt), and overlap of the experts that domains use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.analysis.balance import home_loads, max_over_mean_or_nan, overlap
from trimtab.array_type import Array


@dataclass(frozen=True)
class DomainSkew:
    """Skew of the sequences of one domain.

    Attributes:
        name: label in the trace, "" without one.
        token_part: of all tokens with a known route.
        busier_half_share: part of the tokens that the busier half of the experts gets, mean over layers; 0.5 is even.
        hottest_over_mean: the busiest expert over the mean one, mean over layers.
        max_over_mean: of rank loads if there were only this domain, mean over layers.
    """

    name: str
    token_part: float
    busier_half_share: float
    hottest_over_mean: float
    max_over_mean: float


def domain_skew(counts_DLE: Array, names: Sequence[str], ranks: int) -> list[DomainSkew]:
    """Skew of every domain. Domains without a known route are left out."""
    total = counts_DLE.sum()
    found = []
    for name, counts_LE in zip(names, counts_DLE, strict=True):
        tokens_L = counts_LE.sum(axis=1)
        if not tokens_L.any():
            continue
        busier_L = np.sort(counts_LE, axis=1)[:, (counts_LE.shape[1] + 1) // 2 :].sum(axis=1)
        known = tokens_L > 0
        found.append(
            DomainSkew(
                name,
                float(counts_LE.sum() / total),
                float((busier_L[known] / tokens_L[known]).mean()),
                float(np.nanmean(max_over_mean_or_nan(counts_LE))),
                float(np.nanmean(max_over_mean_or_nan(home_loads(counts_LE, ranks)))),
            )
        )
    return found


def domain_overlap(counts_DLE: Array) -> Array:
    """`[D, D]`: overlap of the expert loads of two domains (see `overlap`), mean over layers. 0 without load."""
    shared = np.zeros((len(counts_DLE), len(counts_DLE)))
    for index, counts_LE in enumerate(counts_DLE):
        found_DL = overlap(counts_LE, counts_DLE)
        known = ~np.isnan(found_DL)
        shared[index] = np.where(known, found_DL, 0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
    return shared
