"""Bounds for plans: linear and integer programs over one instance, solved by HiGHS. Too slow for planning.

Both programs decide `x[e, r]`, the tokens of expert e that a replica on rank r computes, for given homes and slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from trimtab.array_type import Array
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.workload import Workload


def load_bound(counts_E: Array, home_E: Array, num_ranks: int, slots: int, fixed_R: Array | None = None) -> float:
    """Lower bound of the busiest rank's load in an instance, in tokens.

    Solves the linear relaxation: a replica with 30% of its expert's tokens occupies 0.3 of a slot, and tokens are
    divisible.

    Args:
        counts_E: `[E]` integer tokens of every expert.
        home_E: `[E]` integer home ranks.
        slots: most replicas on a rank.
        fixed_R: `[R]` integer rows that each rank computes in any case (rows of unknown route, estimated at their
            homes); none by default.
    """
    home_loads = np.bincount(home_E, counts_E, num_ranks) + (0 if fixed_R is None else fixed_R)
    if slots == 0 or num_ranks == 1 or not counts_E.any():
        return float(home_loads.max())
    pairs = _Pairs.of(counts_E, home_E, num_ranks, np.flatnonzero(counts_E))
    width = len(pairs.experts)
    program = _Program(width + 1)
    program.cost[width] = 1.0
    program.upper[:width] = counts_E[pairs.experts]
    for r in range(num_ranks):
        arriving, columns, values = pairs.changes(r)
        program.at_most(np.append(columns, width), np.append(values, -1.0), -home_loads[r])
        program.at_most(arriving, 1.0 / counts_E[pairs.experts[arriving]], slots)
    for expert in np.unique(pairs.experts):
        mine = np.flatnonzero(pairs.experts == expert)
        program.at_most(mine, np.ones(len(mine)), counts_E[expert])
    return program.solve()


def gap_to_bound(plan: StepPlan, workload: Workload, sampled: int) -> float:
    """Busiest rank over `load_bound` for the plan's homes and slots, minus 1: the mean of evenly spread instances."""
    loads_IR = plan.rank_loads(workload).reshape(-1, plan.num_ranks)
    expected_MLR = workload.expected_loads(plan.home)
    gaps = []
    for instance in evenly_spread(len(loads_IR), sampled):
        micro_step, layer = divmod(instance, plan.num_layers)
        counts_E = workload.token_counts_MLRE[micro_step, layer].sum(axis=0, dtype=np.int64)
        fixed_R = expected_MLR[micro_step, layer]
        bound = load_bound(counts_E, plan.home[layer], plan.num_ranks, plan.slots_per_rank, fixed_R)
        # An instance without rows has no gap.
        gaps.append(max(loads_IR[instance].max(), 1) / max(bound, 1.0) - 1)
    return float(np.mean(gaps))


def evenly_spread(count: int, sampled: int) -> list[int]:
    """Up to `sampled` different indices below `count`, evenly spread."""
    return sorted({int(index) for index in np.linspace(0, count - 1, min(sampled, count)).round()})


