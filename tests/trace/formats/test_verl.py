"""verl's batches in every layout: the rows without padding are imported, in order."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.import_items import dropped, kept, survives, tokens_of
from helpers.pickled_dumps import claim, pretend, routes, saved
from trimtab import InputError
from trimtab.trace.formats import nemo_rl, sglang_recorder, slime, verl
from trimtab.trace.formats.importing import format_of
from trimtab.trace.formats.records import Dropped, ImportOptions, Record

PROMPT, RESPONSE, LAYERS, TOP_K = 6, 10, 4, 3
SOURCES = ["maths", "maths", "code", "", "chat"]


class DataProto:
    """As `verl/protocol.py`: pickled as the bytes of its batch, its labels and facts."""

    def __init__(self, batch: Any, non_tensor_batch: dict[str, Any], meta_info: dict[str, Any]) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info


class TorchDataProto(DataProto):
    def __getstate__(self) -> Any:
        content = io.BytesIO()
        torch.save(self.batch, content)
        return content.getvalue(), self.non_tensor_batch, self.meta_info


class NumpyDataProto(DataProto):
    def __getstate__(self) -> Any:
        encoded = {
            key: (str(value.dtype)[6:], tuple(value.shape), value.flatten().view(torch.uint8).numpy())
            for key, value in self.batch.tensors.items()
        }
        return ((len(SOURCES),), None, encoded), self.non_tensor_batch, self.meta_info


class OldDataProto(DataProto):
    def __getstate__(self) -> Any:
        arrays = {key: value.numpy() for key, value in self.batch.tensors.items() if value.dtype != torch.bfloat16}
        return pickle.dumps(arrays), self.non_tensor_batch, self.meta_info


class TensorDict:
    """As tensordict pickles it, before it is consolidated."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def __reduce__(self) -> Any:
        state = {"_tensordict": self.tensors, "_batch_size": torch.Size([len(SOURCES)]), "_device": None}
        return _make_td, (TensorDict, state)


class ConsolidatedTensorDict(TensorDict):
    """As tensordict pickles it afterwards: one storage of bytes, and where in it every tensor lies."""

    def __reduce__(self) -> Any:
        leaves, parts, at = {}, [], 0
        for key, value in self.tensors.items():
            content = value.contiguous().flatten().view(torch.uint8)
            padding = -len(content) % 8
            leaves[key] = (str(value.dtype), list(value.shape), at, at + len(content), 0)
            parts += [content, torch.zeros(padding, dtype=torch.uint8)]
            at += len(content) + padding
        facts = {"device": None, "names": None, "batch_size": [len(SOURCES)], "is_locked": False}
        metadata = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": facts, "size": at}
        return _rebuild_tensordict_files_consolidated, (metadata, torch.cat(parts))


