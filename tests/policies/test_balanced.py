"""The ideal run: `static`'s plan."""

from __future__ import annotations

from hypothesis import given, settings

from helpers.policies import Step, check_policy, random_steps
from trimtab.policies.balanced import Balanced
from trimtab.policies.static import Static


@settings(max_examples=20, deadline=None)
@given(random_steps())
def test_plan_is_that_of_static(step: Step) -> None:
    plans = check_policy(Balanced(), step)
    assert plans["own"].hash == Static().plan(step.view(Static(), equal_terms=False)).hash
    assert Balanced.traits.ideal
    assert not Static.traits.ideal
