"""A trace as plain numpy or safetensors arrays: the fields of `RoutingTrace` by name."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.files import atomic_file
from trimtab.trace.containers.array_files import SAFETENSORS_DTYPES
from trimtab.trace.routing import RoutingTrace

_SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def write_npz(trace: RoutingTrace, path: str | os.PathLike[str]) -> None:
    """Write `.npz`, not compressed: `expert_ids`, `sequence_starts` and so on, `num_experts` and `model`.

    Texts are numpy Unicode strings, so pickling is not needed.
    """
    arrays: dict[str, Any] = {
        **_fields(trace),
        "domains": _texts(trace.domains),
        "num_experts": np.array([trace.num_experts], np.int32),
        "model": _texts(np.array([trace.model])),
    }
    with atomic_file(path) as file:
        np.savez(file, **arrays)


def write_safetensors(trace: RoutingTrace, path: str | os.PathLike[str]) -> None:
    """Write safetensors, with `num_experts`, `model` and `domains` (a JSON list) as metadata."""
    arrays = {
        name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in _fields(trace).items()
    }
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "trimtab-arrays-1",
            "num_experts": str(trace.num_experts),
            "model": trace.model,
            "domains": json.dumps(trace.domains.tolist()),
        }
    }
    end = 0
    for name, array in arrays.items():
        dtype = _SAFETENSORS_NAMES[array.dtype]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            file.write(array.reshape(-1).view(np.uint8).data)


def _texts(texts: Array) -> Array:
    """Texts at least one character wide; numpy has problems with width 0."""
    return np.append(texts.astype(np.str_), "-")[:-1]


def _fields(trace: RoutingTrace) -> dict[str, Array]:
    # Widest numbers first: safetensors requires aligned tensors.
    names = (
        "sequence_starts", "sequence_hashes", "prompt_hashes", "prompt_lengths", "steps", "layer_indices", "expert_ids",
    )  # fmt: skip
    return {name: getattr(trace, name) for name in names}
