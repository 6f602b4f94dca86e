"""Colour scales of a page: the values of their ends, and whether values lie beyond them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.report.model import LoadMap

# A scale excludes the highest 1/200 of the values, and is at least this wide.
SHOWN_PART = 0.995
LEAST_SPREAD = 0.1


@dataclass(frozen=True)
class ColourScale:
    """A range of colours. Values beyond it have the colour of its end.

    Attributes:
        low, high: values of the first and the last colour.
        least, most: smallest and largest value.
    """

    low: float
    high: float
    least: float
    most: float

    @property
    def clips_below(self) -> bool:
        return self.least < self.low

    @property
    def clips_above(self) -> bool:
        return self.most > self.high


def load_scale(maps: Sequence[LoadMap]) -> ColourScale:
    """Scale of loads over the mean load of their instance, symmetric around 1 except that no load is below 0."""
    ratios = np.concatenate([np.ones(1), *(_over_mean(part.loads_MLR).reshape(-1) for part in maps)])
    reach = float(np.quantile(np.abs(ratios[1:] - 1), SHOWN_PART)) if len(ratios) > 1 else 0.0
    spread = _up(max(LEAST_SPREAD, reach))
    return ColourScale(max(0.0, 1 - spread), 1 + spread, float(ratios.min()), float(ratios.max()))


def vio_scale(vio: Array) -> ColourScale:
    """Scale of max_vio from 0 up; NaN without load."""
    known = vio[~np.isnan(vio)]
    if not len(known):
        return ColourScale(0.0, LEAST_SPREAD, 0.0, 0.0)
    return ColourScale(0.0, _up(max(LEAST_SPREAD, float(np.quantile(known, SHOWN_PART)))), 0.0, float(known.max()))


def hot_scale(over_mean: Array) -> ColourScale:
    """Scale of an expert's tokens over those of the mean expert, which shows only what is above the mean."""
    known = over_mean[~np.isnan(over_mean)]
    return ColourScale(1.0, 4.0, float(known.min(initial=1.0)), float(known.max(initial=1.0)))


def overlap_scale(overlap_DD: Array) -> ColourScale:
    """Scale of the overlap of two domains; the overlap of a domain with itself, which is 1, is beyond its end."""
    others = overlap_DD[~np.eye(len(overlap_DD), dtype=bool)]
    low = min(0.95, float(np.floor(others.min() * 20) / 20))
    return ColourScale(low, max(_up(float(others.max())), low + 0.05), float(others.min()), 1.0)


def _over_mean(loads_MLR: Array) -> Array:
    """Loads over the mean of their instance; 1 where there is no load."""
    means = loads_MLR.mean(axis=2, keepdims=True)
    return np.divide(loads_MLR, means, out=np.ones(loads_MLR.shape), where=means > 0)


def _up(value: float) -> float:
    """Rounded up to a multiple of 0.05."""
    return float(np.ceil(value * 20) / 20)
