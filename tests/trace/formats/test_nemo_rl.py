"""NeMo-RL's batches and message logs: routes of each sequence's tokens, -1 for unknown routes."""

from __future__ import annotations

import pickle
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.import_items import dropped, kept, tokens_of
from helpers.pickled_dumps import claim, pretend, routes
from trimtab import InputError
from trimtab.trace.formats import nemo_rl
from trimtab.trace.formats.importing import format_of
from trimtab.trace.formats.records import Dropped, ImportOptions, Record

LENGTHS, ANSWERS, LAYERS, TOP_K = [7, 12, 1], [3, 5, 1], 4, 3


class BatchedDataDict(UserDict):  # type: ignore[type-arg]
    """As `nemo_rl/distributed/batched_data_dict.py`."""


def batch(num_experts: int, dtype: torch.dtype) -> dict[str, Any]:
    rng = np.random.default_rng(num_experts)
    width = max(LENGTHS)
    # Padding looks like routes.
    ids = np.broadcast_to(np.arange(TOP_K), (len(LENGTHS), width, LAYERS, TOP_K)).copy()
    for row, length in enumerate(LENGTHS):
        ids[row, : length - 1] = routes(rng, length - 1, LAYERS, TOP_K, num_experts)
        ids[row, length - 1] = -1
    ids[1, 3] = -1
    return {
        "input_ids": torch.from_numpy(rng.integers(0, 1000, (len(LENGTHS), width))),
        "input_lengths": torch.tensor(LENGTHS),
        "routed_experts": torch.from_numpy(ids).to(dtype),
        "generation_lengths": torch.tensor(ANSWERS),
        "logprobs": torch.zeros((3, width), dtype=torch.bfloat16),
        "task_name": ["maths", "code", None],
    }


def check(items: list[Record | Dropped], tensors: dict[str, Any]) -> None:
    records = kept(items)
    assert [record.domain for record in records] == ["maths", "code", ""]
    for row, record in enumerate(records):
        length = LENGTHS[row]
        assert np.array_equal(record.ids, tensors["routed_experts"][row, :length].numpy())
        assert tokens_of(record) == tensors["input_ids"][row, :length].tolist()
        assert (record.num_tokens, record.prompt_length) == (length, length - ANSWERS[row])
    assert dropped(items) == {"padding rows": sum(max(LENGTHS) - length for length in LENGTHS)}


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(128, torch.int8), (256, torch.int16), (384, torch.int16), (384, torch.int32)]
)
def test_batches(tmp_path: Path, num_experts: int, dtype: torch.dtype) -> None:
    tensors = batch(num_experts, dtype)
    torch.save(tensors, tmp_path / "a.pt")
    with pretend(claim("nemo_rl.distributed.batched_data_dict", "BatchedDataDict", BatchedDataDict)):
        torch.save(BatchedDataDict(tensors), tmp_path / "b.pt")
        (tmp_path / "c.pkl").write_bytes(pickle.dumps(BatchedDataDict(tensors)))
    for name in ("a.pt", "b.pt", "c.pkl"):
        assert format_of(tmp_path / name) == "nemo-rl"
        check(list(nemo_rl.read(tmp_path / name, ImportOptions())), tensors)
    check(list(nemo_rl.records_of_batch(BatchedDataDict(tensors))), tensors)


def test_message_logs(tmp_path: Path) -> None:
    """A prompt without routes, two answers and a tool's reply: their rows follow each other."""
    rng = np.random.default_rng(0)
    turns = [("user", 4, None), ("assistant", 5, 5), ("tool", 3, 3), ("assistant", 6, 5)]
    log = []
    for role, tokens, rows in turns:
        message: dict[str, Any] = {"role": role, "token_ids": torch.from_numpy(rng.integers(0, 100, tokens))}
        if rows is not None:
            message["routed_experts"] = torch.from_numpy(routes(rng, rows, LAYERS, TOP_K, 64)).to(torch.int8)
        log.append(message)
    torch.save({"message_log": [log, log[:1]], "task_name": ["maths", "code"]}, tmp_path / "a.pt")
    assert format_of(tmp_path / "a.pt") == "nemo-rl"
    from_file = nemo_rl.read(tmp_path / "a.pt", ImportOptions())
    for items in (from_file, nemo_rl.records_of_batch([{"message_log": log, "task_name": "maths"}])):
        (record,) = kept(items)
        assert record.ids.shape == (18, LAYERS, TOP_K)
        assert (record.ids[:4] == -1).all()
        assert np.array_equal(record.ids[4:9], log[1]["routed_experts"])
        assert np.array_equal(record.ids[12:17], log[3]["routed_experts"])
        assert (record.ids[17] == -1).all()
        assert (record.num_tokens, record.prompt_length, record.domain) == (18, 4, "maths")
        assert tokens_of(record) == torch.cat([message["token_ids"] for message in log]).tolist()


def test_routes_one_row_short_of_the_longest() -> None:
    """The last token has none."""
    tensors = batch(64, torch.int16)
    items = list(nemo_rl.records_of_batch(tensors | {"routed_experts": tensors["routed_experts"][:, :-1]}))
    records = kept(items)
    assert [(len(record.ids), record.num_tokens) for record in records] == [(7, 7), (11, 12), (1, 1)]
    assert dropped(items) == {"padding rows": 4 + 10}


def test_rows_without_tokens_are_dropped_with_their_labels() -> None:
    tensors = batch(64, torch.int16) | {"input_lengths": torch.tensor([0, 12, 1])}
    records = kept(nemo_rl.records_of_batch(tensors))
    assert [(record.where, record.domain) for record in records] == [("row 1", "code"), ("row 2", "")]


def test_messages_without_an_answer_are_all_prompt() -> None:
    log = [{"role": "user", "token_ids": [1, 2, 3], "routed_experts": np.zeros((3, 1, 2), np.int8)}] * 2
    (record,) = kept(nemo_rl.records_of_batch([{"message_log": log}]))
    assert (record.num_tokens, record.prompt_length) == (6, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_experts": None}, "no 'routed_experts'.*router_replay"),
        ({"input_lengths": None}, "lengths .* are missing"),
        ({"input_lengths": torch.tensor([7, 14, 1])}, "row 1: a length of 14 tokens; routed_experts has 12 rows"),
        ({"input_lengths": torch.tensor([7, 12])}, "lengths has 2 rows; routed_experts has 3"),
        ({"routed_experts": torch.zeros(3, 12)}, "float32; it should hold integers"),
    ],
)
def test_invalid_batches_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kept(nemo_rl.records_of_batch(batch(64, torch.int8) | change))
