"""Quotas of the replicas that rivals choose: the tokens of each source rank that a replica computes."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.replicas.kernel_values import Shares
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.rivals.ordered_split import split_tokens


def split_shares(counts_RE: Array, load: InstanceLoad, replicas_3P: Array) -> tuple[Array, Array]:
    """Replicas `[P, 2]` (expert, rank) and quotas `[P, R]` int64: own rank first, own node next, any node last.

    Args:
        counts_RE: `[R, E]` int64 tokens by source rank and expert.
        replicas_3P: `[3, P]` int64, expert, rank and tokens of every replica.
    """
    quotas_PR = np.zeros((replicas_3P.shape[1], len(counts_RE)), np.int64)
    # In the dtypes of the planner, so that the kernel is compiled once.
    counts_RE, home_E = np.ascontiguousarray(counts_RE, np.int32), load.home_E.astype(np.int16)
    split_tokens(counts_RE, home_E, load.ranks_per_node, Shares(*np.ascontiguousarray(replicas_3P)), quotas_PR)
    return replicas_3P[:2].T.copy(), quotas_PR


def split_ranges(counts_RE: Array, shares_S4: Array) -> tuple[Array, Array]:
    """Replicas `[P, 2]` (expert, rank) and quotas `[P, R]` int64 of ranges of an expert's tokens, by source rank.

    Args:
        counts_RE: `[R, E]` int64 tokens by source rank and expert.
        shares_S4: `[S, 4]` int64 expert, rank, first token and token after the last. Shares of an expert on one rank
            are one replica.
    """
    expert_S, rank_S, first_S, end_S = shares_S4.T
    counts_SR = counts_RE.T[expert_S]
    end_SR = np.cumsum(counts_SR, axis=1)
    tokens_SR = np.minimum(end_SR, end_S[:, None]) - np.maximum(end_SR - counts_SR, first_S[:, None])
    _, share_P, replica_S = np.unique(expert_S * len(counts_RE) + rank_S, return_index=True, return_inverse=True)
    quotas_PR = np.zeros((len(share_P), len(counts_RE)), np.int64)
    np.add.at(quotas_PR, replica_S, np.maximum(tokens_SR, 0))
    in_order = np.argsort(share_P)
    return shares_S4[share_P[in_order], :2], quotas_PR[in_order]
