"""`echo`: after gating, the part of hot experts that exceeds a rank's mean moves to copies on ranks below it.

Source: ECHO, elastic cloning for hot experts (Megatron-LM pull request 2368; its planner is also the `echo` planner of
kunlunl/Megatron-MoeScheduler); our reimplementation. A rank fills up to the mean with its experts in ascending order of
tokens; what exceeds the mean spills over. Ranks below the mean have the difference as capacity. With one slot a rank,
an approximate bin packing follows: ranks in descending order of capacity each take the spill of an expert of the
largest size class, of eight, and the rest of it goes to the end of its new class. With several slots, experts in
descending order of spill and ranks in descending order of capacity are laid along one line, and a rank keeps the
largest of the overlaps; others stay at home. Every source sends the same fraction of its tokens to a copy, rounded
down; rounded-off tokens are filled up source by source. Copies may be on any rank of the group. It is made for a static
number of copies in captured CUDA graphs. We know of no published planning
time; UltraEP's is charged.

Not specified by the source, and our choices:

* experts or ranks of equal size: the lower index is first; the source's sorts are unstable;
* fractions of tokens: in integers, where the source uses float32;
* when weights move: as soon as the plan is made, while tokens are dispatched; slots are shared by all layers.

On equal terms it is the same with the given slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.planning_time import ULTRAEP_SIZES, PlanningTime
from trimtab.policies.policy import Traits, View

_CLASSES = 8


@dataclass(frozen=True)
class Echo:
    """Spill above the mean, moved to copies on ranks below it."""

    traits: ClassVar[Traits] = Traits(
        known_at="layer", planning=PlanningTime.published(*ULTRAEP_SIZES, source="UltraEP's")
    )

    def plan(self, view: View) -> StepPlan:
        cluster = view.cluster

        def plan_one(_: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            load = InstanceLoad.of(counts_RE.sum(axis=0), home_E, cluster, within_node=False)
            copies_P3 = clone_hot_experts(load)
            return copies_P3[:, :2], split_in_proportion(counts_RE, copies_P3)

        return view.plan_instances(plan_one, placement=view.placement, slots=cluster.slots_per_rank)


def clone_hot_experts(load: InstanceLoad) -> Array:
    """Copies of one instance, `[P, 3]` int64 expert, rank and tokens, in the order of experts and ranks."""
    mean = load.loads_R.sum() // len(load.loads_R)
    spill_E = _spill(load, mean)
    capacity_R = np.maximum(mean - load.loads_R, 0)
    experts_E = np.argsort(-spill_E, kind="stable")
    ranks_R = np.argsort(-capacity_R, kind="stable")
    copies_P3 = np.zeros((len(ranks_R) * load.slots, 3), np.int64)
    if load.slots == 1:
        count = _pack_classes(spill_E, capacity_R, experts_E, ranks_R, mean, copies_P3)
    else:
        count = _lay_along_a_line(spill_E, capacity_R, experts_E, ranks_R, load.slots, copies_P3)
    return copies_P3[:count][np.lexsort((copies_P3[:count, 1], copies_P3[:count, 0]))]


def _spill(load: InstanceLoad, mean: int) -> Array:
    """`[E]` int64, tokens of each expert above the mean of its rank, if small experts are counted first."""
    ascending_E = np.lexsort((load.counts_E, load.home_E))
    counts_E, home_E = load.counts_E[ascending_E], load.home_E[ascending_E]
    filled_E = np.cumsum(counts_E) - (np.cumsum(load.loads_R) - load.loads_R)[home_E]
    spill_E = np.empty_like(counts_E)
    spill_E[ascending_E] = np.maximum(filled_E - mean, 0) - np.maximum(filled_E - counts_E - mean, 0)
    return spill_E


@kernel
def _pack_classes(spill_E, capacity_R, experts_E, ranks_R, mean, copies_P3):  # type: ignore[no-untyped-def]
    """One copy a rank, of the first expert in the largest class of sizes. Returns the number of copies.

    Args:
        spill_E, capacity_R: `[E]`, `[R]` int64 tokens. `spill_E` is updated.
        experts_E, ranks_R: descending by these.
        mean: tokens of a rank; spills of as many and more are the first class.
        copies_P3: `[R, 3]` int64, filled with expert, rank and tokens.
    """
    width = max(mean // (_CLASSES - 1), 1)
    queue_CQ = np.zeros((_CLASSES, len(experts_E) + len(ranks_R)), np.int64)
    begin_C, end_C = np.zeros(_CLASSES, np.int64), np.zeros(_CLASSES, np.int64)
    for e in experts_E:
        if spill_E[e] > 0:
            c = 0 if spill_E[e] >= mean else min((mean - spill_E[e]) // width + 1, _CLASSES - 1)
            queue_CQ[c, end_C[c]] = e
            end_C[c] += 1
    largest, count = 0, 0
    for rank in ranks_R:
        while largest < _CLASSES and begin_C[largest] == end_C[largest]:
            largest += 1
        if capacity_R[rank] == 0 or largest == _CLASSES:
            break
        expert = queue_CQ[largest, begin_C[largest]]
        begin_C[largest] += 1
        tokens = min(spill_E[expert], capacity_R[rank])
        copies_P3[count, 0], copies_P3[count, 1], copies_P3[count, 2] = expert, rank, tokens
        count += 1
        spill_E[expert] -= tokens
        if spill_E[expert] > 0:
            c = 0 if spill_E[expert] >= mean else min((mean - spill_E[expert]) // width + 1, _CLASSES - 1)
            queue_CQ[c, end_C[c]] = expert
            end_C[c] += 1
    return count


@kernel
def _lay_along_a_line(spill_E, capacity_R, experts_E, ranks_R, slots, copies_P3):  # type: ignore[no-untyped-def]
    """Overlaps of spills with capacities, the `slots` largest of every rank. Returns the number of copies.

    Args:
        spill_E, capacity_R: `[E]`, `[R]` int64 tokens.
        experts_E, ranks_R: descending by these.
        copies_P3: `[R * slots, 3]` int64, filled with expert, rank and tokens.
    """
    count, i, left = 0, 0, np.int64(0)
    overlap_E = np.zeros(len(experts_E), np.int64)
    for rank in ranks_R:
        room, begin = capacity_R[rank], i
        while room > 0 and i < len(experts_E):
            if left == 0:
                left = spill_E[experts_E[i]]
            tokens = min(left, room)
            overlap_E[i] = tokens
            room -= tokens
            left -= tokens
            if left == 0:
                i += 1
        end = min(i + 1, len(experts_E))
        for _ in range(slots):
            best = begin
            for j in range(begin, end):
                if overlap_E[j] > overlap_E[best]:
                    best = j
            if begin == end or overlap_E[best] == 0:
                break
            copies_P3[count, 0], copies_P3[count, 1], copies_P3[count, 2] = experts_E[best], rank, overlap_E[best]
            count += 1
            overlap_E[best] = 0
        for j in range(begin, end):
            overlap_E[j] = 0
    return count


def split_in_proportion(counts_RE: Array, copies_P3: Array) -> Array:
    """Quotas `[P, R]` int64: every source's share of a copy's tokens, rounded down, then the rest source by source.

    Args:
        counts_RE: `[R, E]` int64 tokens by source and expert.
        copies_P3: `[P, 3]` int64 expert, rank and tokens, by expert.
    """
    experts_P, _, tokens_P = copies_P3.T
    counts_PR = counts_RE.T[experts_P]
    quotas_PR = counts_PR * tokens_P[:, None] // np.maximum(counts_PR.sum(axis=1), 1)[:, None]
    left_RE = counts_RE.copy()
    np.subtract.at(left_RE.T, experts_P, quotas_PR)
    source_end_PR = left_RE.cumsum(axis=0).T[experts_P]
    source_first_PR = source_end_PR - left_RE.T[experts_P]
    missing_P = tokens_P - quotas_PR.sum(axis=1)
    copy_end_P = missing_P.cumsum()
    is_first_P = np.diff(experts_P, prepend=-1) != 0
    copy_end_P -= np.repeat((copy_end_P - missing_P)[is_first_P], np.diff(np.flatnonzero([*is_first_P, True])))
    copy_first_P = copy_end_P - missing_P
    overlap_PR = np.minimum(source_end_PR, copy_end_P[:, None]) - np.maximum(source_first_PR, copy_first_P[:, None])
    return quotas_PR + np.maximum(overlap_PR, 0)
