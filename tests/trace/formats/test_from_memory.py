"""Traces of objects in memory, without a file."""

from __future__ import annotations

import base64
from collections import UserDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.import_items import dropped
from trimtab.errors import InputError
from trimtab.trace import ImportOptions
from trimtab.trace.formats import from_memory
from trimtab.trace.formats.dump_fields import field, whole_number

EXPERTS, LAYERS, TOP_K = 16, 3, 2
KNOWN = ImportOptions(EXPERTS, LAYERS, TOP_K)
PROMPT, ANSWER = [11, 12], [13, 14, 15]


def ids(rows: int) -> Any:
    rng = np.random.default_rng(5)
    return np.argsort(rng.random((rows, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.int32)


ROWS = ids(4)
PADDED = np.concatenate([ROWS, np.full((1, LAYERS, TOP_K), -1, np.int32)])[None]
FILLER = np.broadcast_to(np.arange(TOP_K, dtype=np.int32), (1, 3, LAYERS, TOP_K))
MADE: dict[str, Any] = {
    "from_vllm": [{"prompt_token_ids": PROMPT, "outputs": [{"token_ids": ANSWER, "routed_experts": ROWS}]}],
    "from_sglang": [{
        "output_ids": ANSWER, "meta_info": {
            "prompt_tokens": 2, "completion_tokens": 3, "routed_experts": base64.b64encode(ROWS.tobytes()).decode(),
        },
    }],
    "from_verl": {
        "routed_experts": PADDED, "attention_mask": np.ones((1, 5), np.int64), "input_ids": np.array([PROMPT + ANSWER]),
        "responses": np.array([ANSWER]),
    },
    "from_slime": [{"tokens": PROMPT + ANSWER, "response_length": 3, "rollout_routed_experts": ROWS}],
    "from_nemo_rl": {
        "routed_experts": PADDED, "input_lengths": np.array([5]), "generation_lengths": np.array([3]),
        "input_ids": np.array([PROMPT + ANSWER]),
    },
    # What SkyRL's `preprocess.py` makes: padded on the left, and the last token like that padding.
    "from_skyrl": {
        "rollout_expert_indices": np.concatenate([FILLER[:, :2], ROWS[None], FILLER[:, :1]], axis=1),
        "router_padding_mask": np.array([[1, 1, 0, 0, 0, 0, 1]], bool),
        "attention_mask": np.array([[0, 0, 1, 1, 1, 1, 1]]),
        "response_mask": np.array([[1, 1, 1]]),
    },
    "from_roll": {
        "routed_experts": np.concatenate([ROWS[None], 0 * FILLER], axis=1),
        "attention_mask": np.array([[1, 1, 1, 1, 1, 0, 0]]),
        "response_mask": np.array([[0, 0, 1, 1, 1, 0, 0]]),
    },
    "from_trl": {"prompt_ids": [PROMPT], "completion_ids": [ANSWER], "routed_experts": [ROWS]},
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_objects_in_memory_become_a_trace(name: str) -> None:
    trace = getattr(from_memory, name)(MADE[name], KNOWN)
    np.testing.assert_array_equal(np.sort(trace.expert_ids, axis=2), np.sort(ROWS, axis=2))
    assert trace.prompt_lengths.tolist() == [2]
    with pytest.raises(InputError, match="they should be 0 to"):
        getattr(from_memory, name)(MADE[name], ImportOptions(int(ROWS.max()), LAYERS, TOP_K))


def test_skyrl_s_trajectories() -> None:
    # Of the second, the last answer's token was not generated after its last recorded one.
    made = {
        "rollout_expert_indices": [ROWS.astype(np.uint8), ROWS[:3], None],
        "prompt_token_ids": [PROMPT] * 3,
        "response_ids": [ANSWER] * 3,
    }
    trace = from_memory.from_skyrl(made, KNOWN)
    assert trace.sequence_lengths.tolist() == [4, 4]
    np.testing.assert_array_equal(trace.sequence(0), ROWS)
    np.testing.assert_array_equal(trace.sequence(1)[:3], ROWS[:3])
    assert (trace.sequence(1)[3] == trace.no_route).all()


def test_skyrl_s_rows_of_filler_have_no_routes() -> None:
    batch = MADE["from_skyrl"]
    doubled = {name: np.concatenate([value, value]) for name, value in batch.items()}
    doubled["router_padding_mask"][1] = True
    assert from_memory.from_skyrl(doubled, KNOWN).num_sequences == 1
    with pytest.raises(InputError, match="router_padding_mask, which tells them, is missing"):
        from_memory.from_skyrl(batch | {"router_padding_mask": None}, KNOWN)


def test_roll_s_rows_of_a_resumed_generation_are_refused() -> None:
    batch = MADE["from_roll"] | {"routed_experts": np.concatenate([ROWS[:3], ROWS])[None]}
    with pytest.raises(InputError, match="row 0: 2 rows of routed_experts behind those of its 5 tokens: ROLL appends"):
        from_memory.from_roll(batch, KNOWN)


@pytest.mark.parametrize("rows", [4, 5])
def test_ms_swift_s_samples(rows: int) -> None:
    padded = np.concatenate([ROWS, np.zeros((1, LAYERS, TOP_K), np.int32)])
    samples = [{"routed_experts": padded[:rows], "encoded": {"length": 5}}, {"routed_experts": None}]
    np.testing.assert_array_equal(from_memory.from_ms_swift(samples, KNOWN).expert_ids, ROWS)
    with pytest.raises(InputError, match="--router_replay_mode R3"):
        from_memory.from_ms_swift(samples[1:], KNOWN)


@pytest.mark.parametrize("name", ["from_vllm", "from_sglang", "from_trl", "from_ms_swift"])
def test_rows_for_a_part_of_the_tokens_are_refused_or_placed_as_told(name: str) -> None:
    part = ROWS[2:]
    batch: Any = {
        "from_vllm": [{"prompt_token_ids": PROMPT, "outputs": [{"token_ids": ANSWER, "routed_experts": part}]}],
        "from_sglang": [{"meta_info": {
            "prompt_tokens": 2, "completion_tokens": 3, "routed_experts": base64.b64encode(part.tobytes()).decode(),
        }}],
        "from_trl": {"prompt_ids": [PROMPT], "completion_ids": [ANSWER], "routed_experts": [part]},
        "from_ms_swift": [{"routed_experts": part, "encoded": {"length": 5}}],
    }[name]  # fmt: skip
    with pytest.raises(InputError, match=r" 0: 2 rows of expert ids for 5 tokens; 4 are expected"):
        getattr(from_memory, name)(batch, KNOWN)
    trace = getattr(from_memory, name)(batch, replace(KNOWN, rows_at="end"))
    np.testing.assert_array_equal(trace.expert_ids[2:], part)
    assert (trace.expert_ids[:2] == trace.no_route).all()


def test_nemo_rl_s_turns_of_an_environment_at_the_end_have_no_routes() -> None:
    filler = np.broadcast_to(np.arange(TOP_K, dtype=np.int32), (3, LAYERS, TOP_K))
    batch = {"routed_experts": np.concatenate([ROWS, filler])[None], "input_lengths": np.array([7])}
    assert dropped(from_memory.READERS["nemo-rl"](batch, KNOWN)) == {}
    trace = from_memory.from_nemo_rl(batch, KNOWN)
    np.testing.assert_array_equal(trace.expert_ids[:4], ROWS)
    assert len(trace.expert_ids) == 6
    assert (trace.expert_ids[4:] == trace.no_route).all()


def test_fields_of_mappings_of_any_library_and_numbers() -> None:
    source = UserDict({"steps": 0})
    assert field(source, "steps") == 0
    assert field(source, "other", 3) == 3
    assert [whole_number(value, 5) for value in (0, np.array([7]), -1, 1 << 31, True, "1")] == [0, 7, 5, 5, 5, 5]
