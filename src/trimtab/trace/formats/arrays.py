"""Trimtab's plain arrays: the fields of a `RoutingTrace` by name, in `.npz` or safetensors.

`expert_ids [T, L, K]` is needed; `sequence_starts`, `prompt_lengths`, `steps`, `sequence_hashes`, `prompt_hashes`,
`domains` and `layer_indices` are optional. Number of experts and model are stored with them: as arrays of one value in
`.npz`, as texts (with `domains` as a JSON list) in a safetensors file's metadata. `trimtab.trace.exports.arrays`
writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.array_files import Arrays, array_names, lengths_of_starts, open_arrays
from trimtab.trace.formats.records import ImportOptions, Record, missing_id
from trimtab.trace.formats.responses import check_ids
from trimtab.trace.routing import no_route

IDS = "expert_ids"


def recognise(path: Path) -> bool:
    return IDS in (array_names(path) or ())


def read_metadata(path: Path) -> ImportOptions:
    """Model facts stored in the file. Raises InputError if it is not such a file."""
    with open_arrays(path) as arrays:
        return _metadata(arrays)


def read(path: Path, options: ImportOptions) -> Iterator[Record]:
    """Yields the records of the file, one per sequence."""
    with open_arrays(path) as arrays:
        shape = arrays.shape(IDS)
        if len(shape) != 3 or 0 in shape[1:]:
            raise InputError(f"{IDS} has shape {list(shape)}; it should be [tokens, layers, top_k]")
        starts = arrays.values("sequence_starts", "iu") if "sequence_starts" in arrays else np.array([0, shape[0]])
        lengths = lengths_of_starts(starts, shape[0])
        count = len(lengths)
        prompts, steps = (arrays.numbers(name, count) for name in ("prompt_lengths", "steps"))
        hashes, prompt_hashes = (arrays.numbers(name, count, 1 << 64) for name in ("sequence_hashes", "prompt_hashes"))
        domains = _domains(arrays, count)
        layers = _layers(arrays, shape[1])
        metadata = _metadata(arrays)
        end = 0
        for index, length in enumerate(lengths.tolist()):
            start, end = end, end + length
            ids = check_ids(arrays.rows(IDS, start, end))
            yield Record(
                ids,
                f"sequence {index}",
                missing=_gap(ids, metadata.num_experts),
                prompt_length=int(prompts[index]),
                sequence_hash=int(hashes[index]),
                prompt_hash=int(prompt_hashes[index]),
                step=int(steps[index]),
                domain=domains[index],
                layers=layers,
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
    if name not in arrays:
        return None
    if arrays.shape(name) != (1,):
        raise InputError(f"{name} should be an array of one value")
    return arrays.values(name)[0]


def _layers(arrays: Arrays, count: int) -> tuple[int, ...] | None:
    if "layer_indices" not in arrays:
        return None
    layers = arrays.values("layer_indices", "iu")
    if len(layers) != count or (np.diff(layers) <= 0).any() or layers[0] < 0 or layers[-1] >= 1 << 31:
        raise InputError(f"layer_indices should be {count} ascending whole numbers below 2^31")
    return tuple(layers.tolist())


def _domains(arrays: Arrays, count: int) -> list[str]:
    if "domains" in arrays.texts:
        try:
            domains = json.loads(arrays.texts["domains"])
        except (ValueError, RecursionError):
            domains = None
    elif "domains" in arrays:
        domains = [str(domain) for domain in arrays.values("domains")]
    else:
        domains = [""] * count
    if not isinstance(domains, list) or len(domains) != count or not all(isinstance(each, str) for each in domains):
        raise InputError(f"domains should be {count} texts")
    return domains
