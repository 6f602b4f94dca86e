"""Places of a mini-batch's sequences by their rows: measures, a greedy candidate, and a search by swaps.

Used by `openinstruct`, whose docstring names the source.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import copy_values, kernel

# Most overloaded ranks, sequences with most rows there, and best partners of a swap, of which one is drawn.
_HOT, _HEAVY, _BEST = np.int64(8), np.int64(4), np.int64(8)
_CANDIDATES = 64  # sequences among which partners are searched
_ROWS, _TOKENS, _SQUARES, _RATIO, _TOP = range(5)


class Packing(NamedTuple):
    """Sequences of a mini-batch, and the places for them.

    Attributes:
        rows_SLR: `[S, L, R]` int32 rows by sequence, layer and home rank.
        lengths_S: `[S]` int64 tokens.
        num_micro_steps, num_ranks: places.
        token_budget: most tokens of a place after a swap.
    """

    rows_SLR: Array
    lengths_S: Array
    num_micro_steps: int
    num_ranks: int
    token_budget: int


class Loads(NamedTuple):
    """What places hold.

    Attributes:
        rows_MLR: `[M, L, R]` int64 rows on every home rank.
        tokens_MR, squares_MR: `[M, R]` int64 tokens, and squares of lengths, of every data rank's sequences.
    """

    rows_MLR: Array
    tokens_MR: Array
    squares_MR: Array


@kernel
def load_places(problem, places_S2):  # type: ignore[no-untyped-def]
    """`Loads` of the first `len(places_S2)` sequences, at places `[S, 2]` (micro-step, rank)."""
    _, num_layers, num_homes = problem.rows_SLR.shape
    loads = Loads(
        np.zeros((problem.num_micro_steps, num_layers, num_homes), np.int64),
        np.zeros((problem.num_micro_steps, problem.num_ranks), np.int64),
        np.zeros((problem.num_micro_steps, problem.num_ranks), np.int64),
    )
    for s in range(len(places_S2)):
        _add(problem, loads, s, places_S2[s, 0], places_S2[s, 1], np.int64(1))
    return loads


@kernel
def _add(problem, loads, s, m, rank, sign):  # type: ignore[no-untyped-def]
    """Put a sequence at a place, or take it away (`sign` -1)."""
    rows_MLR, rows_SLR = loads.rows_MLR, problem.rows_SLR
    for layer in range(rows_SLR.shape[1]):
        for r in range(rows_SLR.shape[2]):
            rows_MLR[m, layer, r] += sign * rows_SLR[s, layer, r]
    loads.tokens_MR[m, rank] += sign * problem.lengths_S[s]
    loads.squares_MR[m, rank] += sign * problem.lengths_S[s] ** 2


@kernel
def measures(loads):  # type: ignore[no-untyped-def]
    """Quantities by which schedules are compared, `[6]` float64.

    Rows of the busiest rank, over layers and micro-steps; tokens, and squared lengths, of the busiest rank over
    micro-steps; mean and largest max/mean of a micro-step; largest load of a rank in a layer.
    """
    by_step_M5 = np.zeros((len(loads.rows_MLR), 5))
    for m in range(len(by_step_M5)):
        _measure_step(loads, m, by_step_M5[m])
    return _over_steps(by_step_M5)


@kernel
def _measure_step(loads, m, found_5):  # type: ignore[no-untyped-def]
    """Fill in the measures of one micro-step: its part of three sums, its max/mean and its largest load."""
    rows_LR = loads.rows_MLR[m]
    busiest, total, top = np.int64(0), np.int64(0), np.int64(0)
    for layer in range(rows_LR.shape[0]):
        most = np.int64(0)
        for r in range(rows_LR.shape[1]):
            most = max(most, rows_LR[layer, r])
            total += rows_LR[layer, r]
        busiest += most
        top = max(top, most)
    found_5[_ROWS], found_5[_TOP] = busiest, top
    found_5[_RATIO] = busiest * rows_LR.shape[1] / total if total > 0 else 1.0
    found_5[_TOKENS] = loads.tokens_MR[m].max()
    found_5[_SQUARES] = loads.squares_MR[m].max()


@kernel
def _over_steps(by_step_M5):  # type: ignore[no-untyped-def]
    """The measures of all micro-steps together; see `measures`."""
    found_6 = np.zeros(6)
    for found_5 in by_step_M5:
        for i in (_ROWS, _TOKENS, _SQUARES):
            found_6[i] += found_5[i]
        found_6[3] += found_5[_RATIO] / len(by_step_M5)
        found_6[4] = max(found_6[4], found_5[_RATIO])
        found_6[5] = max(found_6[5], found_5[_TOP])
    return found_6


@kernel
def greedy_places(problem):  # type: ignore[no-untyped-def]
    """Places `[S, 2]` of sequences, the most concentrated first: each to the micro-step whose busiest ranks it raises
    least, and there to the rank with the fewest tokens. -1 for those that fit nowhere."""
    rows_SLR = problem.rows_SLR
    num_sequences, num_layers, num_homes = rows_SLR.shape
    loads = load_places(problem, np.zeros((0, 2), np.int64))
    concentration_S = np.zeros(num_sequences, np.int64)
    for s in range(num_sequences):
        for layer in range(num_layers):
            concentration_S[s] += num_homes * rows_SLR[s, layer].max() - rows_SLR[s, layer].sum()
    places_S2 = np.full((num_sequences, 2), np.int64(-1))
    for s in np.argsort(-concentration_S, kind="mergesort"):
        best, least = np.int64(-1), np.int64(0)
        for m in range(problem.num_micro_steps):
            if loads.tokens_MR[m].min() + problem.lengths_S[s] > problem.token_budget:
                continue
            raised = np.int64(0)
            for layer in range(num_layers):
                before, after = np.int64(0), np.int64(0)
                for r in range(num_homes):
                    before = max(before, loads.rows_MLR[m, layer, r])
                    after = max(after, loads.rows_MLR[m, layer, r] + rows_SLR[s, layer, r])
                raised += after - before
            if best < 0 or raised < least:
                best, least = np.int64(m), raised
        if best < 0:
            return places_S2
        places_S2[s, 0], places_S2[s, 1] = best, loads.tokens_MR[best].argmin()
        _add(problem, loads, s, best, places_S2[s, 1], np.int64(1))
    return places_S2


@kernel
def swap_sequences(problem, start_S2, known, limits, best_S2, rng):  # type: ignore[no-untyped-def]
    """Search from `start_S2` by swaps, and write a better result to `best_S2`.

    Args:
        problem: `Packing`.
        start_S2: `[S, 2]` int64 places.
        known: measures `[6]` of the start, and of the places in `best_S2`, than which no result is worse.
        limits: swaps tried, and swaps without success.
        best_S2: `[S, 2]` int64, the best places so far; overwritten by better ones.
        rng: a NumPy random generator.
    """
    start_6, guard_6 = known
    proposals, most_stale = limits
    unit_6 = np.maximum(start_6, 1.0)
    places_S2 = start_S2.copy()
    loads = load_places(problem, places_S2)
    by_step_M5, smooth_M = np.zeros((problem.num_micro_steps, 5)), np.zeros(problem.num_micro_steps)
    for m in range(problem.num_micro_steps):
        _measure_step(loads, m, by_step_M5[m])
        smooth_M[m] = _smooth_work(loads, m, unit_6)
    work, smooth = work_of(start_6, unit_6), smooth_M.sum()
    best_work = work_of(guard_6, unit_6)
    stale = 0
    for attempt in range(proposals):
        if stale == most_stale:
            break
        stale += 1
        a, b = _propose(problem, loads, places_S2, attempt, rng)
        if a < 0 or not _swap(problem, loads, places_S2, a, b):
            continue
        m, n = places_S2[a, 0], places_S2[b, 0]
        _measure_step(loads, m, by_step_M5[m])
        _measure_step(loads, n, by_step_M5[n])
        old_m, old_n = smooth_M[m], smooth_M[n]
        smooth_M[m], smooth_M[n] = _smooth_work(loads, m, unit_6), _smooth_work(loads, n, unit_6)
        now_6 = _over_steps(by_step_M5)
        now_work, now_smooth = work_of(now_6, unit_6), smooth_M.sum()
        if now_work < best_work and is_no_worse(now_6, guard_6):
            best_work = now_work
            for s in range(len(places_S2)):
                copy_values(places_S2[s], best_S2[s])
        if now_work < work or (now_work == work and now_smooth < smooth):
            work, smooth, stale = now_work, now_smooth, 0
        else:
            _swap(problem, loads, places_S2, a, b)
            smooth_M[n], smooth_M[m] = old_n, old_m
            _measure_step(loads, m, by_step_M5[m])
            _measure_step(loads, n, by_step_M5[n])


@kernel
def is_no_worse(found_6, guard_6):  # type: ignore[no-untyped-def]
    """Whether no measure of rows is worse. `work_of` decides about tokens and squared lengths."""
    return found_6[_ROWS] <= guard_6[_ROWS] and np.all(found_6[3:] <= guard_6[3:])


@kernel
def work_of(found_6, unit_6):  # type: ignore[no-untyped-def]
    """The sum that the search reduces: three measures in parts of the start's."""
    return found_6[_ROWS] / unit_6[_ROWS] + found_6[_TOKENS] / unit_6[_TOKENS] + found_6[_SQUARES] / unit_6[_SQUARES]


