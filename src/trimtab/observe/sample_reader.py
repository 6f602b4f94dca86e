"""`Sample`: a sequence as a framework holds it; and `SampleReader`, which reads it on the observer's thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trimtab.errors import InputError
from trimtab.observe.borrowed import Borrowed, fingerprint
from trimtab.trace import ImportOptions, RoutingTrace
from trimtab.trace.formats.normalise import Summary, normalise
from trimtab.trace.formats.records import Dropped, Record
from trimtab.trace.message_text import reason

# Why a sample was not read; other reasons are messages of its reader.
FREED = "freed by the framework before the thread read them"
CHANGED = "written to before the thread had read them"
NO_ROOM = "more text, lists and arrays of mapped files than may be held"
# A sequence's ids in a trace; longer sequences are not read.
MOST_BYTES = 32 << 20
# Padding rows of a sample whose experts are looked at.
PADDING_ROWS = 16
TOO_LONG = f"longer than {MOST_BYTES >> 20} MB of ids"


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence, or all completions of a request.

    Attributes:
        owner: what holds the recorded ids: an array of this sample or of a whole batch, or a response.
        nbytes: of the ids, or of what they are made of.
        records: from what the owner holds to records.
        mark: `fingerprint` of the ids, padding included, when they were handed over; None if they are made of text.
    """

    owner: Borrowed
    nbytes: int
    records: Callable[[Any], Iterable[Record | Dropped]]
    mark: bytes | None = None


@dataclass
class ReadFigures:
    """What was read of a step's samples.

    Attributes:
        handed_over, read: samples.
        failed: those that were not read, by reason.
        summary: rows by kind.
        padding_peaks: of each sample with padding, the part of its padding rows that use the same expert, mean over
            layers.
    """

    handed_over: int = 0
    read: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    summary: Summary = field(default_factory=Summary)
    padding_peaks: list[float] = field(default_factory=list)


class SampleReader:
    """Reads the samples of one model.

    Args:
        options: facts of the model. MoE layers that are not given are those of the first sample.
    """

    def __init__(self, options: ImportOptions) -> None:
        self._options = options

    def read(self, sample: Sample, figures: ReadFigures) -> RoutingTrace | None:
        """The sequences of a sample as a trace; None if it can't be read, which is counted."""
        owner = sample.owner.get()
        if owner is None:
            figures.failed[FREED if sample.owner.can_be_weak else NO_ROOM] += 1
            return None
        summary = Summary()
        try:
            records = [_light(record) for record in sample.records(owner)]
            (trace,) = normalise(records, self._options, summary, "the sample")
            record = records[0]
            peak = _peak(record) if isinstance(record, Record) else None
            if sample.mark is not None and isinstance(record, Record) and fingerprint(record.block) != sample.mark:
                raise InputError(CHANGED)
        except Exception as error:
            # Of any kind: what is wrong with a sample must not end the observation.
            figures.failed[reason(error)] += 1
            return None
        if self._options.moe_layers is None:
            self._options = replace(self._options, moe_layers=tuple(trace.layer_indices.tolist()))
        figures.read += 1
        figures.summary.add(summary)
        if peak is not None:
            figures.padding_peaks.append(peak)
        return trace


def _light(record: Record | Dropped) -> Record | Dropped:
    """The record without token ids. Raises InputError if it is too long."""
    if isinstance(record, Dropped):
        return record
    if record.ids.size > MOST_BYTES:
        raise InputError(TOO_LONG)
    return replace(record, tokens=())


def _peak(record: Record) -> float | None:
    """The part of padding tokens that use the same expert, of the most used one, mean over layers; None without any."""
    if record.rows is None:
        return None
    block = record.block
    is_padding = np.ones(len(block), bool)
    is_padding[record.rows] = False
    places = np.flatnonzero(is_padding)
    ids_NLK = block[places[:: max(1, len(places) // PADDING_ROWS)]]
    if not len(ids_NLK):
        return None
    count, layers, _ = ids_NLK.shape
    ids_NLK = np.sort(ids_NLK, axis=2).astype(np.int64)
    is_first = np.ones(ids_NLK.shape, bool)
    # K equal ids are one expert.
    is_first[:, :, 1:] = ids_NLK[:, :, 1:] != ids_NLK[:, :, :-1]
    ids_NLK -= ids_NLK.min()
    width = int(ids_NLK.max()) + 1
    cells = (np.arange(layers)[:, None] * width + ids_NLK)[is_first]
    used_LE = np.bincount(cells, minlength=layers * width).reshape(layers, width)
    return float((used_LE.max(axis=1) / count).mean())