def fewest_replicas(
    counts_E: Array,
    home_E: Array,
    num_ranks: int,
    slots: int,
    threshold_load: int,
    smallest_share: int = 1,
    *,
    candidates: int = 5,
    time_limit_s: float = 60.0,
) -> int | None:
    """Smallest number of replicas with which no rank's load exceeds `threshold_load`.

    None if there is no such number or time runs out.

    Args:
        counts_E, home_E, slots: as in `load_bound`.
        threshold_load: load that no rank may exceed, tokens.
        smallest_share: fewest tokens of a replica.
        candidates: only this many of a rank's largest experts may be replicated. The result is exact
            if an optimal solution replicates at most `candidates` experts of each home rank, since a replica of a
            smaller expert can be exchanged for one of a larger expert.
    """
    home_loads = np.bincount(home_E, counts_E, num_ranks)
    by_size = np.argsort(-np.asarray(counts_E), kind="stable")
    largest = [by_size[home_E[by_size] == r][:candidates] for r in range(num_ranks)]
    chosen = np.concatenate(largest)
    pairs = _Pairs.of(counts_E, home_E, num_ranks, chosen[counts_E[chosen] >= smallest_share])
    width = len(pairs.experts)
    program = _Program(2 * width)
    is_replica = width + np.arange(width)
    program.cost[is_replica] = 1.0
    program.upper[:width] = counts_E[pairs.experts]
    program.upper[is_replica] = 1.0
    program.integer[is_replica] = True
    for r in range(num_ranks):
        arriving, columns, values = pairs.changes(r)
        program.at_most(columns, values, threshold_load - home_loads[r])
        program.at_most(is_replica[arriving], np.ones(len(arriving)), slots)
    for expert in np.unique(pairs.experts):
        mine = np.flatnonzero(pairs.experts == expert)
        program.at_most(mine, np.ones(len(mine)), counts_E[expert])
    for i in range(width):
        # x = 0 without a replica, else smallest_share <= x <= largest_replica.
        largest_replica = min(int(counts_E[pairs.experts[i]]), max(smallest_share, threshold_load))
        program.at_most(np.array([i, width + i]), np.array([1.0, -largest_replica]), 0.0)
        program.at_most(np.array([i, width + i]), np.array([-1.0, smallest_share]), 0.0)
    try:
        return round(program.solve(time_limit_s))
    except RuntimeError:
        return None


@dataclass(frozen=True, eq=False)
class _Pairs:
    """All allowed replicas: expert, rank and home rank, one array each."""

    experts: Array
    ranks: Array
    homes: Array

    @classmethod
    def of(cls, counts_E: Array, home_E: Array, num_ranks: int, experts: Array) -> _Pairs:
        expert_N, rank_N = np.repeat(experts, num_ranks), np.tile(np.arange(num_ranks), len(experts))
        away = home_E[expert_N] != rank_N
        return cls(expert_N[away], rank_N[away], home_E[expert_N[away]].astype(np.int64))

    def changes(self, rank: int) -> tuple[Array, Array, Array]:
        """Returns the pairs that add tokens to the rank, all pairs that change its load, and their coefficients.

        A coefficient is 1.0 if tokens are added, -1.0 if removed.
        """
        arriving, leaving = np.flatnonzero(self.ranks == rank), np.flatnonzero(self.homes == rank)
        values = np.concatenate([np.ones(len(arriving)), -np.ones(len(leaving))])
        return arriving, np.concatenate([arriving, leaving]), values


class _Program:
    """min cost . x with 0 <= x <= upper and rows of the form values . x[columns] <= limit."""

    def __init__(self, width: int) -> None:
        self.cost = np.zeros(width)
        self.upper = np.full(width, highspy.kHighsInf)
        self.integer = np.zeros(width, bool)
        self._columns: list[Array] = []
        self._values: list[Array] = []
        self._limits: list[float] = []

    def at_most(self, columns: Array, values: Array, limit: float) -> None:
        self._columns.append(columns)
        self._values.append(values)
        self._limits.append(limit)

    def solve(self, time_limit_s: float = float("inf")) -> float:
        """The least cost. Raises RuntimeError if the program has no optimum or time runs out."""
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self._limits)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = self.cost, np.zeros(len(self.cost)), self.upper
        lp.row_lower_ = np.full(len(self._limits), -highspy.kHighsInf)
        lp.row_upper_ = np.array(self._limits, float)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0] + [len(columns) for columns in self._columns]).astype(np.int32)
        lp.a_matrix_.index_ = np.concatenate(self._columns).astype(np.int32)
        lp.a_matrix_.value_ = np.concatenate(self._values).astype(float)
        if self.integer.any():
            kinds = highspy.HighsVarType
            lp.integrality_ = [kinds.kInteger if integer else kinds.kContinuous for integer in self.integer]
        solver = highspy.Highs()
        solver.silent()
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", time_limit_s)
        solver.passModel(lp)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(f"HiGHS found no optimum: {solver.modelStatusToString(solver.getModelStatus())}")
        return float(solver.getInfo().objective_function_value)
