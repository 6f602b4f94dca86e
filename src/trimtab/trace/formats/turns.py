"""Turns of one conversation that a server recorded one by one, each with its prefix, as one sequence.

A turn is a sequence whose tokens are the beginning of a longer one of the same step. The longest is kept, with the
routes of its turns where it has none, as if a request asked for rows from a start on. The dump is read twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.formats.dump_fields import damaged_values
from trimtab.trace.formats.normalise import are_routes, check_form, narrowed, placed
from trimtab.trace.formats.plausible import prefix_hashes
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.message_text import at_place

TURN = Dropped("sequences that are the beginning of another")


def merged(read: Callable[[], Iterable[Record | Dropped]], options: ImportOptions) -> Iterator[Record | Dropped]:
    """Yields what `read` gives, called twice, with turns as one sequence, in the place of its last record.

    Raises:
        InputError: if no sequence has token ids.
    """
    known = [(record.step, record.token_ids) for record in read() if isinstance(record, Record)]
    longest = _longest(known)
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


def _longest(known: list[tuple[int, Array | None]]) -> dict[int, int]:
    """By sequence that is the beginning of others of its step: the longest of these, the first one of several.

    Args:
        known: step and token ids of each sequence, None if unknown.
    """
    hashes = {index: prefix_hashes(ids) for index, (_, ids) in enumerate(known) if ids is not None and len(ids)}
    if known and not hashes:
        raise InputError("turns can't be merged: the dump has no token ids, which tell them")
    # Of each step, since the weights of the next one route otherwise.
    ends: dict[int, dict[int, list[int]]] = {}
    for index, hashes_T in hashes.items():
        ends.setdefault(known[index][0], {}).setdefault(int(hashes_T[-1]), []).append(index)
    of_step = {step: np.array(list(found), np.uint64) for step, found in ends.items()}
    found: dict[int, int] = {}
    for index in sorted(hashes, key=lambda index: -len(hashes[index])):
        step = known[index][0]
        if index not in found:
            for end in np.intersect1d(hashes[index][:-1], of_step[step]).tolist():
                for turn in ends[step][end]:
                    found.setdefault(turn, index)
    return found


def _joined(parts: list[Record], options: ImportOptions) -> Record:
    """The longest of these records, with routes of the others, longer ones first, where it has none."""
    records: list[tuple[Record, Array, int]] = []
    for part in parts:
        with at_place(part.where), damaged_values():
            ids = part.ids
            check_form(part, ids)
            records.append((placed(part, len(ids), options), narrowed(ids), sum(map(len, part.tokens))))
    records.sort(key=lambda each: each[2])
    last, last_ids, _ = records[-1]
    end = max(record.first + len(ids) for record, ids, _ in records)
    # Rows that no turn has: of equal ids, which are no route.
    rows = np.full((end, *last_ids.shape[1:]), 0 if last_ids.shape[2] > 1 else -1, np.int32)
    for record, ids, _ in records:
        if ids.shape[1:] != rows.shape[1:]:
            raise InputError(f"{record.where}: routes of another shape than in {last.where}, whose beginning it is")
        known_TL = are_routes(ids)
        rows[record.first : record.first + len(ids)][known_TL] = ids[known_TL]
    prompts = [record.prompt_length for record, *_ in records if record.prompt_length > 0]
    return Record(
        rows, last.where, num_tokens=last.num_tokens, prompt_length=min(prompts, default=0), tokens=last.tokens,
        step=last.step, domain=last.domain, model=last.model, layers=last.layers,
    )  # fmt: skip
