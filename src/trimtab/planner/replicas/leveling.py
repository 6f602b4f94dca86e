"""Leveling: shares are shifted towards equal loads of each replica's two ranks, which costs nothing."""

from __future__ import annotations

from trimtab.kernels import kernel

LEVEL_SWEEPS = 4


@kernel
def level_shares(instance, loads_R, smallest_share, shares, count):  # type: ignore[no-untyped-def]
    """Shift tokens between each replica and its home to reduce the difference of their ranks' loads.

    Args:
        instance: an `InstanceRows`.
        loads_R: `[R]` int64 rows of every rank without replicas; overwritten with those after leveling.
        smallest_share: fewest tokens of a copy, and fewest tokens that stay at home if any do.
        shares: `Shares`, whose first `count` replicas are changed.
    """
    home_E = instance.homes.home_E
    experts_P, ranks_P, tokens_P = shares
    at_home_E = instance.counts_E.copy()
    for p in range(count):
        expert, tokens = experts_P[p], tokens_P[p]
        at_home_E[expert] -= tokens
        loads_R[home_E[expert]] -= tokens
        loads_R[ranks_P[p]] += tokens
    for _ in range(LEVEL_SWEEPS):
        for p in range(count):
            expert, rank = experts_P[p], ranks_P[p]
            if at_home_E[expert] == 0:
                continue
            home = home_E[expert]
            # Positive: from the home to the replica.
            tokens = (loads_R[home] - loads_R[rank]) // 2
            tokens = min(tokens, at_home_E[expert] - smallest_share)
            tokens = max(tokens, smallest_share - tokens_P[p])
            tokens_P[p] += tokens
            at_home_E[expert] -= tokens
            loads_R[home] -= tokens
            loads_R[rank] += tokens
