"""Batches as frameworks hold them after a rollout; `docs/observe.md` names the file and version read for each."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ModelSpec

EXPERTS, LAYERS, TOP_K, PROMPT = 16, 3, 2, 2
MODEL = ModelSpec("small", EXPERTS, TOP_K, 64, 32, moe_layers=LAYERS)


def random_sequences(rng: np.random.Generator, count: int, longest: int = 40) -> list[Array]:
    """Recorded ids `[t, LAYERS, TOP_K]` int32 of sequences with t + 1 tokens, the first two of the prompt. The first
    row is not that of any padding."""
    sequences = []
    for length in rng.integers(2, longest, count).tolist():
        ids = np.argsort(rng.random((length, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.int32)
        ids[0] = ids[-1] = [3, 5]
        sequences.append(ids)
    return sequences


def _padded(sequences: Sequence[Array], fill: Array, dtype: Any, *, left: bool = False) -> tuple[Array, Array, Array]:
    """Routes `[B, T, L, K]`, tokens fed `[B, T]`, generated tokens `[B, T]`."""
    width = max(map(len, sequences)) + 3
    routes = np.broadcast_to(fill, (len(sequences), width, LAYERS, TOP_K)).astype(dtype)
    fed, generated = np.zeros((2, len(sequences), width), np.int64)
    for row, ids in enumerate(sequences):
        start = width - len(ids) - 1 if left else 0
        routes[row, start : start + len(ids)] = ids
        fed[row, start : start + len(ids) + 1] = 1
        generated[row, start + PROMPT : start + len(ids) + 1] = 1
    return routes, fed, generated


def verl(sequences: Sequence[Array]) -> Any:
    routes, fed, _ = _padded(sequences, np.zeros(TOP_K), np.int16)
    batch = {"routed_experts": routes, "attention_mask": fed, "prompts": np.zeros((len(sequences), PROMPT), np.int64)}
    labels = {"data_source": np.array(["math"] * len(sequences), object)}
    return SimpleNamespace(batch=batch, non_tensor_batch=labels, meta_info={})


def verl_nested(sequences: Sequence[Array]) -> Any:
    import torch

    def nested(parts: Sequence[Array]) -> Any:
        return torch.nested.as_nested_tensor([torch.from_numpy(part) for part in parts], layout=torch.jagged)

    rows = [np.concatenate([ids, np.zeros((1, LAYERS, TOP_K), np.int32)]).astype(np.int16) for ids in sequences]
    return {"routed_experts": nested(rows), "prompts": nested([np.zeros(PROMPT, np.int64)] * len(sequences))}


def slime(sequences: Sequence[Array]) -> Any:
    import torch

    samples = [
        SimpleNamespace(
            rollout_routed_experts=torch.from_numpy(ids), tokens=[1] * (len(ids) + 1),
            response_length=len(ids) + 1 - PROMPT, metadata={"data_source": "math"},
        )
        for ids in sequences
    ]  # fmt: skip
    return [samples[:2], samples[2:]]


def miles(sequences: Sequence[Array]) -> Any:
    return [
        {"rollout_routed_experts": ids, "tokens": [1] * (len(ids) + 1), "response_length": len(ids) + 1 - PROMPT}
        for ids in sequences
    ]


def nemo_rl(sequences: Sequence[Array]) -> Any:
    routes, fed, _ = _padded(sequences, np.zeros(TOP_K), np.int8)
    for row, ids in enumerate(sequences):
        routes[row, len(ids)] = np.arange(TOP_K)
    lengths = fed.sum(axis=1)
    return {"routed_experts": routes, "input_lengths": lengths, "generation_lengths": lengths - PROMPT}


def nemo_rl_messages(sequences: Sequence[Array]) -> Any:
    return [
        {
            "message_log": [
                {"role": "user", "token_ids": np.zeros(PROMPT, np.int64), "routed_experts": ids[:PROMPT]},
                {"role": "assistant", "token_ids": np.zeros(len(ids) - 1, np.int64), "routed_experts": ids[PROMPT:]},
            ]
        }
        for ids in sequences
    ]


def skyrl(sequences: Sequence[Array]) -> Any:
    routes, fed, generated = _padded(sequences, np.arange(TOP_K), np.uint8, left=True)
    without = fed == 0
    without[:, -1] = True
    return {
        "rollout_expert_indices": routes, "router_padding_mask": without, "attention_mask": fed,
        "response_mask": generated,
    }  # fmt: skip


def skyrl_list(sequences: Sequence[Array]) -> Any:
    return {
        "rollout_expert_indices": [ids.astype(np.uint8) for ids in sequences],
        "prompt_token_ids": [[1] * PROMPT for _ in sequences],
        "response_ids": [[1] * (len(ids) + 1 - PROMPT) for ids in sequences],
    }


def roll(sequences: Sequence[Array]) -> Any:
    routes, fed, generated = _padded(sequences, np.zeros(TOP_K), np.uint8)
    batch = {"routed_experts": routes, "attention_mask": fed, "response_mask": generated}
    return SimpleNamespace(batch=batch, non_tensor_batch={"domain": np.array(["math"] * len(sequences))}, meta_info={})


def ms_swift(sequences: Sequence[Array]) -> Any:
    return [SimpleNamespace(routed_experts=ids, encoded={"length": len(ids) + 1}) for ids in sequences]


def trl(sequences: Sequence[Array]) -> Any:
    lists = skyrl_list(sequences)
    return {
        "routed_experts": list(sequences), "prompt_ids": lists["prompt_token_ids"],
        "completion_ids": lists["response_ids"],
    }  # fmt: skip


def vllm(sequences: Sequence[Array]) -> Any:
    return [
        SimpleNamespace(
            prompt_token_ids=[1] * PROMPT,
            outputs=[SimpleNamespace(token_ids=[1] * (len(ids) + 1 - PROMPT), routed_experts=ids.astype(np.uint8))],
        )
        for ids in sequences
    ]


def sglang(sequences: Sequence[Array]) -> Any:
    return [
        {
            "text": "...",
            "meta_info": {
                "prompt_tokens": PROMPT,
                "completion_tokens": len(ids) + 1 - PROMPT,
                "routed_experts": base64.b64encode(ids.tobytes()).decode(),
            },
        }
        for ids in sequences
    ]


BATCHES: dict[str, tuple[str, Callable[[Sequence[Array]], Any]]] = {
    made.__name__: (name, made)
    for name, made in [
        ("verl", verl), ("verl", verl_nested), ("slime", slime), ("miles", miles), ("nemo-rl", nemo_rl),
        ("nemo-rl", nemo_rl_messages), ("skyrl", skyrl), ("skyrl", skyrl_list), ("roll", roll),
        ("ms-swift", ms_swift), ("trl", trl), ("vllm", vllm), ("sglang", sglang),
    ]
}  # fmt: skip
"""By form: the framework's name, and the function that makes a batch of sequences."""
PADDED = ("verl", "nemo_rl", "skyrl", "roll")
