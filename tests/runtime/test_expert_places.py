"""`ExpertPlaces`: places and experts are inverse, on all ranks, after any moves and in any order of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.examples import examples
from trimtab.array_type import Array
from trimtab.runtime.state.expert_places import ExpertPlaces


def random_homes(rng: np.random.Generator, num_ranks: int, num_rows: int) -> Array:
    return rng.permutation(np.repeat(np.arange(num_ranks, dtype=np.int16), num_rows))


def check(places: ExpertPlaces, num_ranks: int, num_rows: int) -> None:
    """Every row of every rank has one expert, by all properties."""
    assert places.experts_RH.shape == (num_ranks, num_rows)
    for rank, experts_H in enumerate(places.experts_RH.tolist()):
        for row, expert in enumerate(experts_H):
            assert (places.home_E[expert], places.rows_E[expert]) == (rank, row)
            assert places.by_position[rank * num_rows + row] == expert
            assert places.positions_E[expert] == rank * num_rows + row
    assert places.are_first == (places.by_position.tolist() == list(range(num_ranks * num_rows)))


@pytest.mark.parametrize("seed", range(examples(short=20, long=200)))
def test_places_after_any_moves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, num_rows = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    places = ExpertPlaces.first(random_homes(rng, num_ranks, num_rows))
    for rank in range(num_ranks):
        assert places.experts_RH[rank].tolist() == np.flatnonzero(places.home_E == rank).tolist()
    for _ in range(5):
        check(places, num_ranks, num_rows)
        home_E = random_homes(rng, num_ranks, num_rows)
        after = ExpertPlaces(home_E, places.rows_after(home_E))
        moved_E = np.isin(np.arange(len(home_E)), places.moved(after))
        assert (after.rows_E[~moved_E] == places.rows_E[~moved_E]).all()
        # Experts change their place only with their rank.
        assert (moved_E == (home_E != places.home_E)).all()
        places = after


def test_experts_that_arrive_keep_their_row_if_it_is_free() -> None:
    places = ExpertPlaces.first(np.array([0, 0, 0, 1, 1, 1], np.int16))
    assert places.are_first
    # Experts 0 and 2 change places with 3 and 4: rows 0 and 2 with rows 0 and 1.
    home_E = np.array([1, 0, 1, 0, 0, 1], np.int16)
    assert places.rows_after(home_E).tolist() == [0, 1, 1, 0, 2, 2]
    # Experts 1 and 2 change places with 3 and 5: row 2 is free for 5, and row 1 is left for 3.
    assert places.rows_after(np.array([0, 1, 1, 0, 1, 0], np.int16)).tolist() == [0, 0, 2, 1, 1, 2]
    # None of the rows is free: the free ones are taken in ascending order.
    four = ExpertPlaces.first(np.array([0] * 4 + [1] * 4, np.int16))
    assert four.rows_after(np.array([1, 1, 0, 0, 1, 1, 0, 0], np.int16)).tolist() == [2, 3, 2, 3, 0, 1, 0, 1]


def test_other_numbers_of_ranks() -> None:
    """Ranks 0, 1, 2 of the session are at positions 1, 2, 0 of the framework's group."""
    places = ExpertPlaces(np.array([0, 0, 1, 1, 2, 2], np.int16), np.array([0, 1, 1, 0, 0, 1]))
    assert places.by_position.tolist() == [0, 1, 3, 2, 4, 5]
    numbered = places.with_ranks_at((1, 2, 0))
    check(numbered, 3, 2)
    assert numbered.by_position.tolist() == [4, 5, 0, 1, 3, 2]
    assert not numbered.are_first
