"""How results of `trimtab.plan`, `simulate`, `analyze` and `advise` are shown: `repr`, pictures and tidy tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from trimtab.report.imbalance import Imbalance


class Summarised(ABC):
    """A result with a `repr` of a few lines, pictures and a tidy table."""

    @abstractmethod
    def summary(self) -> Sequence[str]:
        """Lines that show the result: what was computed of which trace, then sentences; "" is left out."""

    @property
    @abstractmethod
    def imbalance(self) -> Imbalance:
        """Loads of all ranks in all instances, by plan."""

    def plot(self, kind: str, ax: Any = None) -> Any:
        """Draw max/mean of rank loads. Needs matplotlib, as in `pip install '.[plot]'`.

        Args:
            kind: `layers`, mean over micro-steps by decoder layer, with the range of the middle nine tenths; `heatmap`,
                every instance without a plan; `cdf`, the distribution over instances.
            ax: matplotlib's Axes to draw into; by default those of a new figure of the width of a paper's column.

        Returns:
            The Axes.

        Raises:
            InputError: if there is no such kind, or matplotlib is not installed.
        """
        return self.imbalance.plot(kind, ax)

    def to_pandas(self) -> Any:
        """A `DataFrame` with a row for each instance without and with a plan: `plan` (`static`, or the balancer),
        `step`, `micro_step`, `layer`, `tokens`, `busiest_rank`, `max_over_mean`. Needs pandas, as in
        `pip install '.[plot]'`.
        """
        return self.imbalance.to_pandas()

    def __repr__(self) -> str:
        return "\n  ".join(filter(None, (f"{type(self).__name__}: {self.summary()[0]}", *self.summary()[1:])))
