"""Trimtab's plain arrays: the fields of a `RoutingTrace` by name, in `.npz` or safetensors.

`expert_ids [T, L, K]` is needed; `sequence_starts`, `prompt_lengths`, `steps`, `sequence_hashes`, `domains` and
`layer_indices` are optional. Number of experts and model are stored with them: as arrays of one value in `.npz`, as
texts
(with `domains` as a JSON list) in a safetensors file's metadata. `trimtab.trace.exports.arrays` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.array_files import Arrays, array_names, open_arrays
from trimtab.trace.formats.records import ImportOptions, Record
from trimtab.trace.formats.routes import check_ids, missing_id
from trimtab.trace.routing import no_route

IDS = "expert_ids"


def recognise(path: Path) -> bool:
    return IDS in (array_names(path) or ())


def read_metadata(path: Path) -> ImportOptions:
    """Model facts stored in the file.

    Raises:
        InputError: if it is not such a file.
    """
    with open_arrays(path) as arrays:
        return _metadata(arrays)


def read(path: Path, options: ImportOptions) -> Iterator[Record]:
    """Yields the records of the file, one per sequence.

    Raises:
        InputError: if arrays are missing or don't fit together.
    """
    with open_arrays(path) as arrays:
        shape = arrays.shapes.get(IDS, ())
        if len(shape) != 3 or 0 in shape[1:]:
            raise InputError(f"{IDS} has shape {list(shape)}; it should be [tokens, layers, top_k]")
        starts = _facts(arrays, "sequence_starts", None, np.array([0, shape[0]])).astype(np.int64)
        if len(starts) < 1 or starts[0] != 0 or starts[-1] != shape[0] or (np.diff(starts) < 0).any():
            raise InputError(f"sequence_starts should rise from 0 to the number of tokens, {shape[0]}")
        count = len(starts) - 1
        zeros = np.zeros(count, np.int64)
        prompts, steps = (_facts(arrays, name, count, zeros) for name in ("prompt_lengths", "steps"))
        for name, values in (("prompt_lengths", prompts), ("steps", steps)):
            if values.min(initial=0) < 0 or values.max(initial=0) >= 1 << 31:
                raise InputError(f"{name} should be numbers of 0 to 2^31 - 1")
        hashes = _facts(arrays, "sequence_hashes", count, zeros.astype(np.uint64))
        if hashes.min(initial=0) < 0:
            raise InputError("sequence_hashes should not be negative")
        domains = _domains(arrays, count)
        layers = _facts(arrays, "layer_indices", shape[1], np.arange(shape[1]))
        if (np.diff(layers) <= 0).any() or layers.min() < 0 or layers.max() >= 1 << 31:
            raise InputError("layer_indices should rise")
        metadata = _metadata(arrays)
        rows = arrays.rows(IDS)
        for index, length in enumerate(np.diff(starts).tolist()):
            ids = check_ids(rows(length))
            yield Record(
                ids=ids,
                where=f"sequence {index}",
                missing=_gap(ids, metadata.num_experts),
                prompt_length=int(prompts[index]),
                sequence_hash=int(hashes[index]),
                step=int(steps[index]),
                domain=domains[index],
                layers=tuple(layers.tolist()) if "layer_indices" in arrays.shapes else None,
            )


def _gap(ids: Array, num_experts: int | None) -> int | None:
    """The id of unknown routes: `no_route` for Trimtab's id dtype, else the usual values."""
    if num_experts is not None and ids.dtype.kind == "u" and ids.dtype.itemsize <= 2:
        return no_route(num_experts)
    return missing_id(ids)


def _metadata(arrays: Arrays) -> ImportOptions:
    if arrays.texts:
        experts: Any = arrays.texts.get("num_experts")
        model = arrays.texts.get("model", "")
    else:
        experts, model = _single(arrays, "num_experts"), _single(arrays, "model") or ""
    if experts is None:
        return ImportOptions(model=str(model))
    if not str(experts).isdecimal() or not 1 <= int(str(experts)[:9]) <= 65535:
        raise InputError("num_experts should be a number of 1 to 65535")
    return ImportOptions(num_experts=int(experts), model=str(model))


def _single(arrays: Arrays, name: str) -> Any:
    """The value of an array of one value, None if it is missing."""
    if name not in arrays.shapes:
        return None
    if arrays.shapes[name] != (1,):
        raise InputError(f"{name} should be an array of one value")
    return arrays.small(name)[0]


def _facts(arrays: Arrays, name: str, count: int | None, default: Array) -> Array:
    if name not in arrays.shapes:
        return default
    values = arrays.small(name)
    if values.dtype.kind == "U" or (count is not None and len(values) != count):
        raise InputError(f"{name} should be {'' if count is None else f'{count} '}whole numbers")
    return values


def _domains(arrays: Arrays, count: int) -> list[str]:
    if "domains" in arrays.texts:
        try:
            domains = json.loads(arrays.texts["domains"])
        except (ValueError, RecursionError):
            domains = None
    elif "domains" in arrays.shapes:
        domains = [str(domain) for domain in arrays.small("domains")]
    else:
        domains = [""] * count
    if not isinstance(domains, list) or len(domains) != count or not all(isinstance(each, str) for each in domains):
        raise InputError(f"domains should be {count} texts")
    return domains
