"""How results of `trimtab.plan`, `simulate` and `analyze` are shown: `repr`, and HTML in notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.report.notebook import notebook_html
from trimtab.report.table_data import TableData


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
    """A result with a `repr` of a few lines and a notebook view."""

    @abstractmethod
    def summary(self) -> Summary:
        """Texts that show the result."""

    def __repr__(self) -> str:
        shown = self.summary()
        lines = (f"{type(self).__name__}: {shown.title}", *shown.sentences, *shown.details)
        return "\n  ".join(filter(None, lines))

    def _repr_html_(self) -> str:
        shown = self.summary()
        return notebook_html(shown.title, " ".join(filter(None, shown.sentences)), shown.tables)
