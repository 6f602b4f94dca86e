"""Variables that torchrun sets, right and wrong."""

from __future__ import annotations

import pytest

from trimtab.errors import InputError
from trimtab.rank_variables import rank_variable, torchrun_ranks

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_without_rank_no_other_program_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchrun_ranks() is None
    # As in the environment of a job's allocation.
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert torchrun_ranks() is None


def test_under_torchrun_the_number_of_ranks_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert torchrun_ranks() == 4
    assert rank_variable("RANK") == 1
    assert rank_variable("LOCAL_WORLD_SIZE", 7) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc'; it should be a whole number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "4"}, "RANK is 4; it should be below WORLD_SIZE, 4"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK is '1.0'"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
    ],
)
def test_wrong_and_missing_values_are_named(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], message: str
) -> None:
    for name, value in (TORCHRUN | changes).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as raised:
        torchrun_ranks()
    assert message in str(raised.value)
