"""A small valid dump of every imported format: 3 sequences of a model with 4 MoE layers, top-2 of 16."""

from __future__ import annotations

import base64
import gzip
import io
import json
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers.pickled_dumps import saved
from helpers.trace_arrays import write_npz, write_safetensors
from trimtab import RoutingTrace, write_trace
from trimtab.trace.exports.megatron import write_megatron

Array = np.ndarray[Any, Any]
LAYERS, TOP_K, NUM_EXPERTS = 4, 2, 16
LENGTHS = (7, 5, 9)
PROMPT = 3


@dataclass(frozen=True)
class Dump:
    """A file of a format, `form`; `suffix` is that of its name."""

    form: str
    suffix: str
    content: bytes


def routes(seed: int = 0) -> list[Array]:
    """Ids `[tokens - 1, 4, 2]` of the sequences. They begin with a common prompt."""
    rng = np.random.default_rng(seed)
    ids = [np.argsort(rng.random((n - 1, LAYERS, NUM_EXPERTS)), axis=-1)[..., :TOP_K] for n in LENGTHS]
    for each in ids[1:]:
        each[:PROMPT] = ids[0][:PROMPT]
    return ids


def all_dumps() -> dict[str, Dump]:
    """One dump a format and layout, by name."""
    ids = routes()
    tokens = [list(range(10, 10 + n)) for n in LENGTHS]
    found: dict[str, Dump] = {}

    def add(name: str, suffix: str, content: bytes) -> None:
        found[name] = Dump(name.split(":")[0], suffix, content)

    pairs = list(zip(ids, tokens, strict=True))
    add("vllm:jsonl", ".jsonl", _lines([_vllm(*pair) for pair in pairs]))
    add("vllm:array", ".json", json.dumps([_vllm(*pair) for pair in pairs]).encode())
    add("vllm:gzip", ".jsonl.gz", gzip.compress(found["vllm:jsonl"].content, mtime=0))
    add("vllm:npy", ".npy", npy(ids[0].astype(np.uint8)))
    add("sglang:int32", ".jsonl", _lines([_sglang(*pair, "int32") for pair in pairs]))
    add("sglang:uint8", ".jsonl", _lines([_sglang(*pair, "uint8") for pair in pairs]))
    add("megatron", ".jsonl", _written(ids, write_megatron))
    add("arrays:npz", ".npz", _written(ids, write_npz))
    add("arrays:safetensors", ".safetensors", _written(ids, write_safetensors))
    add("slime", ".pt", saved({"rollout_id": 3, "samples": [_slime(*pair) for pair in pairs]}))
    add("verl:tensors", ".pt", saved(_batch(ids, tokens, np.int16, 0)))
    add("verl:numpy", ".pkl", pickle.dumps({k: v.numpy() for k, v in _batch(ids, tokens, np.int16, 0).items()}))
    lengths = {"input_lengths": torch.tensor(LENGTHS)}
    add("nemo-rl", ".pt", saved(_batch(ids, tokens, np.int16, -1) | lengths))
    passes = [
        {"forward_pass_id": at, "rank": 0, "topk_ids_of_layer": torch.from_numpy(each.transpose(1, 0, 2).copy())}
        for at, each in enumerate(ids)
    ]
    identity = torch.arange(NUM_EXPERTS).repeat(LAYERS, 1)
    add("sglang-recorder:tokens", ".pt", saved({"records": passes, "last_physical_to_logical_map": identity}))
    counts = np.stack([[np.bincount(each[:, layer].ravel(), minlength=16) for layer in range(LAYERS)] for each in ids])
    add("sglang-recorder:counts", ".pt", saved({"rank": 0, "logical_count": torch.from_numpy(counts)}))
    cells = ["step,layer_id,expert_id,count"] + [
        f"{step},{layer},{expert},{counts[step, layer, expert]}" for step, layer, expert in np.ndindex(counts.shape)
    ]
    add("counts:csv", ".csv", "\n".join(cells).encode())
    narrow = [each.astype(np.uint8) for each in ids]
    add("home-made:pickle", ".pkl", pickle.dumps(narrow))
    add("home-made:torch", ".pt", saved({"topk_ids": list(map(torch.from_numpy, narrow)), "seed": 3}))
    objects = np.empty(3, object)
    objects[:] = narrow
    add("home-made:objects", ".npy", npy(objects))
    add("home-made:npz", ".npz", _npz(narrow))
    rows = [
        {
            "type": "route",
            "req_id": f"r{at}",
            "token_idx": token,
            "layer": layer,
            "topk_ids": each[token, layer].tolist(),
        }
        for at, each in enumerate(ids)
        for token, layer in np.ndindex(*each.shape[:2])
    ]
    add("home-made:rows", ".jsonl", _lines(rows))
    add("home-made:nested", ".jsonl", _lines([{"prompt": "seven", "expert_ids": each.tolist()} for each in ids]))
    return found


def _npz(arrays: list[Array]) -> bytes:
    file = io.BytesIO()
    np.savez(file, *arrays)
    return file.getvalue()


def npy(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _lines(values: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def _vllm(ids: Array, tokens: list[int]) -> dict[str, Any]:
    choice = {
        "index": 0, "text": "seven", "finish_reason": "stop", "prompt_token_ids": tokens[:PROMPT],
        "token_ids": tokens[PROMPT:], "routed_experts": base64.b64encode(npy(ids.astype(np.uint8))).decode(),
    }  # fmt: skip
    usage = {"prompt_tokens": PROMPT, "completion_tokens": len(tokens) - PROMPT}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}


def _sglang(ids: Array, tokens: list[int], dtype: str) -> dict[str, Any]:
    return {
        "text": "seven",
        "output_ids": tokens[PROMPT:],
        "meta_info": {
            "id": "a",
            "prompt_tokens": PROMPT,
            "completion_tokens": len(tokens) - PROMPT,
            "routed_experts": base64.b64encode(ids.astype(f"<{np.dtype(dtype).str[1:]}").tobytes()).decode(),
            "routed_experts_start_len": 0,
            "routed_experts_dtype": dtype,
        },
    }


def _slime(ids: Array, tokens: list[int]) -> dict[str, Any]:
    return {
        "prompt": "two and five", "tokens": tokens, "response_length": len(tokens) - PROMPT, "reward": 1.0,
        "metadata": {"data_source": "maths"}, "rollout_routed_experts": ids.astype(np.int32),
    }  # fmt: skip


def _batch(ids: list[Array], tokens: list[list[int]], dtype: Any, missing: int) -> dict[str, torch.Tensor]:
    longest = max(LENGTHS)
    routed = np.full((len(ids), longest, LAYERS, TOP_K), missing, dtype)
    words = np.zeros((len(ids), longest), np.int64)
    for row, (each, sequence) in enumerate(zip(ids, tokens, strict=True)):
        routed[row, : len(each)] = each
        words[row, : len(sequence)] = sequence
    return {
        "routed_experts": torch.from_numpy(routed),
        "input_ids": torch.from_numpy(words),
        "attention_mask": torch.from_numpy((words > 0).astype(np.int64)),
    }


def _written(ids: list[Array], write: Callable[[RoutingTrace, Any], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        write(RoutingTrace.from_sequences(ids, num_experts=NUM_EXPERTS), file)
        return file.read_bytes()


def parquet_dump() -> bytes:
    """A trace of our own."""
    return _written(routes(), write_trace)