@kernel
def _smooth_work(loads, m, unit_6):  # type: ignore[no-untyped-def]
    """A micro-step's part of `work_of` with a smooth maximum, which other large loads increase, for each maximum."""
    heat = 0.1 / len(loads.rows_MLR)
    smooth = _smooth_max(loads.tokens_MR[m], unit_6[_TOKENS], heat)
    smooth += _smooth_max(loads.squares_MR[m], unit_6[_SQUARES], heat)
    for layer in range(loads.rows_MLR.shape[1]):
        smooth += _smooth_max(loads.rows_MLR[m, layer], unit_6[_ROWS], heat)
    return smooth


@kernel
def _smooth_max(values, unit, heat):  # type: ignore[no-untyped-def]
    """See `_smooth_work`; in `unit`s."""
    most, total = values.max(), 0.0
    for value in values:
        total += np.exp((value - most) / (unit * heat))
    return most / unit + heat * np.log(total)


@kernel
def _swap(problem, loads, places_S2, a, b):  # type: ignore[no-untyped-def]
    """Swap the places of two sequences if they differ and the budget allows it; returns whether they were swapped."""
    m, rank, n, other = places_S2[a, 0], places_S2[a, 1], places_S2[b, 0], places_S2[b, 1]
    more = problem.lengths_S[b] - problem.lengths_S[a]
    if m == n and rank == other:
        return False
    if more > 0 and loads.tokens_MR[m, rank] + more > problem.token_budget:
        return False
    if more < 0 and loads.tokens_MR[n, other] - more > problem.token_budget:
        return False
    for s, step, place, sign in ((a, m, rank, -1), (b, n, other, -1), (a, n, other, 1), (b, m, rank, 1)):
        _add(problem, loads, s, step, place, np.int64(sign))
    places_S2[a, 0], places_S2[a, 1], places_S2[b, 0], places_S2[b, 1] = n, other, m, rank
    return True


