"""Properties of every simulated step, for any plan, costs and traits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.simulated_steps import GRADIENTS, MOVES, ROWS, WEIGHTS, Case, cases
from trimtab import Workload

LITTLE = 1 + 1e-12
TRANSFERS = (*WEIGHTS, *GRADIENTS, *MOVES)


def alone(case: Case) -> Case:
    """With links on which all-to-alls don't get in the way of transfers.

    Where they do, finishing something sooner can make a step longer: an all-to-all that starts sooner may then meet a
    transfer that would have been through before.
    """
    return case.but(near_spare=1.0, far_spare=1.0)


@settings(max_examples=100)
@given(cases(), st.data())
def test_faster_links_and_more_room_never_make_a_step_slower(case: Case, data: st.DataObject) -> None:
    slow = alone(case)
    names = data.draw(st.sets(st.sampled_from([*TRANSFERS, *ROWS, "dispatch_s"]), min_size=1))
    # Not 0, which stands for no link.
    factor = data.draw(st.sampled_from([1e-6, 0.5, 0.9]))
    fast = slow.but(**{name: factor * getattr(slow.costs, name) for name in names})
    assert fast.run().step_time_s <= slow.run().step_time_s * LITTLE
    deeper = slow.but(ring_layers=slow.settings.ring_layers + 1)
    assert deeper.run().step_time_s <= slow.run().step_time_s * LITTLE
    if slow.traits.copies == "shared slots":
        assert slow.but(copies="unbounded").run().step_time_s <= slow.run().step_time_s * LITTLE


@settings(max_examples=60)
@given(cases())
def test_no_plan_beats_even_rows(case: Case) -> None:
    """Where rows are all that experts take time for, and come at no cost.

    Else one can: a copy more has its own fixed cost and its own last tile, and rows that stay on their rank need no
    all-to-all, while the ideal spreads all rows over all ranks.
    """
    counts_MLRE = case.workload.token_counts_MLRE
    # Rows that come out even for every expert.
    even = replace(case, workload=Workload.known(counts_MLRE * counts_MLRE.shape[3]))
    even = replace(even, plan=replace(case.plan, quota_tokens=case.plan.quota_tokens * counts_MLRE.shape[3]))
    # Shared experts that are computed as rows have another backward, and level out what the ideal leaves uneven.
    even = alone(even).free("copy_s", "weights_s", *ROWS).but(tile_rows=1)
    ideal = even.but(ideal=True, copies="none", known_at="past", hops=1)
    assert ideal.run().step_time_s <= even.run().step_time_s * LITTLE
