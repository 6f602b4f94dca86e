"""Turns of one conversation that a server recorded one by one, each with its prefix, as one sequence.

A turn is a sequence whose tokens are the beginning of a longer one. The longest is kept, with the rows of its turns
where it has none, as if a request asked for rows from a start on. The dump is read twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.formats.normalise import placed
from trimtab.trace.formats.plausible import prefix_hashes
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.message_text import at_place

TURN = Dropped("sequences that are the beginning of another")


def merged(read: Callable[[], Iterable[Record | Dropped]], options: ImportOptions) -> Iterator[Record | Dropped]:
    """Yields what `read` gives, called twice, with turns as one sequence, in the place of its last record.

    Raises:
        InputError: if no sequence has token ids.
    """
    longest = _longest([record.token_ids for record in read() if isinstance(record, Record)])
    expected = Counter(longest.values())
    waiting: dict[int, list[Record]] = {}
    index = -1
    for record in read():
        if isinstance(record, Dropped):
            yield record
            continue
        index += 1
        target = longest.get(index, index)
        if target not in expected:
            yield record
            continue
        if index != target:
            yield TURN
        parts = waiting.setdefault(target, [])
        parts.append(record)
        if len(parts) == expected[target] + 1:
            yield _joined(waiting.pop(target), options)


def _longest(tokens: list[Array | None]) -> dict[int, int]:
    """By sequence that is the beginning of others: the longest of these, the first one of several."""
    hashes = {
        index: prefix_hashes(each) for index, each in enumerate(tokens) if each is not None and len(each)
    }  # fmt: skip
    if tokens and not hashes:
        raise InputError("turns can't be merged: the dump has no token ids, which tell them")
    ends: dict[int, list[int]] = {}
    for index in hashes:
        ends.setdefault(int(hashes[index][-1]), []).append(index)
    open_ends = np.array(list(ends), np.uint64)
    found: dict[int, int] = {}
    for index in sorted(hashes, key=lambda index: -len(hashes[index])):
        if index not in found:
            for end in np.intersect1d(hashes[index][:-1], open_ends).tolist():
                for turn in ends[end]:
                    found.setdefault(turn, index)
    return found


def _joined(parts: list[Record], options: ImportOptions) -> Record:
    """The longest of these records, with rows of the others before its first."""
    records = []
    for part in parts:
        with at_place(part.where):
            ids = part.ids
            records.append((placed(part, len(ids), options), ids))
    records.sort(key=lambda each: len(each[0].token_ids))  # type: ignore[arg-type]
    last, last_ids = records[-1]
    prompts = [record.prompt_length for record, _ in records if record.prompt_length > 0]
    last = replace(last, prompt_length=min(prompts, default=0))
    if not last.first:
        return last
    # Rows that no turn has: of equal ids, which are no route.
    fill = 0 if last_ids.shape[2] > 1 else -1
    rows = np.full((last.first, *last_ids.shape[1:]), fill, np.result_type(last_ids, np.int16))
    for record, ids in records[:-1]:
        if ids.shape[1:] != rows.shape[1:]:
            raise InputError(f"{record.where}: routes of another shape than in {last.where}, whose beginning it is")
        rows[record.first : record.first + len(ids)] = ids[: max(0, last.first - record.first)]
    joined = np.concatenate([rows, last_ids])
    # Rows of padding were told by the record itself.
    return Record(
        joined, last.where, num_tokens=last.num_tokens, prompt_length=last.prompt_length, tokens=last.tokens,
        step=last.step, domain=last.domain, model=last.model, layers=last.layers,
    )  # fmt: skip
