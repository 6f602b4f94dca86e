"""verl: batches with a key `routed_experts`, `[batch, total_len, layers, top_k]`, zeros where there is no record.

verl (`verl/experimental/agent_loop`) pads prompts on the left and responses on the right and writes the routes of
every sequence behind its left padding. A batch comes as `DataProto.save_to_disk` pickles it (`verl/protocol.py`: the
bytes of `torch.save` of a TensorDict, or its arrays), as a `torch.save` of a dictionary or TensorDict, as `.npz`, or as
the bare array in a `.npy`. Without padding (nested tensors), every sequence is a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.containers.tensors import (
    NPY_MAGIC,
    Jagged,
    NumpyArray,
    Tensor,
)
from trimtab.trace.containers.unpickling import OpaqueObject
from trimtab.trace.formats.dump_fields import (
    as_array,
    damaged_values,
    field,
    integers,
    label_of,
    optional_integers,
    rows_of,
    whole_number,
)
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.formats.tensor_dicts import unwrap

KEY = "routed_experts"
_NEMO_RL_KEYS = ("input_lengths", "unpadded_sequence_lengths", "message_log")


def recognise(path: Path) -> bool:
    """A pickle of a DataProto, or a dictionary with `routed_experts` that is not NeMo-RL's, or a bare 4-D `.npy`."""
    try:
        with path.open("rb") as file:
            start = file.read(256)
    except OSError:
        return False
    if start.startswith(NPY_MAGIC):
        return start.count(b",", start.find(b"'shape'"), start.find(b")")) == 3 and b"'descr': '" in start
    if torch_files.looks_loadable(path) and b"verl.protocol" in start and b"DataProto" in start:
        return True
    found = torch_files.mentions(path, KEY, f"<NJT_VALUES>{KEY}", "topk_ids_of_layer", *_NEMO_RL_KEYS)
    return bool(found) and found <= {KEY, f"<NJT_VALUES>{KEY}"}


def read(path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
    """The records of a dump, one per row of the batch.

    Raises:
        InputError: one line, if it is damaged or holds no `routed_experts`.
    """
    with damaged_values():
        dump = torch_files.load(path)
        if isinstance(dump, NumpyArray | Tensor):
            dump = {KEY: dump}
        yield from records_of_batch(dump)


def records_of_batch(batch: Any) -> Iterator[Record | Dropped]:
    """The records of a `DataProto`, a TensorDict, or a dictionary of tensors or arrays.

    Reads `routed_experts` and, if present, `attention_mask`, `input_ids`, `prompts`, `response_mask`, the label
    `data_source` and `meta_info["global_steps"]`. Without `attention_mask`, rows of zeros at both ends are padding.

    Raises:
        InputError: one line, if there is no `routed_experts`, or shapes do not fit together.
    """
    with damaged_values():
        tensors, labels, facts = _parts(batch)
        if field(tensors, KEY) is None:
            raise InputError(
                f"no {KEY!r} in this batch; verl writes it with rollout.enable_rollout_routing_replay=True"
            )
        step = whole_number(field(facts, "global_steps"))
        sources = field(labels, "data_source")
        sources = field(tensors, "data_source") if sources is None else sources
        for row, item in _rows(tensors):
            yield replace(item, step=step, domain=label_of(sources, row)) if isinstance(item, Record) else item


def _rows(tensors: Any) -> Iterator[tuple[int, Record | Dropped]]:
    """Yields row numbers, and their records or what is dropped of them."""
    routes = field(tensors, KEY)
    if isinstance(routes, Jagged) or getattr(routes, "is_nested", False) or isinstance(routes, list):
        yield from enumerate(_jagged_rows(tensors))
        return
    ids_BTLK = integers(routes, KEY, 4)
    batch, width = ids_BTLK.shape[:2]
    mask_BT, tokens_BT = optional_integers(tensors, "attention_mask", 2), optional_integers(tensors, "input_ids", 2)
    for name, array in (("attention_mask", mask_BT), ("input_ids", tokens_BT)):
        if array is not None and array.shape != (batch, width):
            raise InputError(f"{name} has shape {list(array.shape)}; {KEY} has [{batch}, {width}, ...]")
    prompts, responses = field(tensors, "prompts"), field(tensors, "responses")
    prompt_width = 0
    if prompts is not None:
        prompt_width = min(width, integers(prompts, "prompts", 2).shape[1])
    elif responses is not None:
        prompt_width = max(0, width - integers(responses, "responses", 2).shape[1])
    for row in range(batch):
        ids_TLK = ids_BTLK[row]
        fed_T: Array = mask_BT[row] != 0 if mask_BT is not None else np.any(ids_TLK, axis=(1, 2))
        places = np.flatnonzero(fed_T)
        if not len(places):
            yield row, Dropped("empty sequences")
            yield row, Dropped("padding rows", width)
            continue
        start, end = int(places[0]), int(places[-1]) + 1
        # Masked tokens in the middle were not fed to the model either.
        whole = mask_BT is None or len(places) == end - start
        chosen: Any = slice(start, end) if whole else places
        length = end - start if whole else len(places)
        record = Record(
            ids=ids_TLK[chosen],
            where=f"row {row}",
            missing=0,
            num_tokens=None if mask_BT is None else length,
            prompt_length=max(0, min(prompt_width, end) - start) if whole else int(fed_T[:prompt_width].sum()),
            token_ids=None if mask_BT is None or tokens_BT is None else tokens_BT[row][chosen],
        )
        yield row, record
        yield row, Dropped("padding rows", width - length)


def _jagged_rows(tensors: Any) -> Iterator[Record]:
    routes = rows_of(field(tensors, KEY), KEY)
    tokens_of, prompts = (_rows_of_field(tensors, name, len(routes)) for name in ("input_ids", "prompts"))
    for row, value in enumerate(routes):
        ids_TLK = integers(value, KEY, 3)
        tokens = None if tokens_of is None else integers(tokens_of[row], "input_ids", 1)
        yield Record(
            ids=ids_TLK,
            where=f"row {row}",
            missing=0,
            num_tokens=len(ids_TLK) if tokens is None else len(tokens),
            prompt_length=0 if prompts is None else len(as_array(prompts[row], "prompts")),
            token_ids=tokens,
        )


def _rows_of_field(tensors: Any, name: str, count: int) -> list[Any] | None:
    value = field(tensors, name)
    if value is None:
        return None
    rows = rows_of(value, name)
    if len(rows) != count:
        raise InputError(f"{name} has {len(rows)} rows; {KEY} has {count}")
    return rows


def _parts(batch: Any) -> tuple[Any, Any, Any]:
    """A batch's tensors, labels and metadata, each with readable fields."""
    if isinstance(batch, OpaqueObject):
        batch = unwrap(batch, KEY)
    elif not isinstance(batch, Mapping) and hasattr(batch, "non_tensor_batch"):
        batch = {"batch": batch.batch, "non_tensor_batch": batch.non_tensor_batch, "meta_info": batch.meta_info}
    if not isinstance(batch, Mapping) and not hasattr(batch, "keys"):
        raise InputError(f"a {type(batch).__name__} where a batch should be: a dictionary with {KEY!r}")
    if field(batch, KEY) is not None or field(batch, "batch") is None:
        return batch, field(batch, "non_tensor_batch"), field(batch, "meta_info")
    tensors = field(batch, "batch")
    tensors = unwrap(tensors, KEY) if isinstance(tensors, OpaqueObject) else tensors
    return tensors, field(batch, "non_tensor_batch"), field(batch, "meta_info")
