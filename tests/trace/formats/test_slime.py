"""Dumps of slime and miles: routes, tokens, prompt length and label of every sample."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.import_items import dropped, kept, tokens_of
from helpers.pickled_dumps import claim, pretend, routes
from trimtab import InputError
from trimtab.trace.formats import slime
from trimtab.trace.formats.importing import format_of
from trimtab.trace.formats.records import Dropped, ImportOptions, Record

LAYERS, TOP_K = 5, 4


class Sample:
    """As `slime/utils/types.py` pickles it: an object with a dictionary."""

    class Status(enum.Enum):
        COMPLETED = "completed"

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def samples(num_experts: int = 128, top_k: int = TOP_K, seed: int = 0) -> list[dict[str, Any]]:
    """Two groups of two that share a prompt, one sample without routes, one that a partial rollout left short."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(4):
        prompt = np.random.default_rng(index // 2).integers(0, 150_000, 7).tolist()
        answer = rng.integers(0, 150_000, int(rng.integers(1, 90))).tolist()
        tokens = prompt + answer
        ids = routes(rng, len(tokens) - 1, LAYERS, top_k, num_experts).astype(np.int32)
        ids[:, 0] = 0  # a dense layer
        metadata = {"data_source": "maths" if index < 2 else "code", "other": [1, {"a": None}]}
        made.append({
            "group_index": index // 2, "index": index, "prompt": "What is 1 + 1?", "tokens": tokens,
            "response": "≈ 2 🙂", "response_length": len(answer), "reward": 1.0, "loss_mask": [1] * len(answer),
            "rollout_log_probs": rng.random(len(answer)).tolist(), "status": "completed", "rollout_routed_experts": ids,
            "metadata": metadata, "spec_info": {"spec_accept_token_num": 0},
        })  # fmt: skip
    made[1]["rollout_routed_experts"] = None
    made[2]["rollout_routed_experts"] = made[2]["rollout_routed_experts"][:-3]
    made[3]["rollout_routed_experts"][2] = -1
    return made


def check(items: list[Record | Dropped], expected: list[dict[str, Any]], step: int) -> None:
    whole = [sample for sample in expected if sample["rollout_routed_experts"] is not None]
    records = kept(items)
    assert len(records) == len(whole)
    for record, sample in zip(records, whole, strict=True):
        assert np.array_equal(record.ids, sample["rollout_routed_experts"])
        assert record.num_tokens == len(sample["tokens"])
        assert record.prompt_length == len(sample["tokens"]) - sample["response_length"]
        assert tokens_of(record) == sample["tokens"]
        assert (record.step, record.first) == (step, 0)
        assert record.domain == (sample["metadata"] or {}).get("data_source", "")
    assert dropped(items) == {"samples without routes": 1}


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 1), (128, 4), (255, 4), (256, 4), (257, 4), (384, 4)])
def test_debug_rollout_data(tmp_path: Path, num_experts: int, top_k: int) -> None:
    expected = samples(num_experts, top_k)
    torch.save({"rollout_id": 17, "samples": expected}, tmp_path / "17.pt")
    assert format_of(tmp_path / "17.pt") == "slime"
    check(list(slime.read(tmp_path / "17.pt", ImportOptions())), expected, 17)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickled_sample_objects_without_their_class(tmp_path: Path, protocol: int) -> None:
    expected = samples()
    claim("slime.utils.types", "Sample", Sample)
    claim("slime.utils.types", "Sample.Status", Sample.Status)
    with pretend(Sample, Sample.Status):
        objects = [Sample(**{**sample, "status": Sample.Status.COMPLETED}) for sample in expected]
        (tmp_path / "a.pkl").write_bytes(pickle.dumps([objects[:2], objects[2:]], protocol))
    assert format_of(tmp_path / "a.pkl") == "slime"
    check(list(slime.read(tmp_path / "a.pkl", ImportOptions())), expected, 0)


