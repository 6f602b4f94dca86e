"""A trace as plain arrays, which `trimtab trace import` reads: the fields of `RoutingTrace` by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from trimtab import RoutingTrace
from trimtab.array_type import Array

FIELDS = "sequence_starts", "sequence_hashes", "prompt_hashes", "prompt_lengths", "steps", "layer_indices", "expert_ids"


def write_npz(trace: RoutingTrace, path: Path) -> None:
    with path.open("wb") as file:
        arrays: dict[str, Any] = {**_fields(trace), **_texts(trace), "num_experts": np.array([trace.num_experts])}
        np.savez(file, **arrays)


def write_safetensors(trace: RoutingTrace, path: Path) -> None:
    facts = {"num_experts": str(trace.num_experts), "model": trace.model, "domains": json.dumps(trace.domains.tolist())}
    save_file(_fields(trace), path, {"format": "trimtab-arrays-1", **facts})


def _fields(trace: RoutingTrace) -> dict[str, Array]:
    return {name: np.ascontiguousarray(getattr(trace, name)) for name in FIELDS}


def _texts(trace: RoutingTrace) -> dict[str, Array]:
    # numpy has problems with texts of width 0.
    return {"domains": np.append(trace.domains.astype(np.str_), "-")[:-1], "model": np.array([trace.model, "-"])[:1]}
