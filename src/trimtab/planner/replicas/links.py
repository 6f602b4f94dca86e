"""Links of ranks: what replicas leave of an instance's time, and the split that loads links evenly.

An all-to-all lasts as long as the busier direction of one rank's busiest link. So a rank has two times: that of its
links in half of the all-to-alls, and that with its experts after it. An instance takes the sum of both maxima.

`split_tokens` keeps rows in their node and does not see links of ranks. Where each row is sent by itself,
`split_by_links` goes on from its split: tokens of a source rank leave the copy where one more adds most to the squares
of times above a target, for the copy where it adds least. (Our own: descent, one source rank and expert at a time.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import inlined_kernel, kernel

SWEEPS = 8
# Numbers of a source's tokens that are tried in turn, all first.
TRIES = 2
# The longest time of a rank when a descent begins. Prices of a row above it, and times above their targets of more than
# twice as much, count as that, so that sums of squares are below 2**63.
LONGEST = np.int64(1) << 28
# Places in `Load.rows_KR`: of a link, those of sent rows, before received ones; of computed rows.
NEAR, FAR, COMPUTED = np.int64(0), np.int64(2), np.int64(4)


class Load(NamedTuple):
    """Rows of one instance, all int64.

    Attributes:
        rows_KR: `[5, R]` sent and received over a rank's link in its node, sent and received between nodes, and
            computed.
        node_R: `[R]` the ranks' nodes.
    """

    rows_KR: Array
    node_R: Array


@kernel
def load_at_home(counts_RE, fixed_R, homes, limits):  # type: ignore[no-untyped-def]
    """The `Load` without replicas; links are left out where rows between nodes have no price.

    Args:
        counts_RE: `[R, E]` integer tokens by source rank and expert.
        fixed_R: `[R]` int64 rows that stay at each rank.
        homes: `Homes`.
        limits: `Limits`.
    """
    num_ranks, home_E = len(fixed_R), homes.home_E
    rows_KR, node_R = np.zeros((5, num_ranks), np.int64), np.arange(num_ranks) // limits.ranks_per_node
    rows_KR[COMPUTED] = fixed_R
    relayed = np.int64(limits.ranks_per_node if limits.forwards else 0)
    to_R = np.empty(num_ranks, np.int64)
    for source in range(num_ranks):
        to_R[:] = 0
        for e in range(len(home_E)):
            to_R[home_E[e]] += counts_RE[source, e]
        if limits.prices.far_row == 0:
            rows_KR[COMPUTED] += to_R
            continue
        for rank in range(num_ranks):
            _send(rows_KR, node_R, source, rank, to_R[rank], relayed)
    return Load(rows_KR, node_R)


@kernel
def load_with(at_home, home_E, limits, shares, quotas):  # type: ignore[no-untyped-def]
    """The `Load` with replicas.

    Args:
        at_home: the load without them.
        home_E: `[E]` int16 homes.
        shares, quotas: `Shares` of P replicas, and their `Quotas`.
    """
    rows_KR, node_R = at_home.rows_KR.copy(), at_home.node_R
    experts_P, ranks_P, tokens_P = shares
    starts, sources_Q, tokens_Q = quotas
    relayed = np.int64(limits.ranks_per_node if limits.forwards else 0)
    for p in range(len(experts_P)):
        home, rank = np.int64(home_E[experts_P[p]]), ranks_P[p]
        if limits.prices.far_row == 0:
            rows_KR[COMPUTED, home] -= tokens_P[p]
            rows_KR[COMPUTED, rank] += tokens_P[p]
            continue
        for q in range(starts[p], starts[p + 1]):
            source, tokens = np.int64(sources_Q[q]), np.int64(tokens_Q[q])
            _send(rows_KR, node_R, source, home, -tokens, relayed)
            _send(rows_KR, node_R, source, rank, tokens, relayed)
    return Load(rows_KR, node_R)


@inlined_kernel
def _send(rows_KR, node_R, source, rank, tokens, relayed):  # type: ignore[no-untyped-def]
    """Add a source rank's tokens to the rows of a rank, and to the links between them.

    Args:
        relayed: ranks of a node, if tokens come to the rank with the source's place in its node; else 0.
    """
    rows_KR[COMPUTED, rank] += tokens
    if node_R[rank] != node_R[source]:
        rows_KR[FAR, source] += tokens
        rows_KR[FAR + 1, source + (node_R[rank] - node_R[source]) * relayed if relayed else rank] += tokens
    elif rank != source:
        rows_KR[NEAR, source] += tokens
        rows_KR[NEAR + 1, rank] += tokens


@kernel
def longest_times(load, prices):  # type: ignore[no-untyped-def]
    """Time of an instance: the largest of the ranks' two times, added.

    Args:
        load: a `Load`.
        prices: of `prices_of_rows`.
    """
    most_links, most_both = np.int64(0), np.int64(0)
    for rank in range(len(load.node_R)):
        links, both = _times(load.rows_KR, prices, rank)
        most_links, most_both = max(most_links, links), max(most_both, both)
    return most_links + most_both


@kernel
def prices_of_rows(limits):  # type: ignore[no-untyped-def]
    """Femtoseconds of a row over a link in the node or between nodes, in half of the all-to-alls; of a computed row."""
    # A token that is sent once to a node crosses links in it for its rows there, wherever they are computed.
    near = np.int64(0 if limits.forwards else limits.prices.near_row // 2)
    return near, np.int64(limits.prices.far_row * limits.ranks_per_node // 2), np.int64(limits.prices.computed_row)


@inlined_kernel
def _times(rows_KR, prices, rank):  # type: ignore[no-untyped-def]
    """Time of a rank's links in half of the all-to-alls, and that with its experts."""
    near, far, computed = prices
    near_rows, far_rows = max(rows_KR[0, rank], rows_KR[1, rank]), max(rows_KR[2, rank], rows_KR[3, rank])
    links = max(near_rows * near, far_rows * far)
    return links, links + rows_KR[COMPUTED, rank] * computed


