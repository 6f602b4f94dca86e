"""Level three, replicas: which experts get a copy on which rank, and how many tokens each copy takes.

Tokens are those of known routes. Rows of unknown routes stay at their estimated homes. They are part of a rank's load,
and only known tokens are moved.

The search calls `greedy_attempt` with different strategies. Fitting needs the fewest replicas, filling reaches the
lowest load. Filling is tried where fitting fails, then both again a few times with ranks and experts in slightly
different orders, and finally a higher target load. Other orders are also tried for fewer replicas, unless their number
equals a lower bound. Finally shares are levelled. (Our own; LLEP and UltraEP move excess tokens in a similar way.)
"""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel
from trimtab.planner.replicas.greedy_attempt import Attempt, greedy_attempt
from trimtab.planner.replicas.kernel_values import PlacementStrategy, Shares

SEARCH_STEPS = 6
# Most other orders tried; fewer for large instances, whose attempts take longer.
MOST_RESTARTS = 16
RESTART_WORK = 1000
# In the order in which they are tried; the first is the cheapest where it succeeds.
STRATEGIES = (
    PlacementStrategy(fill=False, near=True),
    PlacementStrategy(fill=False, near=False),
    PlacementStrategy(fill=True, near=True),
    PlacementStrategy(fill=True, near=False),
)
# How much ranks and experts are jittered in other orders: up to this part of the target load.
JITTER = 8
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
    counts_E, fixed_R, (home_E, _, starts_R) = instance
    num_ranks = len(fixed_R)
    loads_R = fixed_R.copy()
    for e in range(len(counts_E)):
        loads_R[home_E[e]] += counts_E[e]
    most = np.int64(0)
    longest = num_ranks
    for r in range(num_ranks):
        most = max(most, loads_R[r])
        longest = max(longest, starts_R[r + 1] - starts_R[r])
        # The largest of `fixed_R` is a lower bound of the busiest rank's load.
        threshold_load = max(threshold_load, fixed_R[r])
    found = _empty_shares(num_ranks * limits.slots)
    if most <= threshold_load or limits.slots == 0:
        return found, 0
    tried = _empty_shares(num_ranks * limits.slots)
    jitter = np.zeros(longest, np.int64)
    fewest = fewest_replicas_bound(instance, loads_R, threshold_load)
    num_plain = len(STRATEGIES)
    restarts = min(MOST_RESTARTS, RESTART_WORK // (num_ranks * num_ranks))
    count = 0
    cheapest = np.int64(1) << 62
    # Both ends of the search are loads: nothing below `low` is tried, `best` has been reached.
    best = most
    low = threshold_load
    target = threshold_load
    for step in range(SEARCH_STEPS):
        for number in range(num_plain + restarts):
            strategy = STRATEGIES[number % num_plain]
            if not strategy.near and limits.reach == limits.ranks_per_node:
                continue
            if best <= target and 0 < number < num_plain:
                continue
            _shuffle(jitter, number - num_plain, target // JITTER + 1)
            num_tried, reached = greedy_attempt(instance, loads_R, limits, Attempt(target, strategy, jitter), tried)
            cost = _cost(home_E, limits.ranks_per_node, tried, num_tried)
            if reached <= target:
                better = best > target or cost < cheapest
            else:
                better = reached < best
            if better:
                best = max(reached, target)
                cheapest = cost
                count = num_tried
                found, tried = tried, found
            if best <= target and (count <= fewest or step > 0):
                break
        if best > target:
            low = target
        if best - low <= limits.smallest_share // 8 or best <= threshold_load:
            break
        target = (low + best) // 2
    level_shares(instance, loads_R, limits.smallest_share, found, count)
    return found, count


@kernel
def _empty_shares(most):  # type: ignore[no-untyped-def]
    return Shares(np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64))


@kernel
def _shuffle(jitter, number, limit):  # type: ignore[no-untyped-def]
    """Tokens from 0 to `limit` - 1, added to the sizes of ranks and experts in restart `number`; none below 0."""
    jitter[:] = 0
    if number < 0:
        return
    random = np.uint64(number + 1) * np.uint64(0x9E3779B97F4A7C15)
    for i in range(len(jitter)):
        random ^= random << np.uint64(13)
        random ^= random >> np.uint64(7)
        random ^= random << np.uint64(17)
        jitter[i] = np.int64(random >> np.uint64(33)) % limit


@kernel
def _cost(home_E, ranks_per_node, shares, count):  # type: ignore[no-untyped-def]
    """Cost of transfers: 2 for a replica on its home's node, 3 on another."""
    experts_P, ranks_P, _ = shares
    cost = 2 * count
    for p in range(count):
        cost += home_E[experts_P[p]] // ranks_per_node != ranks_P[p] // ranks_per_node
    return cost


@kernel
def fewest_replicas_bound(instance, loads_R, threshold_load):  # type: ignore[no-untyped-def]
    """For every rank, the number of its largest experts that together have its excess.

    Args:
        instance: an `InstanceRows`.
        loads_R: `[R]` int64 rows of every rank without replicas.
        threshold_load: load that no rank should exceed, rows.
    """
    counts_E, starts_R, experts_by_home = instance.counts_E, instance.homes.starts_R, instance.homes.experts_by_home
    needed = 0
    for r in range(len(loads_R)):
        excess = loads_R[r] - threshold_load
        smaller_than = np.int64(1) << 62
        while excess > 0:
            largest = np.int64(0)
            equal = 0
            for i in range(starts_R[r], starts_R[r + 1]):
                tokens = counts_E[experts_by_home[i]]
                if tokens < smaller_than and tokens > largest:
                    largest = tokens
                    equal = 1
                elif tokens == largest:
                    equal += 1
            if largest == 0:
                break
            taken = min(equal, -(-excess // largest))
            needed += taken
            excess -= taken * largest
            smaller_than = largest
    return needed


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
