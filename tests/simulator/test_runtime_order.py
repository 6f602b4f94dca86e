"""The order of operations of a live layer in the runtime, and in the simulator's timelines of rivals.

Both have the same instance: more rows are for rank 0, and rank 1 helps with one of its experts. What differs, and why
it stays so:

* `feplb` plans in the simulator after the dispatch, while experts that don't move compute, as its paper says. The
  runtime exchanges counts before the dispatch, since receivers need their sizes, and chooses there: weights start
  earlier, and so does the second dispatch, which in both runs beside the experts that don't move.
* `ultraep` waits for weights before the dispatch, as published. `quota` starts them there, but waits for them only
  after the home experts. `llep` starts them there, too; in the simulator all its experts wait for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.rank_pool import on_ranks
from helpers.simulated_steps import Case, free_costs
from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.planner import PlanSettings
from trimtab.policies import POLICIES
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.live.balancer import LivePolicy, choose_moves, choose_quotas
from trimtab.runtime.ranks import lockstep
from trimtab.runtime.transfer import message_rounds, ring
from trimtab.runtime.transfer.message_rounds import Posted
from trimtab.simulator.step import StepSettings
from trimtab.timeline import recorded_operations as rec

TOKENS = 1024
# FEPLB moves expert 1 to rank 1, and nothing else.
COUNTS_RE = np.array([[448, 192, 192, 192]] * 2)
EXCHANGES = {
    lockstep.COUNTS: "planning", lockstep.DISPATCH: "dispatch", lockstep.DISPATCH_WITHOUT_GRADIENTS: "dispatch",
    lockstep.SECOND_DISPATCH: "second dispatch", lockstep.SECOND_COMBINE: "second combine", lockstep.COMBINE: "combine",
}  # fmt: skip


def check_order_in_runtime(policy: LivePolicy, expected: list[str]) -> None:
    """The operations of a forward, on each of two ranks."""
    session = Session(num_experts=4, mode="live", policy=policy, slots_per_rank=2)
    events: list[str] = []

    def apply(*args: Any) -> torch.Tensor:
        events.append("experts")
        return gated_experts()(*args)

    weights = [torch.nn.Parameter(torch.randn(2, 16, 8)), torch.nn.Parameter(torch.randn(2, 8, 8))]
    layer = session.add_layer(weights, apply)
    log = lockstep.Lockstep.log

    def log_exchange(calls: lockstep.Lockstep, kind: int, *args: Any) -> int:
        events.extend([EXCHANGES[kind]] if kind in EXCHANGES else [])
        return log(calls, kind, *args)

    def log_post(*args: Any, **named: Any) -> list[Posted]:
        events.append("weights")
        return message_rounds.post(*args, **named)

    expert_ids = torch.repeat_interleave(torch.arange(4), torch.from_numpy(COUNTS_RE[0]))[:, None]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), session.live_micro_step():
        patch.setattr(lockstep.Lockstep, "log", log_exchange)
        patch.setattr(ring, "post", log_post)
        layer(torch.randn(TOKENS, 8), expert_ids, torch.ones(TOKENS, 1))
    session.close()
    assert events == expected


def order_in_simulator(policy: str) -> list[tuple[str, float, float]]:
    """Operations of rank 1 in a forward, with their start and end, by start."""
    home_E, rows_E, cluster = np.array([0, 0, 1, 1], np.int16), np.array([0, 1, 0, 1]), ClusterSpec(2, 2, 2)
    limits = PlanSettings().limits(cluster)
    if policy == "feplb":
        chosen = choose_moves(COUNTS_RE, home_E, rows_E, np.ones(4, np.bool_), limits)
    else:
        chosen = choose_quotas(COUNTS_RE, home_E, limits)
    schedule = Schedule(np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.zeros(1, np.int32), 2)
    workload = Workload.known(COUNTS_RE[None, None].astype(np.int32))
    plan = StepPlan.from_instances(
        schedule,
        Placement.contiguous(1, 4, 2),
        [np.stack([chosen.experts, chosen.ranks], axis=1)],
        [chosen.quotas_PR],
        mixed_ML=workload.mixed_ML,
        cluster=cluster,
    )
    plan = replace(plan, replica_paths=np.zeros_like(plan.replica_paths))
    times = {"near_weights_s": 1e-5, "near_gradient_s": 1e-5, "hop_row_s": 1e-7}
    costs = free_costs(token_s=1e-6, row_s=1e-6, near_row_s=1e-6, **times)
    traits, settings = POLICIES[policy].traits, StepSettings(recompute=False)
    found = Case(plan, workload, np.array([TOKENS] * 2), costs, cluster, traits, settings).run(show=0).operations
    events = []
    for kind, lane, rank, (start, end) in zip(found.kind_N, found.lane_N, found.rank_N, found.spans_N2, strict=True):
        is_link = lane == rec.NODE_LANE and kind in (rec.DISPATCH, rec.COMBINE)
        if (rank == 1 or kind == rec.PLANNING) and not is_link and kind not in (rec.ATTENTION, rec.HEAD, rec.WAITING):
            events.append((rec.KINDS[kind], float(start), float(end)))
    events.sort(key=lambda event: event[1])
    names = [name for name, _, _ in events]
    return events[: names.index("combine") + 1]


FEPLB = ["planning", "weights", "dispatch", "second dispatch", "experts", "experts", "second combine", "combine"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("feplb", FEPLB), ("quota", ["planning", "weights", "dispatch", "experts", "experts", "combine"])],
)
def test_a_live_layer_has_this_order(policy: LivePolicy, expected: list[str]) -> None:
    on_ranks(check_order_in_runtime, (policy, expected), ranks=2)


def test_feplb_computes_in_the_order_of_the_runtime() -> None:
    events = order_in_simulator("feplb")
    computed = [name for name, _, _ in events if name in ("dispatch", "experts", "combine")]
    assert computed == [name for name in FEPLB if name in ("dispatch", "experts", "combine")]
    by_name = {name: (start, end) for name, start, end in reversed(events)}
    # Planned from the counts of the dispatch, beside the experts that don't move; then weights start.
    assert by_name["planning"][0] == by_name["dispatch"][1] == by_name["experts"][0]
    assert by_name["weights"][0] == by_name["planning"][1]


def test_ultraep_has_the_weights_before_its_dispatch() -> None:
    events = order_in_simulator("ultraep")
    assert list(dict.fromkeys(name for name, _, _ in events)) == [
        "planning", "weights", "dispatch", "experts", "combine",
    ]  # fmt: skip
    ends = {name: end for name, _, end in events}
    assert ends["weights"] <= min(start for name, start, _ in events if name == "dispatch")


def test_llep_starts_weights_with_its_dispatch_as_quota_does() -> None:
    events = order_in_simulator("llep")
    by_name = {name: (start, end) for name, start, end in reversed(events)}
    assert by_name["planning"][1] == by_name["weights"][0] <= by_name["dispatch"][0]
    assert by_name["dispatch"][1] <= by_name["experts"][0] < by_name["combine"][0]
