"""Trimtab's plain arrays: the fields of a `RoutingTrace` by name, in `.npz` or safetensors.

`expert_ids [T, L, K]` is needed; `sequence_starts`, `prompt_lengths`, `steps`, `sequence_hashes`, `prompt_hashes`,
`domains` and `layer_indices` are optional. Number of experts and model are stored with them: as arrays of one value in
`.npz`, as texts (with `domains` as a JSON list) in a safetensors file's metadata.
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
from trimtab.trace.formats.homemade import between_padding
from trimtab.trace.formats.records import ImportOptions, Record
from trimtab.trace.formats.responses import check_ids, shape_flat

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
        yield from sequences(arrays, IDS, options)


def sequences(arrays: Arrays, name: str, options: ImportOptions) -> Iterator[Record]:
    """The records of ids `[T, L, K]` or `[T, L * K]` of sequences one after another, or of a padded batch
    `[S, t, L, K]`.

    `sequence_starts`, with or without the end, or `lengths` tell sequences apart. In a batch `lengths` are those of
    its rows; without them, rows of equal ids at both ends are padding.

    Args:
        name: of the array of ids.
        options: for `[T, L * K]`, number of layers and top_k.

    Raises:
        InputError: if arrays are missing or don't fit together.
    """
    shape = arrays.shape(name)
    padded = len(shape) == 4
    if len(shape) not in (2, 3, 4) or 0 in shape[1:] or (padded and not shape[1]):
        raise InputError(
            f"{name or 'routed_experts'} has shape {list(shape)}; it should be [tokens, layers, top_k] or [sequences, "
            "tokens, layers, top_k]"
        )
    lengths: Array | None = None
    if not padded:
        lengths = _lengths(arrays, shape[0])
    elif "lengths" in arrays:
        lengths = arrays.numbers("lengths", shape[0], shape[1] + 1)
    count = shape[0] if lengths is None else len(lengths)
    prompts, steps = (arrays.numbers(key, count) for key in ("prompt_lengths", "steps"))
    hashes, prompt_hashes = (arrays.numbers(key, count, 1 << 64) for key in ("sequence_hashes", "prompt_hashes"))
    domains = _domains(arrays, count)
    layers = _layers(arrays, shape[1]) if name == IDS and len(shape) == 3 else None
    end = 0
    for index in range(count):
        length = None if lengths is None else int(lengths[index])
        start, end = end, end + (1 if padded else length or 0)
        rows = arrays.rows(name, start, end)
        ids = check_ids(rows[0] if padded else rows)
        if ids.ndim == 2:
            ids = shape_flat(ids, options, name or "the array")
        yield Record(
            ids,
            f"sequence {index}",
            rows=between_padding(ids) if length is None else slice(0, length),
            prompt_length=int(prompts[index]),
            sequence_hash=int(hashes[index]),
            prompt_hash=int(prompt_hashes[index]),
            step=int(steps[index]),
            domain=domains[index],
            layers=layers,
        )


def _lengths(arrays: Arrays, total: int) -> Array:
    """`[S]` tokens of each of the concatenated sequences, `total` together."""
    if "sequence_starts" in arrays:
        starts = arrays.values("sequence_starts", "iu").astype(np.int64)
        if len(starts) and starts[0] == 0 and starts[-1] != total:
            starts = np.append(starts, total)
        if not len(starts) or starts[0] != 0 or starts[-1] != total or (np.diff(starts) < 0).any():
            raise InputError(f"sequence_starts should be ascending from 0 to the number of tokens, {total}")
        return np.diff(starts)
    if "lengths" in arrays:
        lengths = arrays.values("lengths", "iu").astype(np.int64)
        if lengths.min(initial=0) < 0 or lengths.max(initial=0) > total or lengths.sum() != total:
            raise InputError(f"lengths should add up to the number of tokens, {total}")
        return lengths
    return np.array([total])


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