class EarlierTensorDict:
    """As tensordict before 0.5 pickles it: its state, whose tensors are in a dictionary of a class of its own."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def __getstate__(self) -> Any:
        return {"_tensordict": _StringOnlyDict(self.tensors), "_batch_size": torch.Size([len(SOURCES)])}


class _StringOnlyDict(dict[str, Any]):
    pass


def _make_td(cls: Any, state: Any) -> Any:
    raise AssertionError("never run")


def _rebuild_tensordict_files_consolidated(metadata: Any, storage: Any) -> Any:
    raise AssertionError("never run")


claim("tensordict.utils", "_StringOnlyDict", _StringOnlyDict)
claim("tensordict._reductions", "_make_td", _make_td)
claim("tensordict._reductions", "_rebuild_tensordict_files_consolidated", _rebuild_tensordict_files_consolidated)


def pretended(kind: type[DataProto]) -> Any:
    classes = claim("verl.protocol", "DataProto", kind), claim("tensordict._td", "TensorDict", TensorDict)
    earlier = claim("tensordict.tensordict", "TensorDict", EarlierTensorDict), _StringOnlyDict
    return *classes, *earlier, _make_td, _rebuild_tensordict_files_consolidated


def batch(num_experts: int = 128, dtype: torch.dtype = torch.int16, top_k: int = TOP_K) -> dict[str, torch.Tensor]:
    """Five rows: two of a group with one prompt, a full one, a padding row, and one that stopped at once."""
    rng = np.random.default_rng(num_experts)
    prompts, responses = [4, 4, PROMPT, 0, 1], [3, 7, RESPONSE, 0, 1]
    width = PROMPT + RESPONSE
    ids = np.zeros((len(prompts), width, LAYERS, top_k), np.int64)
    mask, tokens = np.zeros((len(prompts), width), np.int64), np.full((len(prompts), width), 99, np.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        place = slice(PROMPT - prompt, PROMPT + response)
        mask[row, place] = 1
        tokens[row, place] = rng.integers(0, 1000, prompt + response)
        # The last token has no route.
        length = max(0, prompt + response - 1)
        ids[row, PROMPT - prompt : PROMPT - prompt + length] = routes(rng, length, LAYERS, top_k, num_experts)
    tokens[1, 2:6] = tokens[0, 2:6]
    ids[2, 5] = 0  # a row that was not recorded
    return {
        "prompts": torch.from_numpy(tokens[:, :PROMPT]),
        "responses": torch.from_numpy(tokens[:, PROMPT:]),
        "input_ids": torch.from_numpy(tokens),
        "attention_mask": torch.from_numpy(mask),
        "routed_experts": torch.from_numpy(ids).to(dtype),
        "old_log_probs": torch.zeros((len(prompts), RESPONSE), dtype=torch.bfloat16),
    }


LABELS = {"data_source": np.array(SOURCES, object), "extra": np.array([{"a": 1}, None, [], "", 2.0], object)}
FACTS = {"global_steps": 12, "temperature": 1.0}


def check(items: list[Record | Dropped], tensors: dict[str, torch.Tensor], labelled: bool = True) -> None:
    """Against the mask, one token after another."""
    whole = [row for row in range(len(SOURCES)) if tensors["attention_mask"][row].any()]
    records = kept(items)
    assert [record.where for record in records] == [f"row {row}" for row in whole]
    for record, row in zip(records, whole, strict=True):
        places = [place for place in range(PROMPT + RESPONSE) if tensors["attention_mask"][row, place]]
        assert np.array_equal(record.ids, tensors["routed_experts"][row, places].numpy())
        assert tokens_of(record) == tensors["input_ids"][row, places].tolist()
        assert (record.num_tokens, record.first) == (len(places), 0)
        assert record.prompt_length == sum(place < PROMPT for place in places)
        assert (record.step, record.domain) == ((12, SOURCES[row]) if labelled else (0, ""))
    padding = int((tensors["attention_mask"] == 0).sum())
    assert dropped(items) == {"padding rows": padding, "empty sequences": 1}


@pytest.mark.parametrize("num_experts", [8, 255, 256, 257, 384])
@pytest.mark.parametrize("kind", [TorchDataProto, NumpyDataProto, OldDataProto])
@pytest.mark.parametrize("tensor_dict", [TensorDict, ConsolidatedTensorDict, EarlierTensorDict])
def test_data_protos(tmp_path: Path, num_experts: int, kind: type[DataProto], tensor_dict: type[Any]) -> None:
    tensors = batch(num_experts)
    with pretend(*pretended(kind)):
        content = kind(tensor_dict(tensors), LABELS, FACTS)
        (tmp_path / "a.pkl").write_bytes(pickle.dumps(content))
        torch.save(content, tmp_path / "b.pt")
    for name in ("a.pkl", "b.pt"):
        check(list(verl.read(tmp_path / name, ImportOptions())), tensors)
        assert format_of(tmp_path / name) == "verl"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("top_k", [1, TOP_K])
def test_dictionaries_and_arrays(tmp_path: Path, dtype: torch.dtype, top_k: int) -> None:
    tensors = batch(200, dtype, top_k)
    torch.save(tensors, tmp_path / "a.pt")
    torch.save({"batch": tensors, "non_tensor_batch": LABELS, "meta_info": FACTS}, tmp_path / "b.pt")
    with pretend(*pretended(DataProto)):
        torch.save(ConsolidatedTensorDict(tensors), tmp_path / "c.pt")
    arrays: dict[str, Any] = {key: value.numpy() for key, value in tensors.items() if value.dtype != torch.bfloat16}
    np.savez(tmp_path / "d.npz", **arrays)
    np.savez_compressed(tmp_path / "e.npz", **arrays)
    for name in ("a.pt", "b.pt", "c.pt", "d.npz", "e.npz"):
        assert verl.recognise(tmp_path / name), name
        assert not any(other.recognise(tmp_path / name) for other in (slime, nemo_rl, sglang_recorder))
        check(list(verl.read(tmp_path / name, ImportOptions())), tensors, labelled=name == "b.pt")
    check(list(verl.records_of_batch(DataProto(tensors, LABELS, FACTS))), tensors)


def test_rows_of_zeros_at_both_ends_of_bare_arrays_are_dropped(tmp_path: Path) -> None:
    tensors = batch()
    np.save(tmp_path / "a.npy", tensors["routed_experts"].numpy())
    assert verl.recognise(tmp_path / "a.npy")
    records = kept(verl.read(tmp_path / "a.npy", ImportOptions()))
    # The last token of a row has no route, so it is not seen, and neither is the row of a single token.
    lengths = tensors["attention_mask"].sum(dim=1).tolist()
    assert [len(record.ids) for record in records] == [length - 1 for length in lengths if length > 1]
    assert all(record.num_tokens is None and record.token_ids is None for record in records)
    assert np.array_equal(records[0].ids, tensors["routed_experts"][0, 2:8])
    np.save(tmp_path / "b.npy", np.zeros((2, 3, 4)))
    assert not verl.recognise(tmp_path / "b.npy")


def test_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    tensors = batch()
    wide = torch.zeros((LAYERS, len(SOURCES), PROMPT + RESPONSE, 2 * TOP_K), dtype=torch.int16)
    view = wide.permute(1, 2, 0, 3)[..., ::2]
    view.copy_(tensors["routed_experts"])
    tensors["routed_experts"] = view
    tensors["attention_mask"] = tensors["attention_mask"].bool()
    torch.save(tensors, tmp_path / "a.pt")
    check(list(verl.read(tmp_path / "a.pt", ImportOptions())), tensors, labelled=False)


def test_rows_without_padding(tmp_path: Path) -> None:
    tensors = batch()
    rows = [tensors["attention_mask"][row].bool() for row in (0, 1, 2)]
    nested = {
        key: torch.nested.as_nested_tensor([tensors[key][row][rows[row]] for row in (0, 1, 2)], layout=torch.jagged)
        for key in ("routed_experts", "input_ids")
    }
    torch.save(nested, tmp_path / "a.pt")
    for records in (kept(verl.read(tmp_path / "a.pt", ImportOptions())), kept(verl.records_of_batch(nested))):
        for row, record in enumerate(records):
            assert np.array_equal(record.ids, tensors["routed_experts"][row][rows[row]].numpy())
            assert tokens_of(record) == tensors["input_ids"][row][rows[row]].tolist()
            assert record.num_tokens == int(rows[row].sum())


def test_rows_whose_last_token_has_no_route() -> None:
    ids, tokens = np.arange(12).reshape(1, 3, 2, 2), np.arange(4)
    made = {"routed_experts": list(ids), "input_ids": [tokens], "prompts": [tokens[:2]]}
    (record,) = kept(verl.records_of_batch(made))
    assert (len(record.ids), record.num_tokens, record.prompt_length) == (3, 4, 2)


def test_prompts_without_their_tokens() -> None:
    """The width of prompts follows from that of responses, and a row may end within its prompt."""
    tensors: dict[str, Any] = {key: batch()[key] for key in ("responses", "attention_mask", "routed_experts")}
    assert [record.prompt_length for record in kept(verl.records_of_batch(tensors))] == [4, 4, 6, 1]
    tensors["attention_mask"][0, 4:] = 0
    assert [record.prompt_length for record in kept(verl.records_of_batch(tensors))] == [2, 4, 6, 1]
    # A response behind nothing but padding.
    tensors["attention_mask"][0] = torch.arange(PROMPT + RESPONSE) >= PROMPT
    assert kept(verl.records_of_batch(tensors))[0].prompt_length == 0


def test_masked_tokens_inside_a_sequence_are_dropped() -> None:
    tensors = batch()
    tensors["attention_mask"][2, 8:10] = 0
    tensors["attention_mask"][2, 3] = 0
    check(list(verl.records_of_batch({"batch": tensors, "non_tensor_batch": LABELS, "meta_info": FACTS})), tensors)


def test_rows_of_padding_are_counted() -> None:
    assert kept(verl.records_of_batch({key: value[:0] for key, value in batch().items()})) == []
    # A field of this name beside the routes is not the batch.
    assert len(kept(verl.records_of_batch({**batch(), "batch": {}}))) == len(kept(verl.records_of_batch(batch())))
    tensors = {key: value[[3, 3, 0, 1]] for key, value in batch().items()}
    items = list(verl.records_of_batch(tensors))
    assert dropped(items) == {"padding rows": 2 * (PROMPT + RESPONSE) + 9 + 5, "empty sequences": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_experts": None}, "no 'routed_experts' in this batch; verl writes it with"),
        ({"routed_experts": torch.zeros(5, 16, 12)}, "float32; it should hold integers"),
        ({"routed_experts": torch.zeros(5, 16, 12, dtype=torch.int16)}, r"\[5, 16, 12\]; it should have 4 axes"),
        ({"attention_mask": torch.ones(5, 15, dtype=torch.int64)}, r"attention_mask .* \[5, 15\].*\[5, 16, ...\]"),
        ({"input_ids": "text"}, "input_ids is a str; it should be an array"),
    ],
)
def test_invalid_batches_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kept(verl.records_of_batch(batch() | change))
    with pytest.raises(InputError, match="where a batch should be"):
        kept(verl.records_of_batch([1]))


def test_damaged_dumps_are_read_or_refused(tmp_path: Path) -> None:
    with pretend(*pretended(TorchDataProto)):
        proto = pickle.dumps(TorchDataProto(ConsolidatedTensorDict(batch()), LABELS, FACTS))
    with pretend(*pretended(NumpyDataProto)):
        encoded = pickle.dumps(NumpyDataProto(TensorDict(batch()), LABELS, FACTS))
    arrays = io.BytesIO()
    np.savez(arrays, routed_experts=batch()["routed_experts"].numpy(), attention_mask=batch()["attention_mask"].numpy())
    for dump in (proto, encoded, saved(batch()), arrays.getvalue()):
        assert survives(dump, tmp_path / "a", lambda path: verl.read(path, ImportOptions()), 200) > 50