@kernel
def _propose(problem, loads, places_S2, attempt, rng):  # type: ignore[no-untyped-def]
    """Two sequences to swap: aimed in three of four attempts. -1 if there are none."""
    rows_SLR, rows_MLR, lengths_S = problem.rows_SLR, loads.rows_MLR, problem.lengths_S
    num_sequences, num_layers, num_homes = rows_SLR.shape
    if attempt % 4 == 3 or problem.num_micro_steps == 1:
        return np.int64(rng.random() * num_sequences), np.int64(rng.random() * num_sequences)
    below_MLR = np.zeros(rows_MLR.shape)
    for m in range(problem.num_micro_steps):
        for layer in range(num_layers):
            mean = rows_MLR[m, layer].mean()
            for r in range(num_homes):
                below_MLR[m, layer, r] = mean - rows_MLR[m, layer, r]
    hot = _draw_least(below_MLR.ravel(), np.ones(below_MLR.size, np.bool_), _HOT, rng)
    m, layer, r = hot // (num_layers * num_homes), hot // num_homes % num_layers, hot % num_homes
    is_here_S = places_S2[:, 0] == m
    a = _draw_least(-rows_SLR[:, layer, r].astype(np.float64), is_here_S, _HEAVY, rng)
    if a < 0 or is_here_S.all():
        return np.int64(-1), np.int64(-1)
    may_S = ~is_here_S
    others = np.flatnonzero(may_S)
    if len(others) > _CANDIDATES:
        may_S[:] = False
        for _ in range(_CANDIDATES):
            may_S[others[int(rng.random() * len(others))]] = True
    if attempt % 2 == 0:
        distances = np.sort(np.abs(lengths_S[may_S] - lengths_S[a]))
        shortlist = min(max(8, len(distances) // 4), len(distances))
        may_S &= np.abs(lengths_S - lengths_S[a]) <= distances[shortlist - 1]
    change_S = np.zeros(num_sequences)
    for s in np.flatnonzero(may_S):
        for layer in range(num_layers):
            for r in range(num_homes):
                more = float(rows_SLR[s, layer, r] - rows_SLR[a, layer, r])
                change_S[s] += more * (rows_MLR[m, layer, r] - rows_MLR[places_S2[s, 0], layer, r])
    return a, _draw_least(change_S, may_S, _BEST, rng)


@kernel
def _draw_least(values, allowed, number, rng):  # type: ignore[no-untyped-def]
    """Index of one of the `number` least allowed values, drawn with equal probability; -1 if none is allowed."""
    least = np.full(number, np.int64(-1))
    count = 0
    for i in range(len(values)):
        if not allowed[i] or (count == number and values[i] >= values[least[count - 1]]):
            continue
        count = min(count + 1, number)
        at = count - 1
        while at > 0 and values[i] < values[least[at - 1]]:
            least[at] = least[at - 1]
            at -= 1
        least[at] = i
    return least[int(rng.random() * count)] if count > 0 else np.int64(-1)
