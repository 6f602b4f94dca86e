"""Traces of objects in memory, without a file."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from trimtab.errors import InputError
from trimtab.trace import ImportOptions
from trimtab.trace.formats import from_memory

EXPERTS, LAYERS, TOP_K = 16, 3, 2
KNOWN = ImportOptions(EXPERTS, LAYERS, TOP_K)
PROMPT, ANSWER = [11, 12], [13, 14, 15]


def ids(rows: int) -> Any:
    rng = np.random.default_rng(5)
    return np.argsort(rng.random((rows, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.int32)


ROWS = ids(4)
PADDED = np.concatenate([ROWS, np.full((1, LAYERS, TOP_K), -1, np.int32)])[None]
MADE = {
    "from_vllm": [{"prompt_token_ids": PROMPT, "outputs": [{"token_ids": ANSWER, "routed_experts": ROWS}]}],
    "from_sglang": [
        {
            "output_ids": ANSWER,
            "meta_info": {
                "prompt_tokens": 2,
                "completion_tokens": 3,
                "routed_experts": base64.b64encode(ROWS.tobytes()).decode(),
            },
        }
    ],
    "from_verl": {
        "routed_experts": PADDED,
        "attention_mask": np.ones((1, 5), np.int64),
        "input_ids": np.array([PROMPT + ANSWER]),
        "responses": np.array([ANSWER]),
    },
    "from_slime": [{"tokens": PROMPT + ANSWER, "response_length": 3, "rollout_routed_experts": ROWS}],
    "from_nemo_rl": {
        "routed_experts": PADDED,
        "input_lengths": np.array([5]),
        "generation_lengths": np.array([3]),
        "input_ids": np.array([PROMPT + ANSWER]),
    },
}


@pytest.mark.parametrize("name", MADE)
def test_objects_in_memory_become_a_trace(name: str) -> None:
    trace = getattr(from_memory, name)(MADE[name], KNOWN)
    np.testing.assert_array_equal(np.sort(trace.expert_ids, axis=2), np.sort(ROWS, axis=2))
    assert trace.prompt_lengths.tolist() == [2]
    with pytest.raises(InputError, match="they should be 0 to"):
        getattr(from_memory, name)(MADE[name], ImportOptions(int(ROWS.max()), LAYERS, TOP_K))
