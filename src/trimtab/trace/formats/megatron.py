"""Megatron-core's `--moe-routing-trace-path`: `router_trace_rank{N}.jsonl`, a row for each (step, block, layer).

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0, "num_tokens": 128, "topk": 8,
     "top_indices": [[12, 45, ...], ...]}

`step` is a training iteration, or a forward pass of inference. `block` is "decoder", or "mtp" for layers of multi-token
prediction, which are numbered separately and not imported. Tokens belong to no sequence, so the tokens that went
through the layers together, a micro-batch, are one record. In a training iteration every layer is there once for each
micro-batch: a layer's n-th row is that of the n-th micro-batch, whatever the order of the pipeline.

Our own export adds `prompt_length`, `domain` and `sequence`; there every sequence is a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.kernels import kernel
from trimtab.trace.containers.json_values import json_head, json_lines, json_values, one_value
from trimtab.trace.formats.dump_fields import array_of_lists, whole_field
from trimtab.trace.formats.records import Dropped, ImportOptions, Record, require_records
from trimtab.trace.message_text import at_place, kind_of

_IDS = b'"top_indices":'
MTP_ROWS = Dropped("rows of multi-token prediction")


def recognise(path: Path) -> bool:
    head = json_head(path)
    return b'"top_indices"' in head and b'"layer"' in head


def read(path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
    """Records of one rank's file. Memory holds one step, or one sequence of our own export.

    Steps may not go backwards, and the layers of a step are there equally often, with equal numbers of tokens.
    """
    return require_records(_records(path), "no row of a decoder layer")


def _records(path: Path) -> Iterator[Record | Dropped]:
    waiting: list[tuple[int, Record]] = []
    before: tuple[int, int | None] | None = None
    for where, value, ids in _values(path):
        with at_place(where):
            row = _row(value, where, ids)
            if row is None:
                yield MTP_ROWS
                continue
            step = row[1].step
            if before and step < before[0]:
                raise InputError(f"step {step} comes after step {before[0]}")
            together = step, whole_field(value, "sequence", None)
        if together != before:
            yield from _micro_batches(waiting)
            before, waiting = together, []
        waiting.append(row)
    yield from _micro_batches(waiting)


def _micro_batches(rows: list[tuple[int, Record]]) -> Iterator[Record]:
    """The records of rows of one step, given with their layers."""
    by_layer: dict[int, list[Record]] = {}
    for layer, row in rows:
        by_layer.setdefault(layer, []).append(row)
    layers = tuple(sorted(by_layer))
    times = {layer: len(by_layer[layer]) for layer in layers}
    if len(set(times.values())) > 1:
        rare, often = min(layers, key=times.__getitem__), max(layers, key=times.__getitem__)
        first = rows[0][1]
        raise InputError(
            f"{first.where}, step {first.step}: layer {often} is there {times[often]} times, layer {rare} "
            f"{times[rare]} times; each should be there once a micro-batch"
        )
    for rows_L in zip(*(by_layer[layer] for layer in layers), strict=True):
        start = min(rows_L, key=lambda row: int(row.where.split()[1]))
        tokens, top_k = rows_L[0].source.shape
        for layer, row in zip(layers, rows_L, strict=True):
            if row.source.shape != (tokens, top_k):
                raise InputError(
                    f"{row.where}: layer {layer} has {row.source.shape[0]} tokens, top-{row.source.shape[1]}; layer "
                    f"{layers[0]} of the same micro-batch has {tokens}, top-{top_k}"
                )
        ids_TLK = np.stack([row.source for row in rows_L], axis=1)
        yield replace(start, source=ids_TLK, where=f"{start.where}, step {start.step}", layers=layers)


def _values(path: Path) -> Iterator[tuple[str, Any, Array | None]]:
    """Yields the place of a row, the row, and its ids if they were already parsed.

    Nearly all of the text is ids. If they are at the end of a line, as Megatron writes them, they are parsed
    separately.
    """
    if json_head(path).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        for where, value in json_values(path):
            yield where, value, None
        return
    for number, line in enumerate(json_lines(path), 1):
        start, sign, ids_text = line.rpartition(_IDS)
        ids = ids_at_end(ids_text) if sign else None
        text = line if ids is None else start + b'"top_indices": []}'
        if text.strip():
            yield f"line {number}", one_value(text, f"line {number}"), ids


def ids_at_end(text: bytes) -> Array | None:
    """The ids in `[[1, 2], [3, 4]]}`, None if the text is anything else."""
    ids_N = np.empty(len(text) // 2, np.int32)
    rows, top_k = _parse(np.frombuffer(text, np.uint8), ids_N)
    if not rows:
        return None
    ids = ids_N[: rows * top_k].reshape(rows, top_k)
    narrow = ids.min() >= -(1 << 15) and ids.max() < 1 << 15
    return ids.astype(np.int16) if narrow else ids.copy()


@kernel
def _parse(text, ids_N):  # type: ignore[no-untyped-def]
    """Numbers of rows and of ids per row; 0 rows for unusual text. The text ends with a line end, which is not
    parsed."""
    count = rows = top_k = 0
    at = _blank(text, 0)
    if text[at] != 91:  # [
        return 0, 0
    while True:
        at = _blank(text, at + 1)
        if text[at] != 91:
            return 0, 0
        first = count
        while True:
            at = _blank(text, at + 1)
            sign = 1
            if text[at] == 45:  # -
                sign = -1
                at += 1
            value, digits = 0, 0
            while 48 <= text[at] <= 57:
                value = 10 * value + int(text[at]) - 48
                digits += 1
                at += 1
                if digits > 9 or (digits > 1 and value < 10):
                    return 0, 0
            if digits == 0:
                return 0, 0
            ids_N[count] = sign * value
            count += 1
            at = _blank(text, at)
            if text[at] != 44:  # ,
                break
        if text[at] != 93 or (rows and count - first != top_k):  # ]
            return 0, 0
        top_k = count - first
        rows += 1
        at = _blank(text, at + 1)
        if text[at] != 44:
            break
    if text[at] != 93:
        return 0, 0
    at = _blank(text, at + 1)
    if text[at] != 125:  # }
        return 0, 0
    at = _blank(text, at + 1)
    return (rows, top_k) if at == len(text) - 1 or (text[at] == 13 and at == len(text) - 2) else (0, 0)


@kernel
def _blank(text, at):  # type: ignore[no-untyped-def]
    while text[at] == 32:
        at += 1
    return at


def _row(value: Any, where: str, ids: Array | None) -> tuple[int, Record] | None:
    """The layer and the ids `[T, K]` of one row, with what is known of it; None for one of multi-token prediction.

    Args:
        ids: the ids of `top_indices`, if they were parsed separately.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"{kind_of(value)}; expected an object with top_indices")
    if value.get("block", "decoder") != "decoder" or value.get("mtp_idx") is not None:
        return None
    indices = value.get("top_indices")
    if not isinstance(indices, list):
        raise InputError("no top_indices")
    top_k = whole_field(value, "topk", None)
    if ids is None:
        ids = array_of_lists(indices, 2) if indices else np.empty((0, top_k or 0), np.int16)
    num_tokens = whole_field(value, "num_tokens", len(ids))
    if ids.shape != (num_tokens, ids.shape[1] if top_k is None else top_k):
        raise InputError(f"num_tokens is {num_tokens} and topk {top_k}; top_indices is {list(ids.shape)}")
    if not ids.shape[1]:
        raise InputError("topk is 0")
    domain = value.get("domain")
    return whole_field(value, "layer"), Record(
        ids,
        where,
        prompt_length=whole_field(value, "prompt_length", 0) or 0,
        step=whole_field(value, "step", 0) or 0,
        domain=domain if isinstance(domain, str) else "",
    )
