"""Level three, replicas: which experts get a copy on which rank, and how many tokens each copy takes.

Tokens are those of known routes. Rows of unknown routes stay at their estimated homes. They are part of a rank's load,
and only known tokens are moved.

The search calls `greedy_attempt`. Fitting needs few replicas, filling reaches lower loads and is tried where fitting
fails; then the target load is raised, and lowered by halves. Finally shares are levelled. (Our own; LLEP and UltraEP
move excess tokens in a similar way.)
"""

from __future__ import annotations

from trimtab.kernels import kernel
from trimtab.planner.replicas.greedy_attempt import greedy_attempt
from trimtab.planner.replicas.kernel_values import empty_shares

SEARCH_STEPS = 6
LEVEL_SWEEPS = 4


@kernel
def place_replicas(instance, limits, threshold_load):  # type: ignore[no-untyped-def]
    """Reduce the busiest rank's load in one instance to the threshold with few replicas, near ones first.

    Args:
        instance: an `InstanceRows`.
        limits: `Limits`; their `threshold_parts` are not used.
        threshold_load: load up to which a rank is not changed, rows.

    Returns:
        `Shares` of at least `R * slots` replicas, and the number of replicas that are found.
    """
    counts_E, fixed_R, home_E = instance.counts_E, instance.fixed_R, instance.homes.home_E
    num_ranks = len(fixed_R)
    loads_R = fixed_R.copy()
    for e in range(len(counts_E)):
        loads_R[home_E[e]] += counts_E[e]
    # The largest of `fixed_R` is a lower bound of the busiest rank's load.
    threshold_load = max(threshold_load, fixed_R.max())
    found, tried = empty_shares(num_ranks * limits.slots), empty_shares(num_ranks * limits.slots)
    # Both ends of the search are loads: nothing below `low` is tried, `best` has been reached.
    count, best, low, target = 0, loads_R.max(), threshold_load, threshold_load
    if best <= threshold_load or limits.slots == 0:
        return found, count
    for _ in range(SEARCH_STEPS):
        for fill in (False, True):
            num_tried, reached = greedy_attempt(instance, loads_R, limits, target, fill, tried)
            if reached < best:
                best, count = max(reached, target), num_tried
                found, tried = tried, found
            if best <= target:
                break
        if best > target:
            low = target
        if best - low <= limits.smallest_share // 8 or best <= threshold_load:
            break
        target = (low + best) // 2
    level_shares(instance, loads_R, limits.smallest_share, found, count)
    return found, count


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