@kernel
def split_by_links(counts_RE, load, home_E, limits, most_rows, shares, quotas):  # type: ignore[no-untyped-def]
    """Change the quotas of one instance's replicas where each row is sent by itself.

    Args:
        counts_RE: as in `load_at_home`.
        load: of `load_with`; changed.
        home_E: `[E]` int16 homes.
        limits: `Limits`.
        most_rows: rows that no rank is given more of.
        shares: `Shares` of P replicas; those of an expert follow one another. Those that lose all tokens are removed.
        quotas: `Quotas` of these.

    Returns:
        The number of replicas that are left.
    """
    experts_P, ranks_P, tokens_P = shares
    num_ranks, num_replicas = len(counts_RE), len(experts_P)
    # Copies of an expert are next to each other, the home first.
    starts_G, rank_C = np.zeros(num_replicas + 1, np.int64), np.empty(2 * num_replicas, np.int64)
    tokens_CR = np.zeros((2 * num_replicas, num_ranks), np.int64)
    groups, copies = 0, 0
    for p in range(num_replicas):
        if p == 0 or experts_P[p - 1] != experts_P[p]:
            rank_C[copies] = home_E[experts_P[p]]
            tokens_CR[copies] = counts_RE[:, experts_P[p]]
            starts_G[groups] = copies
            groups += 1
            copies += 1
        rank_C[copies] = ranks_P[p]
        for q in range(quotas.starts[p], quotas.starts[p + 1]):
            tokens_CR[copies, quotas.sources[q]] = quotas.tokens[q]
            tokens_CR[starts_G[groups - 1], quotas.sources[q]] -= quotas.tokens[q]
        copies += 1
    starts_G[groups] = copies
    _descend((starts_G[: groups + 1], rank_C, tokens_CR[:copies]), load, limits, most_rows)
    kept, quota = 0, 0
    for g in range(groups):
        for c in range(starts_G[g] + 1, starts_G[g + 1]):
            begin, total = quota, np.int64(0)
            for source in range(num_ranks):
                if tokens_CR[c, source] > 0:
                    quotas.sources[quota], quotas.tokens[quota] = source, tokens_CR[c, source]
                    total += tokens_CR[c, source]
                    quota += 1
            if quota > begin:
                experts_P[kept], ranks_P[kept], tokens_P[kept] = experts_P[c - g - 1], rank_C[c], total
                kept += 1
                quotas.starts[kept] = quota
    return kept


