"""`Run`: its fields are checked when it is made, and sweeps are combinations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trimtab
from trimtab import InputError, Run
from trimtab.api.run import EXCLUSIVE
from trimtab.cli.signatures import arguments_of


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 0}, "ranks: 0 should be a whole number of at least 1"),
        ({"ranks": "8"}, "ranks: '8' should be a whole number"),
        ({"tp": None}, "tp: None should be a whole number"),
        ({"groups": 2**31}, "groups: 2147483648 is too large"),
        ({"slots": "all"}, "slots: 'all' should be a whole number of at least 0 or \"auto\""),
        ({"step": -1}, "step: -1 should be a whole number of at least 0"),
        ({"recompute": "no"}, "recompute: 'no' should be true or false"),
        ({"sampled": float("nan")}, "sampled: nan should be above 0, and at most 1"),
        ({"step_tokens": "many"}, "step_tokens: 'many' should be a number of tokens"),
        ({"cluster": "h100x9"}, "unknown cluster h100x9; did you mean h100x8"),
        ({"recompute_granularity": "selectiv"}, "unknown recompute_granularity selectiv; did you mean selective"),
        ({"micro_steps": 2, "token_budget": 64}, "micro_steps: not allowed with argument token_budget"),
        ({"sampled": 0.5, "step_tokens": 64}, "step_tokens: not allowed with argument sampled"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Run(**fields)
    assert str(caught.value).startswith(message)


def test_values_are_as_they_are_meant() -> None:
    run = Run(ranks=np.int64(8), step_tokens="1.5M", overrides=iter([("vocab_size", 5)]))  # type: ignore[arg-type]
    assert (type(run.ranks), run.step_tokens, run.overrides) == (int, 1_500_000, (("vocab_size", 5),))
    assert repr(run) == "Run(overrides=(('vocab_size', 5),), ranks=8, step_tokens=1500000)"
    assert repr(Run()) == "Run()"


def test_a_sweep_has_every_combination_in_order() -> None:
    runs = Run(groups=2).sweep(ranks=[8, 16], slots=[2, "auto"])
    assert [(run.ranks, run.slots, run.groups) for run in runs] == [
        (8, 2, 2), (8, "auto", 2), (16, 2, 2), (16, "auto", 2),
    ]  # fmt: skip
    with pytest.raises(InputError, match="differ in ranks, slots"):
        trimtab.simulate("absent.parquet", Run().sweep(groups=[1, 2]))


def test_every_field_is_an_option_that_is_explained() -> None:
    options = arguments_of(Run)
    assert options.keys() == Run.__dataclass_fields__.keys()
    assert all(each.about and (each.unset or each.default is True) for each in options.values())
    assert {name for pair in EXCLUSIVE for name in pair} <= options.keys()
