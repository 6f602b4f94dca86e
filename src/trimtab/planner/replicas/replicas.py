"""Level three, replicas: which experts get a copy on which rank, and how many tokens each copy takes.

Tokens are those of known routes. Rows of unknown routes stay at their estimated homes. They are part of a rank's load,
and only known tokens are moved.

The busiest rank (the *giver*) moves tokens of its largest expert to another rank (the *taker*), until no rank is above
the threshold. There are two ways to choose the taker and the number of tokens:

* **fit**: of the takers with capacity for the giver's whole excess, the one with the least capacity. Large capacities
  remain for large givers, and few experts are copied twice. (Best fit, as in bin packing.)
* **fill**: the same taker, but filled to the threshold. The giver may end below it and then becomes a taker with its
  own slots. No capacity is lost to a used slot, so a single slot per rank is nearly always enough.

A taker on the giver's node is preferred, since transfers are fast inside a node. It may take only a part of the excess,
unless the whole node is overloaded, because then tokens must leave the node anyway. Fitting needs the fewest replicas
and
filling reaches the lowest load; filling is tried where fitting fails, then both again a few times with givers, experts
and takers in slightly different orders, and finally a higher threshold. Other orders are also tried for fewer
replicas, unless their number equals a lower bound. Finally every replica's share is shifted towards equal loads of its
two ranks, which costs nothing. (Our own; LLEP and UltraEP move excess tokens in a similar way.)
"""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel

SEARCH_STEPS = 6
LEVEL_SWEEPS = 4
# Most other orders tried; fewer for large instances, whose attempts take longer.
MOST_RESTARTS = 16
RESTART_WORK = 1000
# Variants that are always tried: fit or fill, near takers first or not.
PLAIN_WAYS = 4
# How much ranks and experts are jittered in other orders: up to this part of the target load.
JITTER = 8


