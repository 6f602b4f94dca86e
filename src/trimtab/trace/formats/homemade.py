"""Files that people write by themselves: arrays in lists or dictionaries under any names, and a line for each row.

* Pickles, torch files, `.npz` and `.npy` of objects with integer arrays `[t, L, K]`, one a sequence, or `[S, t, L, K]`;
  or, without any of these, `[t, L * K]`. All have the layers and top-k of one model. What else they hold is not read.
* JSON lines, each the ids of a token in a layer: `{"req_id": "r0", "token_idx": 3, "layer": 7, "topk_ids": [1, 9]}`,
  under the names of `ROW_KEYS`; or the nested lists `[t][L][K]` of a sequence under a name of ids. Others are left out.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.containers.json_values import json_head, json_values
from trimtab.trace.containers.tensors import DType, NumpyArray, Tensor
from trimtab.trace.formats.dump_fields import array_of_lists, as_array, damaged_values
from trimtab.trace.formats.records import Dropped, ImportOptions, Record, require_records
from trimtab.trace.formats.responses import shape_flat
from trimtab.trace.message_text import at_place

# Of a model; more of either is not `[t, L, K]`.
MOST_LAYERS, MOST_TOP_K = 256, 64
# Lists and dictionaries in each other.
_DEEPEST = 4
ROW_KEYS = {
    "ids": (
        "topk_ids", "topk_idx", "topk_indices", "expert_ids", "experts", "expert_idx", "expert_indices",
        "selected_experts", "top_experts",
    ),
    "layer": ("layer", "layer_idx", "layer_id", "layer_index"),
    "token": ("token_idx", "token_index", "token_pos", "token_position", "position", "pos", "token"),
    "request": ("req_id", "request_id", "request", "rid", "sequence_id", "seq_id", "sequence", "sample_id", "sample"),
}  # fmt: skip
"""Names of the fields of a row, the first ones first; the request is optional."""
_NESTED = re.compile(rb'"(%s)"\s*:\s*\[\s*\[\s*\[' % "|".join(ROW_KEYS["ids"]).encode())


def recognise(path: Path) -> bool:
    """Arrays of one model in a pickle, torch or numpy file, or JSON lines of rows."""
    if torch_files.looks_loadable(path):
        try:
            with damaged_values():
                return bool(_sequences(path))
        except (InputError, OSError):
            return False
    if _NESTED.search(head := json_head(path)):
        return True
    first, _, _ = head.lstrip(b"\xef\xbb\xbf[ \r\n").partition(b"\n")
    try:
        row = json.loads(first.rstrip(b"\r ,"))
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and all(_key(row, name) for name in ("ids", "layer", "token"))


def read(path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
    """The records of a file: one an array, a row of a batch, or a request."""
    if not torch_files.looks_loadable(path):
        yield from require_records(_of_rows(path), "no line has ids, a layer and a token")
        return
    found = _sequences(path)
    if not found:
        raise InputError("no integer arrays [tokens, layers, top_k] of one model in it")
    for name, source in found:
        if len(_shape(source)) == 2:
            with at_place(name):
                yield Record(shape_flat(as_array(source), options, "the array"), name)
        elif len(_shape(source)) == 3:
            yield Record(source, name)
        else:
            for row in range(_shape(source)[0]):
                yield Record(source, f"{name}, row {row}", place=row, recorded=_without_padding)


def _without_padding(ids: Any) -> Any:
    return ids[between_padding(ids)]


def between_padding(ids_TLK: np.ndarray[Any, Any]) -> slice:
    """The rows of ids `[t, L, K]` without those at both ends that are one id alone.

    With one layer and top-1 only -1 is padding: others may be routes.
    """
    flat = ids_TLK.reshape(len(ids_TLK), -1)
    padded = (flat == flat[:, :1]).all(axis=1) if flat.shape[1] > 1 else flat[:, 0] == -1
    kept = np.flatnonzero(~padded)
    return slice(kept[0], kept[-1] + 1) if len(kept) else slice(0, 0)


def arrays_in(value: Any, name: str = "the array", depth: int = 0) -> Iterator[tuple[str, NumpyArray | Tensor]]:
    """Yields the arrays of integers in lists and dictionaries, with their names."""
    if isinstance(value, NumpyArray) and isinstance(value.data, list):
        value = value.data
    if isinstance(value, NumpyArray | Tensor):
        dtype = value.dtype.code if isinstance(value.dtype, DType) else str(value.dtype)
        if dtype.lstrip("<>|=").startswith(("i", "u")):
            yield name, value
    elif depth < _DEEPEST and isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items:
            yield from arrays_in(each, f"array {key}" if depth == 0 else f"{name}, {key}", depth + 1)


def _sequences(path: Path) -> list[tuple[str, NumpyArray | Tensor]]:
    """The arrays that are ids of sequences; none if they are of several models."""
    found = [each for each in arrays_in(torch_files.load(path)) if 0 not in _shape(each[1])[-2:]]
    for axes in ((3, 4), (2,)):
        ids = [(name, array) for name, array in found if len(_shape(array)) in axes]
        if ids:
            sizes = {_shape(array)[1 - len(_shape(array)) :][-2:] for _, array in ids}
            is_of_one = len(sizes) == 1 and (axes == (2,) or fits_model(next(iter(sizes))))
            return ids if is_of_one else []
    return []


def fits_model(size: tuple[int, ...]) -> bool:
    """Whether these may be layers and top-k."""
    return 0 < size[0] <= MOST_LAYERS and 0 < size[1] <= MOST_TOP_K


def _shape(array: NumpyArray | Tensor) -> tuple[int, ...]:
    shape = tuple(array.shape)
    axes = array.axes if isinstance(array, NumpyArray) else None
    return shape if axes is None else tuple(shape[axis] for axis in axes)


def _key(row: Mapping[str, Any], name: str) -> str | None:
    """The key of a field in a row of this file, if its value may be that."""
    for key in ROW_KEYS[name]:
        value = row.get(key)
        if name == "ids":
            if isinstance(value, list) and value and all(type(each) is int for each in value):
                return key
        elif type(value) is int or (name == "request" and isinstance(value, str)):
            return key
    return None


def _is_nested(value: Any) -> bool:
    for _ in range(3):
        if not isinstance(value, list) or not value:
            return False
        value = value[0]
    return True


def _of_rows(path: Path) -> Iterator[Record | Dropped]:
    top_k = 0
    # By request: token, layer, and K ids of each row.
    rows: dict[str, array[int]] = {}
    for where, row in json_values(path):
        nested = next(
            (row[key] for key in ROW_KEYS["ids"] if isinstance(row, Mapping) and _is_nested(row.get(key))), None
        )
        if nested is not None:
            with at_place(where):
                yield Record(array_of_lists(nested, 3), where)
            continue
        keys = {name: _key(row, name) if isinstance(row, Mapping) else None for name in ROW_KEYS}
        if keys["ids"] is None or keys["layer"] is None or keys["token"] is None:
            yield Dropped("lines without ids, layer and token")
            continue
        ids = row[keys["ids"]]
        top_k = top_k or len(ids)
        if len(ids) != top_k:
            raise InputError(f"{where}: {len(ids)} ids; there are {top_k} in the lines before")
        numbers = row[keys["token"]], row[keys["layer"]], *ids
        if not all(-1 <= number < 1 << 31 for number in numbers):
            raise InputError(f"{where}: token, layer and ids {numbers}; they should be -1 to 2147483647")
        request = "all lines" if keys["request"] is None else f"request {row[keys['request']]}"
        rows.setdefault(request, array("i")).extend(numbers)
    tables = {name: np.array(numbers, np.int32).reshape(-1, 2 + top_k) for name, numbers in rows.items()}
    layers = np.unique(np.concatenate([table[:, 1] for table in tables.values()])) if tables else np.empty(0, np.int32)
    for name, table in tables.items():
        first = int(table[:, 0].min())
        if first < 0 or layers[0] < 0:
            raise InputError(f"{name}: token {first}, layer {layers[0]}; they count from 0")
        tokens = int(table[:, 0].max()) + 1 - first
        if tokens > max(4 * len(table), 1 << 10):
            raise InputError(f"{name}: {len(table)} rows of {tokens} tokens; is the token its place in the sequence?")
        place_N, layer_N = table[:, 0] - first, np.searchsorted(layers, table[:, 1])
        times_TL = np.zeros((tokens, len(layers)), np.int32)
        np.add.at(times_TL, (place_N, layer_N), 1)
        if times_TL.max() > 1:
            token, layer = (int(each[0]) for each in np.nonzero(times_TL > 1))
            raise InputError(
                f"{name}: token {first + token}, layer {layers[layer]} is there {times_TL[token, layer]} times; a key "
                f"{ROW_KEYS['request'][0]!r} tells sequences apart"
            )
        ids_TLK = np.full((tokens, len(layers), top_k), -1, np.int32)
        ids_TLK[place_N, layer_N] = table[:, 2:]
        yield Record(ids_TLK, name, first=first, layers=tuple(layers.tolist()))
