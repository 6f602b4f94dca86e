"""The type of numpy arrays in annotations; shapes and dtypes stand in names and docstrings."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