@kernel
def place_replicas(  # type: ignore[no-untyped-def]
    counts_E, fixed_R, home_E, experts_by_home, home_starts, ranks_per_node, slots, threshold_load, smallest_share,
    replicas_3P,
):  # fmt: skip
    """Reduce the busiest rank's load in one instance to the threshold with few replicas, near ones first.

    Args:
        counts_E: `[E]` int64 tokens of every expert, which replicas may take.
        fixed_R: `[R]` int64 rows that stay at each rank, the expected ones of unknown routes.
        home_E: `[E]` integer homes.
        experts_by_home: `[E]` int64 experts ordered by home; rank r's are `home_starts[r]:home_starts[r + 1]`.
        slots: replicas of a rank.
        threshold_load: load up to which a rank is not changed, tokens; at least the largest of `fixed_R`, a lower bound
            of the busiest rank's load.
        smallest_share: fewest tokens of a copy, and fewest tokens that stay at home if any do.
        replicas_3P: `[3, R * slots]` int64, filled with expert, rank and tokens of each replica.

    Returns:
        The number of replicas.
    """
    num_ranks = len(home_starts) - 1
    loads_R = fixed_R.copy()
    for e in range(len(counts_E)):
        loads_R[home_E[e]] += counts_E[e]
    most = loads_R.max()
    threshold_load = max(threshold_load, fixed_R.max())
    if most <= threshold_load or slots == 0:
        return 0
    scratch_3P = np.empty_like(replicas_3P)
    jitter = np.zeros(max(num_ranks, np.diff(home_starts).max()), np.int64)
    fewest = _fewest(counts_E, experts_by_home, home_starts, loads_R, threshold_load)
    restarts = min(MOST_RESTARTS, RESTART_WORK // (num_ranks * num_ranks))
    count = 0
    cheapest = np.int64(1) << 62
    # Both ends of the search are loads: nothing below `low` is asked for, `best` has been reached.
    best = most
    low = threshold_load
    target = threshold_load
    for step in range(SEARCH_STEPS):
        for way in range(PLAIN_WAYS + restarts):
            fill, near = way % PLAIN_WAYS >= 2, way % 2 == 0
            if (not near and ranks_per_node == num_ranks) or (best <= target and 0 < way < PLAIN_WAYS):
                continue
            _shuffle(jitter, way - PLAIN_WAYS, target)
            tried, reached = _attempt(
                counts_E, home_E, experts_by_home, home_starts, loads_R, ranks_per_node, slots, target, smallest_share,
                fill, near, jitter, scratch_3P,
            )  # fmt: skip
            cost = 2 * tried + _count_far(home_E, ranks_per_node, scratch_3P, tried)
            if reached <= target:
                better = best > target or cost < cheapest
            else:
                better = reached < best
            if better:
                best = max(reached, target)
                cheapest = cost
                count = tried
                replicas_3P[:, :count] = scratch_3P[:, :count]
            if best <= target and (count <= fewest or step > 0):
                break
        if best > target:
            low = target
        if best - low <= smallest_share // 8 or best <= threshold_load:
            break
        target = (low + best) // 2
    _level(counts_E, home_E, loads_R, smallest_share, replicas_3P, count)
    return count


@kernel
def _fewest(counts_E, experts_by_home, home_starts, loads_R, threshold_load):  # type: ignore[no-untyped-def]
    """Lower bound of the number of replicas: for every rank, its largest experts that together exceed its excess."""
    needed = 0
    for r in range(len(loads_R)):
        excess = loads_R[r] - threshold_load
        smaller_than = np.int64(1) << 62
        while excess > 0:
            largest = np.int64(0)
            equal = 0
            for i in range(home_starts[r], home_starts[r + 1]):
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
def _shuffle(jitter, number, target):  # type: ignore[no-untyped-def]
    """Tokens added to the sizes of ranks and experts in attempt `number`; none below 0."""
    if number < 0:
        jitter[:] = 0
        return
    random = np.uint64(number + 1) * np.uint64(0x9E3779B97F4A7C15)
    for i in range(len(jitter)):
        random ^= random << np.uint64(13)
        random ^= random >> np.uint64(7)
        random ^= random << np.uint64(17)
        jitter[i] = np.int64(random >> np.uint64(33)) % (target // JITTER + 1)


@kernel
def _count_far(home_E, ranks_per_node, replicas_3P, count):  # type: ignore[no-untyped-def]
    far = 0
    for p in range(count):
        far += home_E[replicas_3P[0, p]] // ranks_per_node != replicas_3P[1, p] // ranks_per_node
    return far


@kernel
def _attempt(  # type: ignore[no-untyped-def]
    counts_E, home_E, experts_by_home, home_starts, loads_R, ranks_per_node, slots, target, smallest_share, fill,
    near, jitter, replicas_3P,
):  # fmt: skip
    """One run at a fixed target. Returns the number of replicas and the load of the busiest rank."""
    num_ranks = len(loads_R)
    experts_P, ranks_P, shares_P = replicas_3P[0], replicas_3P[1], replicas_3P[2]
    loads = loads_R.copy()
    at_home_E = counts_E.copy()
    free_slots = np.full(num_ranks, slots, np.int64)
    given_up = np.zeros(num_ranks, np.bool_)
    has_copy = np.zeros(num_ranks, np.bool_)
    # Looked up rather than divided: this is the innermost part of planning.
    node_R = np.empty(num_ranks, np.int64)
    node_loads = np.zeros(num_ranks // ranks_per_node, np.int64)
    for r in range(num_ranks):
        node_R[r] = r // ranks_per_node
        node_loads[node_R[r]] += loads[r]
    num_replicas = 0
    while True:
        giver = -1
        highest = np.int64(0)
        for r in range(num_ranks):
            if loads[r] > target and loads[r] + jitter[r] > highest and not given_up[r]:
                giver = r
                highest = loads[r] + jitter[r]
        if giver < 0:
            return num_replicas, loads.max()
        expert = -1
        largest = np.int64(-1)
        for i in range(home_starts[giver], home_starts[giver + 1]):
            e = experts_by_home[i]
            seeming = at_home_E[e] + jitter[i - home_starts[giver]]
            if at_home_E[e] >= smallest_share and seeming > largest:
                expert = e
                largest = seeming
        if expert < 0:
            given_up[giver] = True
            continue
        tokens = at_home_E[expert]
        excess = loads[giver] - target
        wanted = _whole_share(excess, tokens, smallest_share)
        for p in range(num_replicas):
            if experts_P[p] == expert:
                has_copy[ranks_P[p]] = True
        near_first = node_R[giver] * ranks_per_node
        near_last = near_first + ranks_per_node
        taker = _tightest(loads, jitter, free_slots, has_copy, target - wanted, giver, near_first, near_last)
        whole = taker >= 0
        if not whole and near and node_loads[node_R[giver]] <= target * ranks_per_node:
            taker = _roomiest(
                loads, jitter, free_slots, has_copy, target - smallest_share, giver, near_first, near_last
            )
        if taker < 0:
            taker = _tightest(loads, jitter, free_slots, has_copy, target - wanted, giver, 0, num_ranks)
            whole = taker >= 0
        if taker < 0:
            taker = _roomiest(loads, jitter, free_slots, has_copy, target - smallest_share, giver, 0, num_ranks)
        if taker >= 0:
            room = target - loads[taker]
            if not whole:
                wanted = _part_share(min(excess, room), tokens, smallest_share)
            elif fill:
                wanted = max(wanted, _part_share(room, tokens, smallest_share))
        for p in range(num_replicas):
            if experts_P[p] == expert:
                has_copy[ranks_P[p]] = False
        if taker < 0 or wanted < smallest_share:
            given_up[giver] = True
            continue
        experts_P[num_replicas] = expert
        ranks_P[num_replicas] = taker
        shares_P[num_replicas] = wanted
        num_replicas += 1
        free_slots[taker] -= 1
        at_home_E[expert] -= wanted
        loads[giver] -= wanted
        loads[taker] += wanted
        node_loads[node_R[giver]] -= wanted
        node_loads[node_R[taker]] += wanted


@kernel
def _level(counts_E, home_E, loads_R, smallest_share, replicas_3P, num_replicas):  # type: ignore[no-untyped-def]
    """Shift tokens between each replica and its home to reduce the difference of their ranks' loads."""
    loads = loads_R.copy()
    at_home_E = counts_E.copy()
    for p in range(num_replicas):
        expert, rank, share = replicas_3P[0, p], replicas_3P[1, p], replicas_3P[2, p]
        at_home_E[expert] -= share
        loads[home_E[expert]] -= share
        loads[rank] += share
    for _ in range(LEVEL_SWEEPS):
        for p in range(num_replicas):
            expert, rank = replicas_3P[0, p], replicas_3P[1, p]
            if at_home_E[expert] == 0:
                continue
            home = home_E[expert]
            # Positive: from the home to the replica.
            tokens = (loads[home] - loads[rank]) // 2
            tokens = min(tokens, at_home_E[expert] - smallest_share)
            tokens = max(tokens, smallest_share - replicas_3P[2, p])
            replicas_3P[2, p] += tokens
            at_home_E[expert] -= tokens
            loads[home] -= tokens
            loads[rank] += tokens


@kernel
def _whole_share(wanted, tokens, smallest_share):  # type: ignore[no-untyped-def]
    """At least `wanted` of `tokens`, or all of them; neither the moved nor the remaining part is smaller than
    allowed."""
    share = max(min(wanted, tokens), smallest_share)
    return tokens if tokens - share < smallest_share else share


@kernel
def _part_share(room, tokens, smallest_share):  # type: ignore[no-untyped-def]
    """At most `room` of `tokens`; the remaining part is 0 or no smaller than allowed."""
    if room >= tokens:
        return tokens
    return min(room, tokens - smallest_share)


@kernel
def _tightest(loads, jitter, free_slots, has_copy, highest_load, giver, first, last):  # type: ignore[no-untyped-def]
    """The fullest of ranks first to last - 1 with at most `highest_load`, a free slot and no copy; -1 for none."""
    best = -1
    for r in range(first, last):
        if loads[r] <= highest_load and free_slots[r] > 0 and not has_copy[r] and r != giver:  # noqa: SIM102
            if best < 0 or loads[r] + jitter[r] > loads[best] + jitter[best]:
                best = r
    return best


@kernel
def _roomiest(loads, jitter, free_slots, has_copy, highest_load, giver, first, last):  # type: ignore[no-untyped-def]
    """The emptiest of ranks first to last - 1 with at most `highest_load`, a free slot and no copy; -1 for none."""
    best = -1
    for r in range(first, last):
        if loads[r] <= highest_load and free_slots[r] > 0 and not has_copy[r] and r != giver:  # noqa: SIM102
            if best < 0 or loads[r] + jitter[r] < loads[best] + jitter[best]:
                best = r
    return best
