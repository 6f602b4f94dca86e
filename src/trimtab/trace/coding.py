"""Encoding of expert ids in a file: each token's ids are sorted; the first is stored, then the differences.

The order of ids within top_k has no meaning, and small differences compress better than ids: 8 of 128 experts, evenly
used, contain 40 bits of information in 64 bits.
"""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel

BLOCK = 64


@kernel
def encode(ids_NK, coded_NK):  # type: ignore[no-untyped-def]
    """Write the encoded rows of `ids_NK` (uint8 or uint16) to `coded_NK`, of the same dtype. Differences wrap."""
    rows, top_k = ids_NK.shape
    # A block at a time, one position of top_k after the other, so a comparison is one instruction for many rows.
    lanes_KB = np.empty((top_k, BLOCK), ids_NK.dtype)
    for start in range(0, rows, BLOCK):
        size = min(BLOCK, rows - start)
        for b in range(size):
            for k in range(top_k):
                lanes_KB[k, b] = ids_NK[start + b, k]
        for turn in range(top_k):
            for k in range(turn % 2, top_k - 1, 2):
                low_B, high_B = lanes_KB[k], lanes_KB[k + 1]
                for b in range(BLOCK):
                    one, other = low_B[b], high_B[b]
                    low_B[b] = min(one, other)
                    high_B[b] = max(one, other)
        for k in range(top_k - 1, 0, -1):
            low_B, high_B = lanes_KB[k - 1], lanes_KB[k]
            for b in range(BLOCK):
                high_B[b] -= low_B[b]
        for b in range(size):
            for k in range(top_k):
                coded_NK[start + b, k] = lanes_KB[k, b]


@kernel
def decode(coded_NK, num_experts, no_route, ids_NK):  # type: ignore[no-untyped-def]
    """Write the rows that `encode` encoded to `ids_NK`, with ascending ids within a row.

    Returns:
        The first row whose ids are neither distinct and below `num_experts` nor all `no_route`; -1 if there is none.
    """
    bad = -1
    for n in range(coded_NK.shape[0]):
        expert = np.int64(coded_NK[n, 0])
        ids_NK[n, 0] = expert
        unknown = expert == no_route
        fine = unknown or expert < num_experts
        for k in range(1, coded_NK.shape[1]):
            difference = np.int64(coded_NK[n, k])
            expert += difference
            ids_NK[n, k] = expert
            fine &= difference == 0 if unknown else (difference > 0 and expert < num_experts)
        if not fine and bad < 0:
            bad = n
    return bad
