"""A plain writer of trace v1, the files of Megatron-LM's token-imbalance benchmark."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from helpers.pickled_dumps import saved

DTYPES = {"token_ids": torch.int64, "gates": torch.float32, "source_rank": torch.int32, "expert_ids": torch.int64}


def trace_v1(ids_TK: Any, source_T: Any, num_experts: int, world_size: int, **more: Any) -> dict[str, bytes]:
    """Files of a trace by their path in its folder. `more` are other values of the manifest's fields."""
    ids = torch.as_tensor(ids_TK)
    values = {"token_ids": ids, "expert_ids": ids, "source_rank": torch.as_tensor(source_T)}
    values["gates"] = torch.full(tuple(ids.shape), 1 / ids.shape[1])
    files, tensors = {}, {}
    for name, dtype in DTYPES.items():
        file, value = f"tensors/{name}.pt", values[name].to(dtype)
        files[file] = saved(value)
        tensors[name] = {
            "file": file, "sha256": hashlib.sha256(files[file]).hexdigest(), "shape": list(value.shape),
            "dtype": str(dtype).removeprefix("torch."),
        }  # fmt: skip
    manifest = {
        "schema_version": 1, "producer_commit": "0123abc", "seed": 1234, "logical_layer_id": 0, "step_id": 0,
        "microbatch_id": 0, "logical_num_tokens": len(ids), "num_experts": num_experts, "topk": ids.shape[1],
        "hidden_size": 512, "world_size": world_size, "original_partition": "rank-major, contiguous per source rank",
        "workload_id": "W2_hot_rank", "workload_checksum": "5d41402abc4b2a76", "tensors": tensors, "extra": {},
    }  # fmt: skip
    return {"manifest.json": json.dumps(manifest | more, indent=2).encode(), **files}


def write_files(files: dict[str, bytes], folder: Path) -> Path:
    """Write the files and return the path of the manifest."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / "manifest.json"
