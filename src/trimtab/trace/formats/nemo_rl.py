"""NeMo-RL: batches with `routed_experts`, `[batch, tokens, layers, top_k]`, int8 to int32, rows of -1 without a route.

Sequences are padded on the right, so their lengths are needed: `input_lengths` or `unpadded_sequence_lengths`. Before
they are joined, messages have their own: `message_log[i][turn]` with `token_ids` `[n]` and `routed_experts`
`[n, layers, top_k]`. Dumps are `torch.save` or pickles of such dictionaries (`BatchedDataDict` or plain).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.containers.unpickling import OpaqueObject
from trimtab.trace.formats import dump_fields as fields
from trimtab.trace.formats.dump_fields import field
from trimtab.trace.formats.records import Dropped, ImportOptions, Record

KEY = "routed_experts"
_LENGTHS = ("input_lengths", "unpadded_sequence_lengths")


def recognise(path: Path) -> bool:
    """True for a dictionary with `routed_experts` and lengths or a message log."""
    found = torch_files.mentions(path, KEY, "message_log", *_LENGTHS)
    return KEY in found and len(found) > 1


def read(path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
    """The records of a dump, one per row of the batch."""
    return records_of_batch(torch_files.load(path))


def records_of_batch(batch: Any) -> Iterator[Record | Dropped]:
    """The records of a `BatchedDataDict` or dictionary, or of a list of samples with a `message_log`.

    Reads `routed_experts`, `input_lengths` or `unpadded_sequence_lengths`, `generation_lengths`, `input_ids` or
    `output_ids`, and `task_name`; or `message_log`.
    """
    if isinstance(batch, OpaqueObject):
        # A UserDict keeps its items in an attribute.
        batch = batch.items or field(batch, "data")
    if isinstance(batch, list | tuple):
        batch = {
            "message_log": [field(sample, "message_log") for sample in batch],
            "task_name": [field(sample, "task_name") for sample in batch],
        }
    if batch is None or (not isinstance(batch, Mapping) and not hasattr(batch, "keys")):
        raise InputError(f"a {type(batch).__name__} where a batch should be: a dictionary with {KEY!r}")
    if field(batch, KEY) is not None:
        yield from _padded(batch)
    elif field(batch, "message_log") is not None:
        yield from _logged(batch)
    else:
        raise InputError(f"no {KEY!r} in this batch; NeMo-RL writes it with policy.router_replay.enabled=true")


def _padded(batch: Any) -> Iterator[Record | Dropped]:
    routes = field(batch, KEY)
    count, width, *_ = fields.shape_of(routes, KEY)
    found = fields.first_field(batch, *_LENGTHS)
    if found is None:
        raise InputError(f"its rows are padded and their lengths ({' or '.join(_LENGTHS)}) are missing")
    lengths = fields.integers(found, _LENGTHS[0], 1)
    tokens = fields.first_field(batch, "input_ids", "output_ids")
    tokens_BT = None if tokens is None else fields.integers(tokens, "input_ids", 2)
    generated_B = fields.optional_integers(batch, "generation_lengths", 1)
    for name, array in (("lengths", lengths), ("input_ids", tokens_BT), ("generation_lengths", generated_B)):
        if array is not None and len(array) != count:
            raise InputError(f"{name} has {len(array)} rows; {KEY} has {count}")
    for row, length in enumerate(lengths.tolist()):
        # The last token has no route, so routes may be one row short.
        if not 0 <= length <= width + 1 or (tokens_BT is not None and length > tokens_BT.shape[1]):
            raise InputError(f"row {row}: a length of {length} tokens; {KEY} has {width} rows")
        if not length:
            continue
        answer = length if generated_B is None else int(generated_B[row])
        yield Record(
            routes,
            f"row {row}",
            place=row,
            rows=slice(0, length),
            padding=max(0, width - length),
            num_tokens=length,
            prompt_length=max(0, length - answer),
            tokens=() if tokens_BT is None else (tokens_BT[row, :length],),
            domain=fields.label_of(field(batch, "task_name"), row),
            recorded=_recorded,
        )


def _logged(batch: Any) -> Iterator[Record]:
    log = field(batch, "message_log")
    if not isinstance(log, list | tuple):
        raise InputError(f"message_log is a {type(log).__name__}; it should be a list, one entry a sample")
    found = False
    for row, listed in enumerate(log):
        messages, where = fields.rows_of(listed, "message_log"), f"sample {row}"
        if all(field(message, KEY) is None for message in messages):
            continue
        found = True
        tokens = [fields.integers(field(message, "token_ids"), f"{where}: token_ids", 1) for message in messages]
        roles = [field(message, "role") for message in messages]
        answered = roles.index("assistant") if "assistant" in roles else len(roles)
        yield Record(
            [(field(message, KEY), len(each)) for message, each in zip(messages, tokens, strict=True)],
            where,
            read=_joined,
            padding=0,
            num_tokens=sum(map(len, tokens)),
            prompt_length=sum(map(len, tokens[:answered])),
            tokens=tuple(tokens),
            domain=fields.label_of(field(batch, "task_name"), row),
            recorded=_recorded,
        )
    if len(log) and not found:
        raise InputError(f"no message has {KEY!r}; NeMo-RL writes it with policy.router_replay.enabled=true")


def _joined(turns: list[tuple[Any, int]]) -> Array:
    """The ids of the turns of one sample, given with their numbers of tokens; a turn without routes has rows of -1."""
    ids = [None if routes is None else fields.integers(routes, KEY, 3) for routes, _ in turns]
    shape, *others = {each.shape[1:] for each in ids if each is not None}
    if others:
        raise InputError(f"its messages have {KEY} of different shapes")
    rows = []
    for turn, (each, (_, tokens)) in enumerate(zip(ids, turns, strict=True)):
        missing = tokens - (0 if each is None else len(each))
        # Only the last token of all has no route; a missing row in an earlier turn would shift all following rows.
        if missing < 0:
            raise InputError(f"turn {turn}: {-missing} more rows of {KEY} than tokens")
        rows += [] if each is None else [each.astype(np.int32)]
        rows.append(np.full((missing, *shape), -1, np.int32))
    return np.concatenate(rows)


def _recorded(ids_TLK: Array) -> Array:
    """The rows without those at the end that are filled with 0, 1, ..., top_k - 1 in all layers.

    NeMo-RL fills the last token so, and every turn of an environment that no generation followed
    (`nemo_rl/experience/rollouts.py`, `_dummy_routed_experts_for_tokens`).
    """
    length = len(ids_TLK)
    if ids_TLK[:1].size > 1:
        filler_LK = np.broadcast_to(np.arange(ids_TLK.shape[2]), ids_TLK.shape[1:])
        while length and np.array_equal(ids_TLK[length - 1], filler_LK):
            length -= 1
    return ids_TLK[:length]