def test_training_data_in_columns(tmp_path: Path) -> None:
    expected = [sample for sample in samples() if sample["rollout_routed_experts"] is not None]
    columns = {
        "tokens": [torch.tensor(sample["tokens"]) for sample in expected],
        "response_lengths": [sample["response_length"] for sample in expected],
        "rollout_routed_experts": [torch.from_numpy(sample["rollout_routed_experts"]) for sample in expected],
        "loss_masks": [torch.ones(3, dtype=torch.bfloat16)] * 3,
    }
    torch.save({"rollout_id": 3, "rank": 0, "rollout_data": columns}, tmp_path / "a.pt")
    records = kept(slime.read(tmp_path / "a.pt", ImportOptions()))
    assert [record.prompt_length for record in records] == [7, 7, 7]
    assert all(np.array_equal(r.ids, s["rollout_routed_experts"]) for r, s in zip(records, expected, strict=True))


def test_objects_in_memory_lists_and_flat_ids() -> None:
    expected = samples()
    check(list(slime.records_of_samples([Sample(**sample) for sample in expected], step=2)), expected, 2)
    flat = [sample | {"rollout_routed_experts": ids if ids is None else ids.ravel()}
            for sample in expected for ids in [sample["rollout_routed_experts"]]]  # fmt: skip
    check(list(slime.records_of_samples(flat, options=ImportOptions(num_layers=LAYERS, top_k=TOP_K))), expected, 0)
    with pytest.raises(InputError, match=r"sample 0: .* has no shape; give --num-layers and --top-k"):
        kept(slime.records_of_samples(flat))
    lists = [{**expected[0], "rollout_routed_experts": expected[0]["rollout_routed_experts"].tolist()}]
    assert np.array_equal(kept(slime.records_of_samples(lists))[0].ids, expected[0]["rollout_routed_experts"])


def test_labels_and_lengths_are_optional() -> None:
    one = samples()[0]
    del one["response_length"]
    labels: list[tuple[Any, str]] = [
        ({"rm_type": "math", "dataset": "gsm8k", "data_source": "openai/gsm8k"}, "openai/gsm8k"),
        ({"rm_type": "math", "data_source": ""}, "math"),
        ({"data_source": 3}, ""),
        (None, ""),
    ]
    for metadata, label in labels:
        (record,) = kept(slime.records_of_samples([{**one, "metadata": metadata}]))
        assert (record.domain, record.prompt_length) == (label, 0)


def test_groups_of_groups_and_samples_without_tokens() -> None:
    one, _, two, three = samples()
    nested = [[[one], [{**two, "tokens": None}]], three]
    items = list(slime.records_of_samples(nested))
    records = kept(items)
    assert [record.where for record in records] == ["sample 0", "sample 2"]
    assert dropped(items) == {"samples without routes": 1}
    deep: Any = one
    for _ in range(6):
        deep = [deep]
    with pytest.raises(InputError, match="nested too deeply"):
        kept(slime.records_of_samples(deep))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_routed_experts": np.zeros((3, 2, 2, 1), np.int32)}, r"sample 0.*\[3, 2, 2, 1\]; it should have"),
        ({"rollout_routed_experts": np.zeros((3, 2, 2))}, "float64; it should hold integers"),
        ({"rollout_routed_experts": "abc"}, "a str; it should be an array"),
        ({"rollout_routed_experts": [[[1], [2, 3]]]}, "different lengths"),
        ({"tokens": [1.5]}, "sample 0: token ids should be whole numbers; there is a number"),
        ({"tokens": {"a": 1}}, "should be an array"),
    ],
)
def test_errors_name_the_sample(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kept(slime.records_of_samples([{**samples()[0], **change}]))


def test_dumps_without_routes_are_refused_with_a_hint(tmp_path: Path) -> None:
    torch.save({"rollout_id": 1, "samples": [{**s, "rollout_routed_experts": None} for s in samples()]}, tmp_path / "a")
    with pytest.raises(InputError, match=r"none of its 4 samples.*--use-rollout-routing-replay"):
        kept(slime.read(tmp_path / "a", ImportOptions()))
    torch.save({"rollout_id": 1, "samples": []}, tmp_path / "a")
    assert kept(slime.read(tmp_path / "a", ImportOptions())) == []
