"""Linear programs that tests compare the planner with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import highspy
import numpy as np


class LinearProgram:
    """The least cost of variables of 0 or more under bounds on weighted sums of them.

    Args:
        costs: of one unit of each variable.
    """

    def __init__(self, costs: Iterable[float]) -> None:
        self._solver = highspy.Highs()
        self._solver.silent()
        self._solver.setOptionValue("threads", 1)
        for cost in costs:
            self._solver.addCol(float(cost), 0.0, highspy.kHighsInf, 0, np.empty(0, np.int32), np.empty(0))

    def bound(self, weights: Mapping[int, float], *, least: float = -highspy.kHighsInf, most: float) -> None:
        """Bound the sum of some variables, each with its weight."""
        columns, values = np.array(list(weights), np.int32), np.array(list(weights.values()), np.float64)
        self._solver.addRow(float(least), float(most), len(weights), columns, values)

    def least_cost(self) -> float:
        self._solver.run()
        assert self._solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return float(self._solver.getInfo().objective_function_value)
