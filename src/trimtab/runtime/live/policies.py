"""Names of the policies of live micro-steps."""

from __future__ import annotations

from typing import Literal

LivePolicy = Literal["auto", "quota", "feplb", "predict", "off"]
Predictor = Literal["last", "average", "same"]
