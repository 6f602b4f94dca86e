"""One observed step: its counts, what imbalance costs, and what each way to balance it would save."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from trimtab.analysis.balance import balance, home_loads, lost_part
from trimtab.analysis.fixed_placements import LEAST_LOST, SLOTS, placed_loads
from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, ModelSpec, StepCosts
from trimtab.cluster.operations import OperationCosts
from trimtab.planner import Placement, Schedule, StepPlan, Workload
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.planner import plan_schedule
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.policies.static import Balanced, Static
from trimtab.simulator.step import imbalance_cost, simulate_step
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts

# Counts of a step; sequences beyond are not counted.
COUNT_BYTES = 12 << 20
# A last micro-step with fewer tokens than this part of the others' mean is left out of the figures.
LEAST_FILLED = 0.5
# Steps whose loads homes are chosen by.
PAST_STEPS = 8


class CountedStep(NamedTuple):
    """The counts of a step.

    Attributes:
        workload: of one expert-parallel group.
        schedule: of its sequences.
        lengths: `[S]` tokens of each sequence.
    """

    workload: Workload
    schedule: Schedule
    lengths: Array


class StepCounts:
    """Packs sequences into micro-steps in the order of their arrival, and counts their rows.

    A sequence goes to the rank with the fewest tokens; where it does not fit there, the next micro-step begins.

    Args:
        ranks: of the expert-parallel group.
        token_budget: most tokens of a rank in a micro-step; a longer sequence is alone on its rank.
        empty: a trace without sequences, of the model.
    """

    def __init__(self, ranks: int, token_budget: int, empty: RoutingTrace) -> None:
        self._ranks, self._budget, self._empty = ranks, token_budget, empty
        self._counts_MRLE: list[Array] = []
        self._tokens_MR: list[Array] = []
        self._places: list[tuple[int, int]] = []
        self._lengths: list[int] = []
        micro_step_bytes = ranks * empty.num_layers * empty.num_experts * np.dtype(np.int32).itemsize
        self._most_micro_steps = max(1, COUNT_BYTES // micro_step_bytes)
        self._is_full = False
        self.left_out = 0

    def add(self, trace: RoutingTrace) -> None:
        """Count sequences; those beyond `COUNT_BYTES` are added to `left_out`."""
        places = [self._place(length) for length in trace.sequence_lengths.tolist()]
        counted = [place for place in places if place is not None]
        self.left_out += len(places) - len(counted)
        if not counted:
            return
        groups = {place: number for number, place in enumerate(dict.fromkeys(counted))}
        # Sequences are taken until there is no more room, so those counted come first.
        counts_GLE = count_experts(
            trace.part(0, len(counted)), np.array([groups[each] for each in counted]), len(groups)
        )
        for (micro_step, rank), number in groups.items():
            self._counts_MRLE[micro_step][rank] += counts_GLE[number]
        self._places += counted
        self._lengths += trace.sequence_lengths[: len(counted)].tolist()

    def finish(self) -> CountedStep | None:
        """The counts of all sequences that were added; None if there is no token."""
        tokens_M = np.array([tokens_R.sum() for tokens_R in self._tokens_MR])
        if not tokens_M.any():
            return None
        count = len(tokens_M)
        if count > 1 and tokens_M[-1] < LEAST_FILLED * tokens_M[:-1].mean():
            count -= 1
        counts_MLRE = np.ascontiguousarray(np.stack(self._counts_MRLE[:count]).swapaxes(1, 2))
        rows_MLR = np.array(self._tokens_MR[:count])[:, None] * self._empty.top_k
        unknown_MLR = (rows_MLR - counts_MLRE.sum(axis=3)).astype(np.int32)
        places = np.array(self._places, np.int32)
        chosen = places[:, 0] < count
        micro_step_S, rank_S = places[chosen].T
        schedule = Schedule(micro_step_S, rank_S, np.zeros(count, np.int32), self._ranks)
        return CountedStep(Workload(counts_MLRE, unknown_MLR), schedule, np.array(self._lengths)[chosen])

    def _place(self, length: int) -> tuple[int, int] | None:
        """The micro-step and rank of the next sequence; None if there is no room for its counts."""
        if self._is_full:
            return None
        if self._tokens_MR:
            rank = int(self._tokens_MR[-1].argmin())
            tokens = self._tokens_MR[-1][rank]
            if not tokens or tokens + length <= self._budget:
                self._tokens_MR[-1][rank] += length
                return len(self._tokens_MR) - 1, rank
        if len(self._tokens_MR) == self._most_micro_steps:
            self._is_full = True
            return None
        self._counts_MRLE.append(np.zeros((self._ranks, self._empty.num_layers, self._empty.num_experts), np.int32))
        self._tokens_MR.append(np.zeros(self._ranks, np.int64))
        self._tokens_MR[-1][0] = length
        return len(self._tokens_MR) - 1, 0


class StepFigures:
    """Computes the figures of one step after another.

    Args:
        cluster: of one expert-parallel group.
        model: for figures of the whole step's time; None: they are left out.
    """

    def __init__(self, cluster: ClusterSpec, model: ModelSpec | None) -> None:
        self._cluster, self._model = cluster, model
        self._past: deque[Array] = deque(maxlen=PAST_STEPS)

    def of(self, step: CountedStep) -> dict[str, float]:
        """The figures of a step; `docs/observe.md` explains each.

        Those of `renumber` and `eplb` need the step before; those of the step's time need a model.
        """
        workload, ranks = step.workload, self._cluster.ranks
        counts_MLE = workload.token_counts_MLRE.sum(axis=2, dtype=np.int64)
        loads_MLR = home_loads(counts_MLE, ranks)
        even = balance(loads_MLR)
        found = {
            "idle_share": even.lost,
            "max_vio": even.max_vio.mean,
            "max_vio_worst": even.max_vio.worst,
            "peak_rows": float(loads_MLR.max()),
            "tokens_per_micro_step": float(step.lengths.sum()) / workload.num_micro_steps,
            "unknown_share": float(workload.unknown_MLR.sum()) / max(1, workload.num_rows),
        }
        homes = Placement.contiguous(workload.num_layers, workload.num_experts, ranks)
        recovered = {}
        if self._past:
            for name, slots in (("renumber", 0), ("eplb", SLOTS)):
                recovered[name] = _recovered(loads_MLR, placed_loads(counts_MLE, self._past[-1], ranks, slots))
        costs = StepCosts.of(self._cluster, self._model, moe_layers=workload.num_layers) if self._model else None
        planned = plan_schedule(
            StepLoads.of_workloads([workload], step.schedule, step.lengths),
            step.schedule,
            homes,
            self._cluster,
            costs=costs,
            past_PLE=np.stack(self._past) if self._past else None,
        )
        # Both with the expected rows of unknown routes, which no plan can move.
        recovered["plan"] = _recovered(workload.home_loads(homes.home), planned.plans[0].rank_loads(workload))
        self._past.append(counts_MLE.sum(axis=0))
        found |= {f"{name}_recovers": part for name, part in recovered.items()}
        if self._model:
            static = StepPlan.from_replicas(
                step.schedule, homes, ReplicaTable.none(workload.mixed_ML.size), mixed_ML=workload.mixed_ML,
                cluster=self._cluster,
            )  # fmt: skip
            operations = OperationCosts.of(self._cluster, self._model, moe_layers=workload.num_layers)
            static_s, even_s = (
                simulate_step(static, workload, step.lengths, operations, self._cluster, policy.traits).step_time_s
                for policy in (Static, Balanced)
            )
            lost_share = imbalance_cost(static_s, even_s)
            found["lost_share"] = lost_share
            found |= {f"{name}_gain": part * lost_share for name, part in recovered.items()}
            # With transfers, moves and planning, which the product leaves out.
            found["plan_gain"] = 1 - planned.predicted_s / planned.nothing_s
        return found


def _recovered(before_MLR: Array, after_MLR: Array) -> float:
    """The part of idle expert time that is gone under other loads; 0 without idle time."""
    if lost_part(before_MLR) <= LEAST_LOST:
        return 0.0
    longest = before_MLR.max(axis=-1).sum()
    return float((longest - after_MLR.max(axis=-1).sum()) / (longest - before_MLR.mean(axis=-1).sum()))
