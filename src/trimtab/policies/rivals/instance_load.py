"""Load of one instance, as kernels of rivals read it, and quotas of the replicas that they choose."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.planner.replicas.kernel_values import Shares
from trimtab.policies.rivals.ordered_split import split_tokens


class InstanceLoad(NamedTuple):
    """Tokens of one instance, and the ranks that can help.

    Attributes:
        counts_E: `[E]` int64, tokens of every expert.
        home_E: `[E]` int64, home ranks.
        loads_R: `[R]` int64, tokens of every rank with all experts at home.
        ranks_per_node: neighbouring ranks that share a node.
        ranks_per_domain: neighbouring ranks among which replicas are placed.
        slots: replicas that a rank can hold.
    """

    counts_E: Array
    home_E: Array
    loads_R: Array
    ranks_per_node: int
    ranks_per_domain: int
    slots: int

    @classmethod
    def of(cls, counts_E: Array, home_E: Array, cluster: ClusterSpec, *, within_node: bool) -> InstanceLoad:
        """Returns the load with all experts at home.

        Args:
            counts_E, home_E: `[E]` int64.
            cluster: ranks, nodes and slots.
            within_node: replicas stay in the node of their home; else they may be on any rank.
        """
        loads_R = np.bincount(home_E, counts_E, cluster.ranks).astype(np.int64)
        domain = cluster.ranks_per_node if within_node else cluster.ranks
        return cls(counts_E, home_E, loads_R, cluster.ranks_per_node, domain, cluster.slots_per_rank)


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
