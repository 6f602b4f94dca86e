"""SGLang's expert-distribution recorder: `/dump_expert_distribution_record` writes a `.pt` file.

From `sglang/srt/eplb/expert_distribution.py`:

* `per_token`: `{"records": [{"forward_pass_id", "rank", "topk_ids_of_layer": [layers, tokens, 8], "input_ids",
  "positions", "extend_seq_lens", "forward_mode", ...}], "last_physical_to_logical_map": [layers, physical experts]}`.
  Ids are physical, -1 where there is none: layers without experts, padding, places beyond top_k.
* `per_pass`: the same with `global_physical_count` `[layers, physical experts]` instead of ids.
* `stat`: `{"rank", "logical_count": [passes, layers, experts], ...}`.

The last two hold counts only (`counts`).

Of `per_token` dumps, tokens of a request form one sequence if requests are named (`rids`). Otherwise, what a request
fed in one pass of prefill is a sequence, and the tokens of a pass of decoding are one.

Every rank writes a file. With data-parallel attention each holds its own tokens; otherwise files are equal: import one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.formats.counts import EMPTY_PASSES, records_of_counts
from trimtab.trace.formats.dump_fields import field, integers, optional_integers, text, whole_number
from trimtab.trace.formats.records import Dropped, ImportOptions, Record

IDS, COUNTS, PASS_COUNTS, MAP = (
    "topk_ids_of_layer",
    "logical_count",
    "global_physical_count",
    "last_physical_to_logical_map",
)
PREFILL = ("prefill", "mixed")


def recognise(path: Path) -> bool:
    """A torch file with the recorder's keys."""
    found = torch_files.mentions(path, IDS, COUNTS, PASS_COUNTS, MAP)
    return bool(found & {IDS, COUNTS}) or found >= {PASS_COUNTS, MAP}


