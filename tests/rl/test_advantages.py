"""Advantages compared with their definition, summed without recursion."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trimtab.array_type import Array
from trimtab.rl.advantages import extended_advantages, generalized_advantages

Row = tuple[int, list[float], float]
# Libraries may have switched subnormal numbers off in this process.
VALUES, LAMBDAS = st.floats(-2, 2, allow_subnormal=False), st.floats(0, 1, allow_subnormal=False)


def brute_force(differences: Array, gae_lambda: float) -> Array:
    """The sum of lambda^(k - t) * delta_k over k >= t, for every t."""
    length = len(differences)
    return np.array([sum(gae_lambda ** (k - t) * differences[k] for k in range(t, length)) for t in range(length)])


@st.composite
def responses(draw: st.DrawFn) -> list[Row]:
    """Rows of a micro-batch: prompt tokens, values of the response's states, reward."""
    return [
        (draw(st.integers(0, 3)), draw(st.lists(VALUES, min_size=1, max_size=8)), draw(VALUES))
        for _ in range(draw(st.integers(1, 3)))
    ]


def padded(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, rewards and mask of rows. Values outside of responses are not a number."""
    width = max(prompt + len(values) for prompt, values, _ in rows)
    values_BT = torch.full((len(rows), width), torch.nan, dtype=torch.float64)
    mask_BT = torch.zeros(len(rows), width)
    for row, (prompt, values, _) in enumerate(rows):
        values_BT[row, prompt : prompt + len(values)] = torch.tensor(values, dtype=torch.float64)
        mask_BT[row, prompt : prompt + len(values)] = 1
    return values_BT, torch.tensor([row[2] for row in rows], dtype=torch.float64), mask_BT


@given(responses(), LAMBDAS, st.lists(st.booleans(), min_size=3, max_size=3))
@example([(1, [0.5], 1.0), (0, [0.1, 0.7, 0.2], 1.0)], 0.9, [False, False, False])
def test_advantages_equal_their_definition(rows: list[Row], gae_lambda: float, finished: list[bool]) -> None:
    """GAE, and extended GAE of finished and incomplete responses, whose rewards are not a number."""
    values_BT, rewards_B, mask_BT = padded(rows)
    finished_B = torch.tensor(finished[: len(rows)])
    of_finished = generalized_advantages(values_BT, rewards_B, mask_BT, gae_lambda)
    rewards_B[~finished_B] = torch.nan
    extended = extended_advantages(values_BT, rewards_B, finished_B, mask_BT, gae_lambda)
    for row, (prompt, values, reward) in enumerate(rows):
        complete, incomplete = np.diff([*values, reward]), np.array([*np.diff(values), 0.0])
        for found, differences in ((of_finished, complete), (extended, complete if finished[row] else incomplete)):
            actual, expected = found[row, prompt : prompt + len(values)].numpy(), brute_force(differences, gae_lambda)
            np.testing.assert_allclose(actual, expected, atol=1e-12, rtol=0)
        if not finished[row]:
            assert extended[row, prompt + len(values) - 1] == 0
    assert (of_finished[mask_BT == 0] == 0).all()
    assert (extended[mask_BT == 0] == 0).all()
