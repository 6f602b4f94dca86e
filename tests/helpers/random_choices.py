"""Live choices that are drawn at random, in place of the balancer's."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.replicas.kernel_values import Limits
from trimtab.runtime.live.balancer import choose_quotas
from trimtab.runtime.program.physical_experts import InstanceReplicas


def quotas_of_few(counts_RE: Array, home_E: Array, limits: Limits) -> InstanceReplicas:
    return choose_quotas(counts_RE, home_E, limits._replace(smallest_share=1))


def random_quotas(counts_RE: Array, home_E: Array, limits: Limits) -> InstanceReplicas:
    """Replicas anywhere but at home, with random parts of all ranks' rows, perhaps none."""
    rng = np.random.default_rng(counts_RE.reshape(-1) % 1000)
    ranks, left_RE, taken, quotas = len(counts_RE), counts_RE.copy(), [], []
    for rank in rng.permutation(ranks).tolist():
        others = np.flatnonzero(home_E != rank)
        for expert in rng.permutation(others)[: int(rng.integers(0, limits.slots + 1))].tolist():
            quota_R = rng.integers(0, left_RE[:, expert] + 1)
            left_RE[:, expert] -= quota_R
            taken.append((expert, rank))
            quotas.append(quota_R)
    experts, at = np.array(taken, np.int64).reshape(-1, 2).T
    return InstanceReplicas.chosen(experts, at, np.array(quotas, np.int64).reshape(-1, ranks))


def random_moves(counts_RE: Array, home_E: Array, rows_E: Array, dynamic_E: Array, limits: Limits) -> InstanceReplicas:
    """Whole experts to any other ranks, each to one."""
    rng = np.random.default_rng(counts_RE.reshape(-1) % 1000)
    ranks = len(counts_RE)
    free = dict.fromkeys(range(ranks), limits.slots)
    moves = []
    for expert in rng.permutation(len(home_E))[: int(rng.integers(0, len(home_E) + 1))].tolist():
        rank = int(rng.integers(0, ranks))
        if rank != home_E[expert] and free[rank]:
            free[rank] -= 1
            moves.append((rank, int(home_E[expert]), int(rows_E[expert]), expert))
    experts = np.array([move[3] for move in sorted(moves)], np.int64)
    at = np.array([move[0] for move in sorted(moves)], np.int64)
    return InstanceReplicas.chosen(experts, at, counts_RE.T[experts].astype(np.int64))
