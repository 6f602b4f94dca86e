"""Split the tokens of every copy over source ranks."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.replicas.kernel_values import Shares
from trimtab.planner.replicas.split import split_tokens


def split_shares(counts_RE: Array, home_E: Array, ranks_per_node: int, replicas_3P: Array) -> tuple[Array, Array]:
    """Replicas `[P, 2]` (expert, rank) and quotas `[P, R]` int64: own rank first, own node next, any node last.

    Args:
        counts_RE: `[R, E]` int64 tokens by source rank and expert.
        replicas_3P: `[3, P]` int64, expert, rank and tokens of every replica.
    """
    quotas_PR = np.zeros((replicas_3P.shape[1], len(counts_RE)), np.int64)
    counts_RE = np.ascontiguousarray(counts_RE, np.int32)
    split_tokens(counts_RE, home_E, ranks_per_node, Shares(*np.ascontiguousarray(replicas_3P)), quotas_PR)
    return replicas_3P[:2].T.copy(), quotas_PR
