"""Homes by longest processing time: equal to a plain reference, balanced, and with few moves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.array_type import Array
from trimtab.policies.rivals.lpt_homes import imbalance, level_homes, place_longest_first


def plain_longest_first(loads_E: Array, home_E: Array, ranks: int, per_node: int) -> list[int]:
    room = [int((home_E == r).sum()) for r in range(ranks)]
    loads = [0] * ranks
    homes = [-1] * len(loads_E)
    for e in sorted(range(len(loads_E)), key=lambda e: (-loads_E[e], e)):
        nodes = [range(n, n + per_node) for n in range(0, ranks, per_node)]
        node = min((n for n in nodes if sum(room[r] for r in n)), key=lambda n: sum(loads[r] for r in n))
        rank = min((r for r in node if room[r]), key=lambda r: loads[r])
        homes[e] = rank
        room[rank] -= 1
        loads[rank] += int(loads_E[e])
    return homes


@st.composite
def layers(draw: st.DrawFn) -> tuple[Array, Array, int, int]:
    ranks, per_node = draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (8, 4), (8, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    experts = ranks * draw(st.integers(1, 5)) + draw(st.integers(0, ranks - 1))
    loads_E = rng.integers(0, rng.choice([2, 1000]), experts)
    return loads_E, rng.permutation(np.arange(experts) % ranks), ranks, per_node


@settings(max_examples=150)
@given(layers())
def test_homes_equal_those_of_plain_lpt(layer: tuple[Array, Array, int, int]) -> None:
    assert place_longest_first(*layer).tolist() == plain_longest_first(*layer)


@settings(max_examples=150)
@given(layers(), st.sampled_from([0.0, 0.05]))
def test_homes_are_those_of_lpt_or_unchanged(layer: tuple[Array, Array, int, int], smallest_gain: float) -> None:
    """As level as LPT makes them, with as many experts on every rank; or as they were, where that gains little."""
    loads_E, home_E, ranks, per_node = layer
    new_E = level_homes(loads_E[None], home_E[None], ranks, per_node, smallest_gain)[0].astype(np.int64)
    assert np.array_equal(np.bincount(new_E, minlength=ranks), np.bincount(home_E, minlength=ranks))
    leveled_E = np.array(plain_longest_first(loads_E, home_E, ranks, per_node))
    best = imbalance(loads_E, leveled_E, ranks, per_node)
    before = imbalance(loads_E, home_E, ranks, per_node)
    if before - best > smallest_gain:
        assert np.isclose(imbalance(loads_E, new_E, ranks, per_node), best)
        assert len({(int(a), int(b)) for a, b in zip(new_E, leveled_E, strict=True)}) == len(set(new_E.tolist()))
    else:
        assert np.array_equal(new_E, home_E)


def test_few_homes_move_when_loads_change_little() -> None:
    """Ranks and nodes are renamed after LPT, so that it moves far fewer experts than its own names would."""
    rng = np.random.default_rng(0)
    loads_E = (10_000 * rng.lognormal(0, 0.5, 128)).astype(np.int64)
    first_LE = level_homes(loads_E[None], (np.arange(128) // 4)[None], 32, 8, 0.0)
    shuffled_E = rng.permutation(32)[first_LE[0]]
    new_E = level_homes(loads_E[None], (first_LE[0] + 8).astype(np.int64)[None] % 32, 32, 8, -1.0)[0]
    assert np.array_equal(new_E, (first_LE[0] + 8) % 32)
    moved = (level_homes(loads_E[None], shuffled_E[None], 32, 32, -1.0)[0] != shuffled_E).mean()
    assert moved < 0.9
