"""How results of `trimtab.plan`, `simulate` and `analyze` are shown: `repr`, HTML in notebooks, and pictures."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.api.arguments import check_choice
from trimtab.report.imbalance import FORMATS, Imbalance
from trimtab.report.tables import TableData, notebook_html


@dataclass(frozen=True)
class Summary:
    """Texts of a result.

    Attributes:
        title: what was computed, of which trace.
        sentences: the result.
        tables: its main figures, for notebooks.
        details: lines of the `repr` that repeat figures of the tables.
    """

    title: str
    sentences: Sequence[str]
    tables: Sequence[TableData]
    details: Sequence[str] = ()


class Summarised(ABC):
    """A result with a `repr` of a few lines, a notebook view, and pictures."""

    @abstractmethod
    def summary(self) -> Summary:
        """Texts that show the result."""

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

    def write_figures(self, folder: str | os.PathLike[str], format: str = "pdf") -> list[Path]:
        """Write the pictures of `plot` into a folder, as `trimtab analyze --figures` does. Returns the files.

        Args:
            format: `pdf`, `svg` or `png`.
        """
        check_choice("format", format, FORMATS)
        return self.imbalance.write(folder, format)

    def to_pandas(self) -> Any:
        """A `DataFrame` with a row for each instance without and with a plan: `plan` (`static`, or the balancer),
        `step`, `micro_step`, `layer`, `tokens`, `busiest_rank`, `max_over_mean`. Needs pandas, as in
        `pip install '.[plot]'`.
        """
        return self.imbalance.to_pandas()

    def __repr__(self) -> str:
        shown = self.summary()
        lines = (f"{type(self).__name__}: {shown.title}", *shown.sentences, *shown.details)
        return "\n  ".join(filter(None, lines))

    def _repr_html_(self) -> str:
        shown = self.summary()
        return notebook_html(shown.title, " ".join(filter(None, shown.sentences)), shown.tables)