@kernel
def _descend(copies, load, limits, most_rows):  # type: ignore[no-untyped-def]
    """Sweep over all source ranks of all experts with replicas. Tokens are those after the best sweep."""
    starts_G, rank_C, tokens_CR = copies
    rows_KR, node_R = load
    prices, smallest, total_C = prices_of_rows(limits), limits.smallest_share, tokens_CR.sum(axis=1)
    num_ranks, scale = len(node_R), LONGEST / max(np.int64(1), longest_times(load, prices))
    near, far, computed = prices[0] * scale, prices[1] * scale, prices[2] * scale
    scaled = np.int64(min(near, LONGEST)), np.int64(min(far, LONGEST)), np.int64(min(computed, LONGEST))
    times_R2, price_KR = np.empty((num_ranks, 2), np.int64), np.empty((5, num_ranks), np.int64)
    best, best_CR, shifts = np.int64(1) << 62, np.empty_like(tokens_CR), 1
    for sweep in range(SWEEPS + 1):
        most_links, most_both, sum_links, sum_both = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for rank in range(num_ranks):
            links, both = _times(rows_KR, scaled, rank)
            most_links, most_both = max(most_links, links), max(most_both, both)
            sum_links, sum_both = sum_links + links, sum_both + both
        if most_links + most_both < best:
            best = most_links + most_both
            best_CR[:] = tokens_CR
        if sweep == SWEEPS or shifts == 0:
            break
        # Half of the way to the mean.
        targets = (most_links + sum_links // num_ranks) // 2, (most_both + sum_both // num_ranks) // 2
        for rank in range(num_ranks):
            times_R2[rank, 0], times_R2[rank, 1] = _price(rows_KR, scaled, targets, rank, price_KR)
        shifts = 0
        for g in range(len(starts_G) - 1):
            for source in range(num_ranks):
                giver, taker, highest, lowest = -1, -1, np.int64(-1), np.int64(1) << 62
                for c in range(starts_G[g], starts_G[g + 1]):
                    rank = rank_C[c]
                    price = price_KR[COMPUTED, rank]
                    if rank != source:
                        link = NEAR if node_R[rank] == node_R[source] else FAR
                        price += price_KR[link, source] + price_KR[link + 1, rank]
                    if price < lowest:
                        taker, lowest = c, price
                    if price > highest and tokens_CR[c, source] > 0:
                        giver, highest = c, price
                if highest <= lowest:
                    continue
                give, take = rank_C[giver], rank_C[taker]
                tokens = min(tokens_CR[giver, source], most_rows - rows_KR[COMPUTED, take])
                alone = source != give and source != take
                before = _above(times_R2[give], targets) + _above(times_R2[take], targets)
                if alone:
                    before += _above(times_R2[source], targets)
                for _ in range(TRIES):
                    if tokens < total_C[giver]:
                        tokens = min(tokens, total_C[giver] - smallest)
                    if tokens <= 0 or total_C[taker] + tokens < smallest:
                        break
                    _send(rows_KR, node_R, source, give, -tokens, 0)
                    _send(rows_KR, node_R, source, take, tokens, 0)
                    after = _above(_times(rows_KR, scaled, give), targets)
                    after += _above(_times(rows_KR, scaled, take), targets)
                    if alone:
                        after += _above(_times(rows_KR, scaled, source), targets)
                    if after < before:
                        tokens_CR[giver, source] -= tokens
                        tokens_CR[taker, source] += tokens
                        total_C[giver] -= tokens
                        total_C[taker] += tokens
                        shifts += 1
                        for rank in (give, take, source):
                            links, both = _price(rows_KR, scaled, targets, rank, price_KR)
                            times_R2[rank, 0], times_R2[rank, 1] = links, both
                        break
                    _send(rows_KR, node_R, source, give, tokens, 0)
                    _send(rows_KR, node_R, source, take, -tokens, 0)
                    # Where the parabola with this value, and with the slope of prices, is lowest.
                    slope = 2.0 * (highest - lowest)
                    tokens = np.int64(slope * tokens**2 / (2.0 * (after - before + slope * tokens)))
    tokens_CR[:] = best_CR


@inlined_kernel
def _above(times, targets):  # type: ignore[no-untyped-def]
    """Squares of a rank's two times above their targets."""
    links, both = _excess(times[0] - targets[0]), _excess(times[1] - targets[1])
    return links * links + both * both


@inlined_kernel
def _excess(time):  # type: ignore[no-untyped-def]
    return min(max(np.int64(0), time), 2 * LONGEST)


@inlined_kernel
def _price(rows_KR, prices, targets, rank, price_KR):  # type: ignore[no-untyped-def]
    """What one more row adds to a rank's squares: over each link in each direction, and computed.

    Only links that are about the busiest of the rank count. Returns the rank's times.
    """
    near, far, computed = prices
    times = _times(rows_KR, prices, rank)
    both = _excess(times[1] - targets[1])
    above = both + _excess(times[0] - targets[0])
    for k in range(4):
        row = near if k < FAR else far
        is_busiest = rows_KR[k, rank] * row >= times[0] - (times[0] >> 5)
        price_KR[k, rank] = above * row if is_busiest else 0
    price_KR[COMPUTED, rank] = both * computed
    return times
