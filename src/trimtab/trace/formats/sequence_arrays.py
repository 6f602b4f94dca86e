"""Facts of sequences in array files: where they start, and numbers for each of them."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.array_files import Arrays


def sequence_numbers(arrays: Arrays, name: str, count: int, limit: int = 1 << 31) -> Array:
    """`[count]` integers of 0 to `limit - 1`, one a sequence; zeros if the array is missing.

    Raises:
        InputError: if there are others, or more or fewer.
    """
    if name not in arrays.shapes:
        return np.zeros(count, np.int64)
    values = arrays.integers(name)
    if len(values) != count or values.min(initial=0) < 0 or values.max(initial=0) >= limit:
        raise InputError(f"{name} should be {count} whole numbers of 0 to {limit - 1}, one a sequence")
    return values


def lengths_of_starts(starts: Array, total: int) -> Array:
    """`[S]` tokens of each sequence, from the first token of each and the end `[S + 1]`.

    Raises:
        InputError: if the starts are not ascending from 0 to `total`.
    """
    starts = starts.astype(np.int64)
    if len(starts) < 1 or starts[0] != 0 or starts[-1] != total or (np.diff(starts) < 0).any():
        raise InputError(f"sequence_starts should be ascending from 0 to the number of tokens, {total}")
    return np.diff(starts)
