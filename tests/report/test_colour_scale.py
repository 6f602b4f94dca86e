"""Colour scales cover nearly all values, and their legends mark ends beyond which there are values."""

from __future__ import annotations

import re

import numpy as np

from trimtab.report.model import LoadMap
from trimtab.report.page_data import ColourScale, hot_scale, load_scale, overlap_scale, vio_scale
from trimtab.report.widgets import colour_legend, times


def texts_of(legend: str) -> list[str]:
    return re.findall(r"<span[^>]*>([^<]*)</span>", legend)


def test_ends_beyond_which_there_are_values_are_marked() -> None:
    inside = colour_legend(ColourScale(0.5, 1.5, 0.5, 1.5), times, "load", middle=1.0)
    assert texts_of(inside) == ["0.5×", "1×", "1.5×", "load"]
    assert "clips" not in inside
    above = colour_legend(ColourScale(0.0, 2.4, 0.1, 3.36), times, "load", middle=1.0)
    assert texts_of(above) == ["0×", "1×", "≥ 2.4×", "load; at most 3.36×"]
    assert 'class="scale clips-above"' in above
    wide = colour_legend(ColourScale(0.0, 11.0, 0.0, 9.0), times, "load", middle=1.0)
    assert texts_of(wide) == ["0×", "11×", "load"]
    below = colour_legend(ColourScale(1.0, 4.0, 0.25, 3.0), times, "a < b")
    assert texts_of(below) == ["≤ 1×", "4×", "a &lt; b"]
    assert 'class="scale from-mean clips-below"' in below


def test_the_load_scale_is_symmetric_and_leaves_out_few_loads() -> None:
    loads = np.full((10, 4, 10), 1000)
    loads[:, :, 0] = 1500
    loads[0, 0] = 500
    loads[0, 0, 0] = 5500
    scale = load_scale((LoadMap("static", loads),))
    assert scale.high - 1 == 1 - scale.low
    assert (scale.most, scale.least) == (5500 / 1000, 500 / 1000)
    assert scale.clips_above
    ratios = loads / loads.mean(axis=2, keepdims=True)
    assert np.mean((ratios > scale.high) | (ratios < scale.low)) <= 0.005
    even = load_scale((LoadMap("even", np.full((2, 2, 4), 7)), LoadMap("none", np.zeros((1, 2, 4), np.int64))))
    assert (even.low, even.high, even.clips_below, even.clips_above) == (0.9, 1.1, False, False)
    # Loads are compared with the mean of their instance: layers with more tokens are as even as those with few.
    scale = load_scale((LoadMap("static", np.array([[[30, 10], [300, 100]]])),))
    assert (scale.low, scale.high, scale.least, scale.most) == (0.5, 1.5, 0.5, 1.5)


def test_scales_of_analysis_grids() -> None:
    vio = np.append(np.linspace(0, 0.5, 999), 3.0)
    assert (vio_scale(vio).low, vio_scale(vio).high, vio_scale(vio).most) == (0.0, 0.5, 3.0)
    assert not vio_scale(np.full(3, np.nan)).clips_above
    assert not hot_scale(np.array([1.0, 4.0, np.nan])).clips_above
    assert hot_scale(np.array([0.2, 4.5])).clips_above
    assert hot_scale(np.array([0.2, 4.5])).clips_below
    overlap = overlap_scale(np.array([[1.0, 0.72], [0.72, 1.0]]))
    assert (overlap.low, overlap.high, overlap.most) == (0.7, 0.75, 1.0)
