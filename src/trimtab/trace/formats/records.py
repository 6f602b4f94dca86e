"""What readers of formats take and yield: `ImportOptions`, and `Record`s and `Dropped` data before conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.formats.dump_fields import as_array, damaged_values, integers

ROWS_AT = ("start", "end")


@dataclass(frozen=True)
class ImportOptions:
    """Model facts supplied by the caller; None if unknown.

    Attributes:
        num_experts: E.
        num_layers: layers in the dump, whether they have experts or not.
        top_k: K.
        moe_layers: the decoder layers that have experts, ascending.
        model: the model's name, for people.
        step: of records without one, or 0.
        domain: of records without one.
        step_from: a regular expression with one group, the step of records without one, searched in their file's path;
            "" for none.
        sampled: the part of each step's sequences that the dump holds, above 0 to 1.
        optional: files that are left out, and noted, if they look like no format.
        rows_at: where rows for a part of a sequence are if the dump does not tell: at its "start" or its "end"; None:
            they are refused.
        drop_repeats: take routes of rows as unknown that repeat the row before in all layers, or are 0 to K-1.
        merge_turns: of sequences that are the beginning of a longer one keep the longest alone; of files.
    """

    num_experts: int | None = None
    num_layers: int | None = None
    top_k: int | None = None
    moe_layers: tuple[int, ...] | None = None
    model: str = ""
    step: int = 0
    domain: str = ""
    step_from: str = ""
    sampled: float = 1.0
    optional: frozenset[Path] = frozenset()
    rows_at: Literal["start", "end"] | None = None
    drop_repeats: bool = False
    merge_turns: bool = False

    def with_default(self, other: ImportOptions) -> ImportOptions:
        """These facts, and those of `other` where these are unknown."""
        return ImportOptions(*(getattr(self, name) or getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class Record:
    """One sequence as it was recorded: where its ids are, and what is known of it. Ids are read when they are used.

    Attributes:
        source: what holds the ids: an array or tensor of this sequence or of a batch, or nested lists.
        where: the place in the source, for messages: "line 3, choice 1".
        first: number of tokens before the first row, whose routes are unknown.
        placed: False if rows that are fewer than the tokens may begin elsewhere (`ImportOptions.rows_at`).
        num_tokens: tokens of the sequence, the last of which is never fed to the model; None for `first + t + 1`.
            Rows from `num_tokens - 1` on are dropped, missing rows are unknown routes.
        prompt_length: tokens of the prompt; 0 if unknown.
        tokens: token ids in one or more parts; not used if they are not `num_tokens` together.
        sequence_hash: `hash_tokens` of the token ids, if the source has only the hash; 0 if unknown.
        prompt_hash: the same of the prompt's token ids.
        step: the RL step; 0 if unknown.
        domain: kind of prompt; "" if unknown.
        model: the model's name; "" if unknown.
        layers: the decoder layer of each layer of `ids`, if known.
        place: index of this sequence in the source's array; None for all of it.
        rows: those of the sequence among the rows at `place`; the others are padding. None for all.
        padding: rows of padding; None for all that are not among `rows`.
        recorded: from the sequence's rows to those that hold a record; what it leaves out at the end is unknown.
        read: from the source to an array of ids, any integer dtype.
    """

    source: Any
    where: str
    first: int = 0
    placed: bool = True
    num_tokens: int | None = None
    prompt_length: int = 0
    tokens: tuple[Any, ...] = ()
    sequence_hash: int = 0
    prompt_hash: int = 0
    step: int = 0
    domain: str = ""
    model: str = ""
    layers: tuple[int, ...] | None = None
    place: Any = None
    rows: slice | Array | None = None
    padding: int | None = None
    recorded: Callable[[Array], Array] = lambda ids: ids
    read: Callable[[Any], Array] = as_array

    @property
    def block(self) -> Array:
        """The rows at `place`, padding included."""
        array = self.read(self.source)
        return array if self.place is None else array[self.place]

    def chosen(self, block: Array) -> Array:
        """Those of the rows that are of the sequence: `[t, layers, K]`, a row for each consecutive token."""
        return self.recorded(block if self.rows is None else block[self.rows])

    @property
    def ids(self) -> Array:
        """`[t, layers, K]` of the sequence."""
        return self.chosen(self.block)

    @property
    def token_ids(self) -> Array | None:
        """`[num_tokens]` int64; None if unknown."""
        if not self.tokens or (self.num_tokens is not None and sum(map(len, self.tokens)) != self.num_tokens):
            return None
        with damaged_values():
            return np.concatenate([integers(part, "token ids", 1).astype(np.int64) for part in self.tokens])


@dataclass(frozen=True)
class Dropped:
    """Data of the source that is not imported: `count` of a kind, such as "padding rows"."""

    kind: str
    count: int = 1


def require_records(items: Iterable[Record | Dropped], message: str) -> Iterator[Record | Dropped]:
    """Yields the same items. Raises InputError with this message, at the end, if there is no record among them."""
    found = False
    for item in items:
        found = found or isinstance(item, Record)
        yield item
    if not found:
        raise InputError(message)