def read(path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
    """The records of a dump, in any of the recorder's modes."""
    return records_of_dump(torch_files.load(path), options)


def records_of_dump(dump: Any, options: ImportOptions) -> Iterator[Record | Dropped]:
    """The records of what `torch.load` returns for a dump; `options.top_k` is needed for counts."""
    if not isinstance(dump, Mapping):
        raise InputError("not a dump of SGLang's recorder: it should be a dictionary")
    if COUNTS in dump:
        counts = integers(dump[COUNTS], COUNTS, 3)
        yield from records_of_counts(list(counts), range(len(counts)), options)
        return
    passes = dump.get("records")
    if not isinstance(passes, list | tuple):
        raise InputError(f"not a dump of SGLang's recorder: neither {COUNTS!r} nor 'records'")
    if passes and all(field(each, IDS) is None for each in passes):
        yield from _from_physical_counts(dump, passes, options)
    else:
        yield from _from_tokens(dump, passes)


@dataclass(frozen=True)
class _Piece:
    """The tokens of one request in one forward pass.

    Attributes:
        name: of the pass.
        mode: of the pass: "prefill", "decode", "mixed" or "".
        request: its name; None if unknown.
        ids: `[layers, t, 8]`, physical.
    """

    name: str
    mode: str
    request: str | None
    ids: Array


def _from_tokens(dump: Mapping[Any, Any], dumped: Any) -> Iterator[Record | Dropped]:
    logical = optional_integers(dump, MAP, 2)
    passes = [integers(field(each, IDS), f"{_name(each)}: {IDS}", 3) for each in dumped]
    for each, ids in zip(dumped, passes, strict=True):
        if ids.shape[::2] != passes[0].shape[::2]:
            raise InputError(f"{_name(each)}: {IDS} has another shape than those before")
    used_LK = np.any([(ids >= 0).any(axis=1) for ids in passes], axis=0)
    if not np.any(used_LK):
        raise InputError("its records hold no token")
    layers = np.flatnonzero(used_LK.any(axis=1))
    # The recorder has room for top-8, whatever the model's is.
    top_k = int(np.flatnonzero(used_LK.any(axis=0))[-1]) + 1
    yield Dropped(EMPTY_PASSES, sum(ids.shape[1] == 0 for ids in passes))
    sequences: dict[str, list[_Piece]] = {}
    for each, ids in zip(dumped, passes, strict=True):
        for number, piece in enumerate(_pieces(each, ids)):
            name = f"request {piece.request}" if piece.request else f"{piece.name}, piece {number}"
            # Passes of several ranks or recordings may have the same number.
            while not piece.request and name in sequences:
                name += "'"
            if piece.ids.shape[1]:
                sequences.setdefault(name, []).append(piece)
    for name, pieces in sequences.items():
        parts = [_logical_ids(piece, layers, top_k, logical) for piece in pieces]
        yield Record(
            np.concatenate(parts),
            name,
            prompt_length=sum(len(ids) for ids, piece in zip(parts, pieces, strict=True) if piece.mode in PREFILL),
            domain="" if pieces[0].request else pieces[0].mode,
            layers=tuple(layers.tolist()),
        )


def _pieces(each: Any, ids: Array) -> Iterator[_Piece]:
    """The pieces of a forward pass, one a request; all tokens are one if requests are not told apart."""
    tokens = ids.shape[1]
    lengths, requests = field(each, "extend_seq_lens"), field(each, "rids")
    if not (
        isinstance(lengths, list | tuple)
        and all(type(length) is int and length >= 0 for length in lengths)
        and sum(lengths) == tokens
    ):
        lengths = [1] * tokens if isinstance(requests, list | tuple) and len(requests) == tokens else [tokens]
    named = isinstance(requests, list | tuple) and len(requests) == len(lengths) and all(map(text, requests))
    # `ForwardMode`: 1 is prefill, 2 decoding, 3 both in one pass.
    mode = {1: "prefill", 2: "decode", 3: "mixed"}.get(whole_number(field(each, "forward_mode")), "")
    ends = np.cumsum(lengths).tolist()
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        yield _Piece(_name(each), mode, text(requests[number]) if named else None, ids[:, end - length : end])


def _name(each: Any) -> str:
    rank = field(each, "rank")
    return f"forward pass {whole_number(field(each, 'forward_pass_id'))}" + (
        f" of rank {rank}" if isinstance(rank, int) and rank else ""
    )


def _logical_ids(piece: _Piece, layers: Array, top_k: int, logical: Array | None) -> Array:
    ids_TLK = piece.ids[layers, :, :top_k].transpose(1, 0, 2)
    if logical is None:
        return ids_TLK
    if layers[-1] >= len(logical) or ids_TLK.max(initial=-1) >= logical.shape[1]:
        raise InputError(f"{piece.name}: a physical expert that is not in {MAP} of shape {list(logical.shape)}")
    mapped = logical[layers[None, :, None], np.maximum(ids_TLK, 0)]
    return np.where(ids_TLK >= 0, mapped, -1)


def _from_physical_counts(dump: Mapping[Any, Any], passes: Any, options: ImportOptions) -> Iterator[Record | Dropped]:
    logical = optional_integers(dump, MAP, 2)
    counts = []
    for each in passes:
        physical = integers(field(each, PASS_COUNTS), f"{_name(each)}: {PASS_COUNTS}", 2)
        if logical is None or logical.shape != physical.shape or (logical < 0).any():
            raise InputError(f"{_name(each)}: {PASS_COUNTS} and {MAP} do not fit together")
        experts = int(logical.max(initial=0)) + 1
        if experts > physical.shape[1]:
            raise InputError(f"{MAP} names expert {experts - 1}; there are {physical.shape[1]} physical ones")
        counts_LE = np.zeros((len(physical), experts), np.int64)
        np.add.at(counts_LE, (np.arange(len(physical))[:, None], logical), physical)
        counts.append(counts_LE)
    names = [whole_number(field(each, "forward_pass_id")) for each in passes]
    yield from records_of_counts(counts, names, options)
