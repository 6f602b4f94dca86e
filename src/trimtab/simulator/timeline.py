"""A step on the timeline: all micro-steps of all groups, in rounds, with their planning, gradients and optimizer steps.

Recompute runs all micro-steps forward. Then each mini-batch runs its micro-steps forward and backward, gradients are
returned to the homes, and the optimizer steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.simulator.pipeline import PassTimes
from trimtab.timeline import MIGRATION, OPTIMIZER, PLANNING, TRANSFERS
from trimtab.timeline.clocks import Clocks
from trimtab.timeline.layer_passes import Run, run_pass
from trimtab.timeline.recorded_operations import COLUMNS, Operations
from trimtab.timeline.replica_transfers import returned_by


class Rounds(NamedTuple):
    """The micro-step of each of G groups in each of Q rounds.

    Attributes:
        order_QG: `[Q, G]` int64, -1 for none.
        mini_batch_Q: `[Q]` int64, ascending.
        closes_QG: `[Q, G]` bool, true for the group's last of its mini-batch.
        ready_Q: `[Q]` float64 seconds, ascending, when replicas and split of the micro-steps are planned.
    """

    order_QG: Array
    mini_batch_Q: Array
    closes_QG: Array
    ready_Q: Array


def run_step(
    run: Run,
    rounds: Rounds,
    costs: OperationCosts,
    *,
    refresh_s: float,
    recompute: bool,
    checkpointing: bool,
    shown_round: int,
    memory: int,
    times: PassTimes | None = None,
) -> Operations:
    """Simulate a step on clocks at time 0.

    Args:
        refresh_s: seconds to refresh the mirrors after an optimizer step.
        recompute: true: all micro-steps first run forward only.
        checkpointing: true: every micro-step runs forward again before its backward, with the plan that it has.
        shown_round: whose update is recorded; -1 for none.
        memory: most operations of a round.
        times: gets the seconds of all passes; phases end when log-probabilities are recomputed, and with mini-batches.

    Returns:
        The operations of the shown round.
    """
    clocks, transfers = run.clocks, run.transfers
    time_D, parts_DP = clocks.time_D, clocks.parts_DP
    rows_NC, origin_s, lost_3D = clocks.rows_NC, 0.0, np.zeros((3, len(time_D)))
    last = len(rounds.mini_batch_Q) - 1

    def one_pass(run: Run, q: int, backward: bool, *, again: bool = False) -> None:
        """`again`: activations are computed again, which counts as backward."""
        run_pass(run, rounds.order_QG[q], rounds.closes_QG[q], backward)
        if times is not None:
            for g in np.flatnonzero(rounds.order_QG[q] >= 0).tolist():
                spent_X = run.spent_GX[g, :-1].copy()
                times.phases[-1].append((g, int(rounds.order_QG[q, g]), backward or again, spent_X))

    if times is not None:
        times.phases.append([])
    for q in range(last + 1 if recompute else 0):
        _wait_for_plan(clocks, rounds.order_QG[q], rounds.ready_Q[q])
        one_pass(run, q, False)
    for q, mini_batch in enumerate(rounds.mini_batch_Q):
        if times is not None and (q == 0 or mini_batch != rounds.mini_batch_Q[q - 1]):
            times.phases.append([])
        if q > 0 and mini_batch != rounds.mini_batch_Q[q - 1]:
            transfers.renew_weights(time_D.min())
        _wait_for_plan(clocks, rounds.order_QG[q], rounds.ready_Q[q])
        this = run
        if q == shown_round:
            rows_NC, origin_s = np.zeros((memory, COLUMNS)), float(time_D.min())
            lost_3D = transfers.lost()
            this = run._replace(clocks=clocks._replace(rows_NC=rows_NC))
        one_pass(this, q, False)
        if checkpointing:
            planned = this._replace(recipe=this.recipe._replace(planning_s=0.0))
            one_pass(planned, q, False, again=True)
        backward_start = time_D.max()
        one_pass(this, q, True)
        if q < last and mini_batch == rounds.mini_batch_Q[q + 1]:
            continue
        returned_D = returned_by(transfers).reshape(-1)
        parts_DP[:, TRANSFERS] += np.maximum(returned_D - time_D, 0.0)
        np.maximum(time_D, returned_D, out=time_D)
        parts_DP[:] = parts_DP[time_D.argmax()]
        time_D[:] = time_D.max()
        # Sums of dense gradients overlap with the last backward.
        optimizer_s = max(0.0, costs.reduce_s - (time_D[0] - backward_start)) + costs.optimizer_s
        moving_s = refresh_s if q < last else 0.0
        time_D += optimizer_s + moving_s
        parts_DP[:, OPTIMIZER] += optimizer_s
        parts_DP[:, MIGRATION] += moving_s
    return Operations.from_rows(rows_NC[: clocks.num_rows[0]], origin_s, lost_3D, costs)


def _wait_for_plan(clocks: Clocks, order_G: Array, ready_s: float) -> None:
    """The ranks of groups with a micro-step wait until it is planned."""
    time_D, parts_DP = clocks.time_D, clocks.parts_DP
    has_one_D = np.repeat(order_G >= 0, len(time_D) // len(order_G))
    wait_D = np.where(has_one_D, np.maximum(ready_s - time_D, 0.0), 0.0)
    time_D += wait_D
    parts_DP[:, PLANNING] += wait_D
